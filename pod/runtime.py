"""A pod: one engine in its thread, one transfer node, one index entry, one gRPC server.

    create -> start -> ready -> draining -> stopped

The order matters twice. The generation is made before the transfer agent. At the end the pod leaves the index, refuses
new work, waits for running requests, and stops the engine before the agent and the memory that peers write to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import grpc

from common.auth import CallGuard, Signer
from common.block_hash import hash_blocks, matchable_blocks
from common.errors import InternalError, Overloaded, Unavailable
from common.pb import control_pb2_grpc, embedding_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from common.process.lifecycle import Lifecycle, LifecycleState, host_boot_id, log_phase
from common.rpc import RpcServer, trace_context_of
from common.settings.kinds import host_port
from common.settings.pod import PodConfig
from common.telemetry import MetricsServer
from common.tls import TlsFiles
from common.tracing.tracer import TraceContext, Tracer
from common.types import PodLoad, Role, SamplingParams, ValidRequest
from common.wire import PROTOCOL_VERSION, layout_to_pb, load_to_pb, pool_counts_to_pb, role_to_pb
from engine.engine import Engine
from engine.kv.ledger import BlockPin
from engine.loop import EngineLoop
from engine.schedule.outputs import StepResult
from kv_transfer.messages import TransferReport
from kv_transfer.node import TransferNode
from pod.adapters import PodAdapters
from pod.grammars import PodGrammars
from pod.health import BROKEN_DRAIN_S, EXIT_BROKEN, PodHealth
from pod.index import CacheEventRelay, PeerDiscovery, require_free_name
from pod.limits import PodLimits
from pod.monitoring.gpu import (
    GIL_SWITCH_INTERVAL_S,
    add_gpu_metrics,
    card_name,
    gpu_monitor,
    processor_id,
    require_mappable_kv,
)
from pod.monitoring.load import measure_load
from pod.monitoring.metrics import PodMetrics
from pod.monitoring.rates import PodRates
from pod.monitoring.watch import PodWatch
from pod.rank import BackendFactory, pod_backend, pool_memory, start_ranks
from pod.requests import RequestRegistry
from pod.role import PodRole, PodService, RoleSwitchReport, engine_config, local_chunk_tokens, served_name
from pod.services import ControlServicer, Embedder
from pod.warm_up import HotPrefixes, warm_up_from_peers
from prefix_index.publisher import IndexPublisher, mint_generation
from prefix_index.store import PodRecord

_log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


class PodRuntime:
    """The part of a pod that is independent of its role. Built by `create`, on the event loop.

    It owns the engine loop, the transfer node, the metrics, the health checks and the gRPC server.
    """

    def __init__(
        self,
        config: PodConfig,
        engine: Engine,
        cache_events: CacheEventRelay,
        generation: int,
        backend: BackendFactory,
        adapters: PodAdapters,
        tls: TlsFiles | None = None,
    ) -> None:
        self.config, self.adapters = config, adapters
        self.engine = engine
        self._cache_events = cache_events
        self.grammars = PodGrammars(engine)
        assert config.name is not None, "create() sets the name"
        self.name = config.name
        self.served_name = served_name(config)
        self.generation = generation
        self.address = ""
        self.requests = RequestRegistry[Any]()  # Those of the role's service that hold blocks or a place in the engine
        self.role = PodRole(config.role, self.name, self.requests, on_change=self._update_serving)
        self.computed_tokens = {"prefill": 0, "local": 0, "recompute": 0}
        self.limits = PodLimits(
            served_name=self.served_name,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            block_size=engine.layout.block_size,
            num_blocks=engine.pool.blocks_that_fit(engine.pool.num_blocks),
            find_adapter=adapters.find,
        )
        self.lifecycle = Lifecycle(self._drain, drain_s=config.drain_s)
        self.engine_loop = EngineLoop(engine, self._on_step)
        self._embedder = Embedder(engine, self.engine_loop, self._check_embedding)
        signer = Signer(config.secret.encode(), config.role.value, self.name, generation)
        self.transfer_node = TransferNode(
            backend=backend(config),
            memory=pool_memory(engine.kv),
            info=self.info,
            signer=signer,
            address=lambda: self.address,
            lend=self._lend,
            count_pages=engine.pool.prefix_pages,
            count_held=engine.pool.lendable_blocks,
            checksums=config.checksums,
            allow_tcp=config.allow_tcp,
            tls=tls,
            pair_probe_s=config.pair_probe_s,
        )
        self.metrics = PodMetrics(engine, self.transfer_node, self.load, self.computed_tokens, adapters)
        if tls is not None:
            self.metrics.metrics.certificates["cluster"] = tls.expires_at
        self.metrics.set_pod_info(config.role.value, self.served_name, metadata.version("baton-serving"))
        self._gpu, self._card = gpu_monitor(engine.device), card_name(engine.device)
        if self._gpu is not None:
            add_gpu_metrics(self.metrics.metrics, self._gpu)
        self._server = RpcServer(config.host, config.port, tls=tls, interceptors=(CallGuard(signer),))
        self._index: IndexPublisher | None = None
        self._peers: PeerDiscovery | None = None
        self._metrics_server: MetricsServer | None = None
        self._health = PodHealth(
            engine.pool,
            self.engine_loop,
            self.transfer_node,
            idle=lambda: not self.requests,
            damaged=self._on_pool_inconsistent,
            leave=self._drain_and_exit,
        )
        self.hot_prefixes = HotPrefixes()
        self.rates = PodRates(engine.scheduler.config.chunk_tokens)
        for tier in (engine.pool.disk_tier, engine.pool.shared_tier):
            if tier is not None:
                tier.compute_s = self.rates.prefill_estimate_s
        self._aio = asyncio.get_running_loop()
        self.watch = PodWatch(
            *(config.stuck_step_s, engine, self.engine_loop, self.transfer_node, self.rates),
            on_stuck=lambda loop: self.metrics.stuck_loops.labels(loop).inc(),
            on_change=lambda: self._aio.call_soon_threadsafe(self._update_serving),
        )
        self.exit_code = 0
        self.tracer = Tracer.open(config.traces, service=config.role.value, instance=self.name)

    @classmethod
    async def create(cls, config: PodConfig, *, backend: BackendFactory | None = None) -> PodRuntime:
        """Loads the model, determines name and generation, builds the transfer agent. Raises ConfigError.

        backend: makes the transfer backend; by default the one that config.transport names.
        """
        tls = TlsFiles.of_directory(config.tls_dir, config.role.value)
        settings = engine_config(config)
        if settings.resolve_device().type == "cuda":
            require_mappable_kv(config)
        cache_events = CacheEventRelay()
        load = functools.partial(Engine, start_ranks=functools.partial(start_ranks, config), **cache_events.callbacks())
        engine = await asyncio.to_thread(load, settings)
        adapters = PodAdapters(engine, config, served_name(config))
        await asyncio.to_thread(adapters.find_all)
        blocks, layout = engine.pool.counts().total, engine.layout
        size = f"{blocks * layout.block_bytes / (1 << 20):.0f} MiB"
        log_phase(f"KV pool: {blocks} blocks of {layout.block_size} tokens, {size}", done=True)
        name, scope = config.resolve_name(), engine.layout.scope
        config = dataclasses.replace(config, name=name)
        if config.redis is not None:
            own_address = config.advertise or host_port(config.host, config.port)
            await require_free_name(config.redis, scope, name, own_address, tls)
        generation = await mint_generation(config.redis, scope, name)
        make_backend = backend or functools.partial(pod_backend, members=engine.rank_group, layout=engine.layout)
        return cls(config, engine, cache_events, generation, make_backend, adapters, tls)

    # -- life ---------------------------------------------------------------------------------------------------------
    async def start(self, *services: PodService) -> None:
        """Starts serving. Health reports SERVING once the engine ran and the decode pods in the index are connected.

        The pod can take the roles of the services that it gets; the configured role is its first.
        """
        self.role.add_services(*services)
        add = self._server.add_servicer
        for service in services:
            add(type(service).register, service, service.full_name)
        add(transfer_pb2_grpc.add_TransferServicer_to_server, self.transfer_node.servicer, "baton.v1.Transfer")
        control = ControlServicer(self.engine.pool, lambda: self._index, self.switch_role, self.adapters)
        add(control_pb2_grpc.add_ControlServicer_to_server, control, "baton.v1.Control")
        add(embedding_pb2_grpc.add_EmbeddingServicer_to_server, self._embedder, "baton.v1.Embedding")
        self.engine_loop.start()
        port = await self._server.start()
        self.address = self.config.advertise or host_port(self.config.host, port)
        await self.transfer_node.start()
        log_phase("warms up")
        began = time.monotonic()
        grammars = asyncio.to_thread(self.grammars.prepare)
        await asyncio.gather(asyncio.wrap_future(self.engine_loop.call(self._warm_up)), grammars)
        log_phase(f"warm-up took {time.monotonic() - began:.1f} s", done=True)
        if self.config.metrics_port:
            self._metrics_server = self.metrics.metrics.start_metrics_server(self.config.metrics_port, self.config.host)
        if self.config.redis:
            self.metrics.warm_up_blocks.set(await warm_up_from_peers(self.config, self.engine, self.transfer_node))
            await self._join_index(self.config.redis)
        self._health.start()
        self.lifecycle.ready()
        self._update_serving()  # a signal may have begun the drain
        _log.info("%s pod %s serves %s on %s", self.role.current, self.name, self.served_name, self.address)

    async def _join_index(self, redis: str) -> None:
        layout = self.engine.layout
        if self.role.current is Role.PREFILL:
            log_phase("connects to the decode pods")
            self._peers = PeerDiscovery.of(redis, layout.scope, self.transfer_node.connect)
            await self._peers.start()
        record = PodRecord(
            pod=self.name,
            generation=self.generation,
            address=self.address,
            role=self.role.current,
            model=self.served_name,
            scope=layout.scope,
            fingerprint=layout.fingerprint,
            block_size=layout.block_size,
            max_model_len=self.engine.max_model_len,
            num_blocks=self.engine.pool.blocks_that_fit(self.engine.pool.num_blocks),
        )
        pool = self.engine.pool
        self._index = self._cache_events.index = IndexPublisher(
            *(redis, record, pool.cached_hashes, self.load),
            host_snapshot=pool.host_hashes,
            disk_snapshot=pool.disk_hashes,
            hot_prefixes=self.hot_prefixes.to_bytes,
        )
        self.metrics.index_registered = lambda: None if self._index is None else self._index.registered
        await self._index.start()

    async def switch_role(self, role: Role, drain_s: float = 0.0) -> RoleSwitchReport:
        """Changes the role of the running pod, see PodRole.switch. drain_s 0: the drain time of the settings.

        Raises ConfigError if the KV of this pod cannot be mapped by other pods.
        """
        self.require_ready()
        require_mappable_kv(dataclasses.replace(self.config, role=role))
        if role is Role.PREFILL and self.config.redis and self._peers is None:
            # The connections are made while the pod drains. A decode pod that is late is connected by its first prompt.
            self._peers = PeerDiscovery.of(self.config.redis, self.engine.layout.scope, self.transfer_node.connect)
            await self._peers.start(wait_s=0.0)
        try:
            report = await self.role.switch(role, drain_s or self.config.drain_s, self._take_role)
        finally:
            settled = self.role.target is None  # no other switch runs, which this call lost to
            if settled and self.role.current is not Role.PREFILL and self._peers is not None:
                peers, self._peers = self._peers, None
                await peers.stop()
        self.metrics.observe_role_switch(report, role, self.served_name, metadata.version("baton-serving"))
        if self._index is not None:
            self._index.set_role(role)
        return report

    async def _take_role(self, role: Role) -> None:
        """Sets what the engine does differently in the role. The pod has no work of another service."""
        scheduler = self.engine.scheduler
        tokens = local_chunk_tokens(self.config, role, self.engine.device.type)
        config = dataclasses.replace(scheduler.config, local_chunk_tokens=tokens)
        await asyncio.wrap_future(self.engine_loop.call(lambda: setattr(scheduler, "config", config)))

    def _warm_up(self) -> None:
        """Runs one short request on the engine thread, so that the first request does not pay for lazy set-up.

        Raises its error: a pod that cannot compute is never ready.
        """
        self.engine.warm_up()
        request = ValidRequest("warm-up", self.served_name, (0, 0), SamplingParams(temperature=0.0, max_tokens=2))
        self.engine.add(self.engine.new_sequence(request))
        while self.engine.has_work:
            result = self.engine.step()
            self.watch.warm_up_s = max(self.watch.warm_up_s, result.seconds)
            if error := next((output.error for output in result.outputs if output.error), None):
                raise error

    async def run(self, *services: PodService) -> None:
        """Starts the pod, serves until a signal, drains and stops.

        Raises SystemExit if a quarantine lasts too long (code 3) or a thread of the pod has ended (code 4). If a loop
        stays stuck, the watchdog ends the process at once (code 6).
        """
        self.lifecycle.install_signals()
        if self.engine.device.type == "cuda":
            sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
        try:
            await self.start(*services)
            self.watch.start()
            await self.lifecycle.wait_stopped()
        finally:
            self.watch.stop()
            await self.stop()
            _log.info("pod %s has stopped", self.name)
        if self.exit_code:
            raise SystemExit(self.exit_code)

    def _on_pool_inconsistent(self) -> None:
        self.metrics.intact.set(0)
        self._server.set_serving(False)

    @property
    def _takes_work(self) -> bool:
        """The pod is ready, keeps its role, its KV pool is consistent, and no loop is stuck."""
        ready = self.lifecycle.state is LifecycleState.READY and self.role.target is None
        return ready and self._health.intact and not self.watch.stuck

    def _update_serving(self) -> None:
        """Sets the health check after the start, and after a loop got stuck or recovered."""
        self._server.set_serving(self._takes_work)

    def _drain_and_exit(self, exit_code: int, reason: str) -> None:
        """Drains and ends this process, because only a new one can help.

        A drain under way is only changed by the first report that the pod is broken: it ends within BROKEN_DRAIN_S.
        """
        breaks = exit_code == EXIT_BROKEN and self.exit_code != EXIT_BROKEN
        if self.lifecycle.draining and not breaks:
            return
        _log.error("leaving: %s", reason)
        self.exit_code = exit_code
        self._server.set_serving(False)
        if broken := (breaks and self.role.started):  # no request can end by itself
            self.role.service.abort_all(Unavailable(f"pod {self.name} is broken: {reason}"))
        self.lifecycle.begin_drain(reason, BROKEN_DRAIN_S if broken else None)
        if broken:
            self.lifecycle.limit_drain(BROKEN_DRAIN_S)

    async def _drain(self) -> None:
        """Leaves the index, refuses new work, and waits until running requests and their hand-offs have ended."""
        self._server.set_serving(False)
        if self._index is not None:
            await self._index.stop()
        await self.requests.wait_idle()
        await self._embedder.requests.wait_idle()

    async def stop(self) -> None:
        """Ends running requests and frees everything. Idempotent."""
        await self._health.stop()
        for part in (self._peers, self._index):
            if part is not None:
                await part.stop()
        if self.role.started:
            leaving = Unavailable(f"pod {self.name} is stopping")
            self.role.service.abort_all(leaving)
            self._embedder.requests.fail_all(leaving)
            await asyncio.sleep(0)
        await self._server.stop(STOP_GRACE_S)
        try:
            await asyncio.to_thread(self.engine_loop.stop, STOP_GRACE_S)
        except InternalError as error:
            _log.error("%s", error.message)
        await self.transfer_node.stop(STOP_GRACE_S)
        await asyncio.to_thread(self.engine.close)
        if self._metrics_server is not None:
            self._metrics_server.stop()
            self._metrics_server = None
        tracer, self.tracer = self.tracer, None
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    # -- for services and peers ---------------------------------------------------------------------------------------
    def caller_span(self, context: grpc.aio.ServicerContext[Any, Any]) -> TraceContext | None:
        """Returns the caller's span, if this pod and the caller record spans."""
        if self.tracer is None:
            return None
        caller = trace_context_of(dict(context.invocation_metadata() or ()))
        return caller if caller is not None and caller.sampled else None

    def require_ready(self, *roles: Role) -> None:
        """Raises Unavailable unless the pod accepts new work, for one of these roles if there are any."""
        if self.lifecycle.state is not LifecycleState.READY:
            raise Unavailable(f"pod {self.name} is {self.lifecycle.state.name.lower()}")
        if not self._health.intact:
            raise Unavailable(f"pod {self.name} found its KV pool inconsistent")
        if self.watch.stuck:
            raise Unavailable(f"{self.watch.stuck} on pod {self.name}")
        if roles:
            self.role.require(*roles)

    def _check_embedding(self, request: ValidRequest, queued_tokens: int, deadline_s: float) -> None:
        self.require_ready(Role.PREFILL, Role.BOTH)
        self.limits.check(request, generates=False)
        self.require_deadline(self.requests.queued_tokens + queued_tokens + request.prompt_len, deadline_s)

    def require_deadline(self, queued_tokens: int, deadline_s: float) -> None:
        """Raises Overloaded if `queued_tokens` prompt tokens take longer than deadline_s at the measured rate."""
        if (need_s := self.rates.prefill_s(queued_tokens)) > deadline_s:
            ahead = f"{queued_tokens} prompt tokens are ahead, about {need_s:.1f} s of work"
            raise Overloaded(f"{ahead}, and the request has {deadline_s:.1f} s", retry_after_s=need_s - deadline_s)

    def prompt_hashes(self, request: ValidRequest, max_blocks: int = sys.maxsize) -> list[bytes]:
        """Returns the hashes of the prompt's leading full blocks that a cache may supply, of at most max_blocks."""
        fingerprint, size = self.engine.layout.fingerprint, self.engine.layout.block_size
        tokens = request.context_ids[: min(max_blocks, matchable_blocks(request.context_len, size)) * size]
        extra = {"salt": request.cache_salt, "adapter": request.adapter}
        return hash_blocks(tokens, fingerprint=fingerprint, block_size=size, **extra)

    def info(self) -> transfer_pb2.InfoResponse:
        """Returns the authoritative description of this pod. Any thread."""
        state = self.lifecycle.state
        return transfer_pb2.InfoResponse(
            protocol_version=PROTOCOL_VERSION,
            pod=self.name,
            generation=self.generation,
            role=role_to_pb(self.role.current),
            first_role=role_to_pb(self.config.role),
            layout=layout_to_pb(self.engine.layout),
            fingerprint=self.engine.layout.fingerprint,
            max_model_len=self.engine.max_model_len,
            num_blocks=self.engine.pool.num_blocks,
            vocab_size=self.engine.vocab_size,
            pid=os.getpid(),
            boot_id=host_boot_id(),
            processor=processor_id(self.engine.device),
            card=self._card,
            ready=self._takes_work,
            stuck=self.watch.stuck,
            step_bound_s=self.watch.step_bound_s(),
            draining=state is LifecycleState.DRAINING or self.role.target is not None,
            version=metadata.version("baton-serving"),
            blocks=pool_counts_to_pb(self.engine.pool.counts()),
            states=None if (states := self.engine.pool.state_counts()) is None else pool_counts_to_pb(states),
            computed=transfer_pb2.ComputedTokens(**self.computed_tokens),
            served_name=self.served_name,
            load=load_to_pb(self.load()),
            activity=self.metrics.activity(None if self._gpu is None else self._gpu.reading()),
            pairs=self.transfer_node.pair_stats(),
            pulls=self.role.current is Role.PREFILL and self.config.pulls_prefixes,
            late_targets=self.role.current is Role.PREFILL,
            adapters=self.adapters.state(),
        )

    def load(self) -> PodLoad:
        """Returns the load and the rates that routing weighs."""
        draining = self.lifecycle.draining
        measured = measure_load(self.engine, self.rates, self.requests, self._embedder, draining=draining)
        return dataclasses.replace(measured, **self.adapters.warm())

    def record_hand_off(self, report: TransferReport, seconds: float, exemplar: dict[str, str] | None) -> None:
        """Counts a hand-off that this pod completed as the sender, `seconds` after its first push."""
        self.metrics.observe_hand_off(report, seconds, exemplar)
        layout, left = self.engine.layout, report.blocks - report.delivered_before_finish
        left = max(0, left - layout.state_pages) // self.engine.pool.pages_per_block  # a state moves with every prompt
        self.rates.observe_hand_off(left * layout.block_size, report.exposed_s)

    def _lend(self, hashes: Sequence[bytes], first: int) -> BlockPin | None:
        """Pins cached blocks of this hash chain for a pod that pulls them."""
        pin = None if self.lifecycle.draining else self.engine.pool.pin_prefix(hashes, first)
        if pin is not None:
            self.metrics.lent_blocks.inc(len(pin.blocks))
        return pin

    # -- engine thread ------------------------------------------------------------------------------------------------
    def _on_step(self, result: StepResult) -> None:
        try:
            self._count(result)
        except Exception:
            _log.exception("the metrics of a step could not be updated")
        self._embedder.on_step(result)
        self.role.service.on_step(result)

    def _count(self, result: StepResult) -> None:
        self.computed_tokens["local" if self.role.current is Role.DECODE else "prefill"] += result.num_prompt_tokens
        self.computed_tokens["recompute"] += result.num_recomputed_tokens
        prompt = result.num_prompt_tokens + result.num_recomputed_tokens
        self.rates.observe_step(prompt, result.num_decode_tokens, result.seconds)
        self.metrics.observe_step(result)
        self.hot_prefixes.count(result)
