"""The gateway process: an HTTP server (uvicorn) and a gRPC server, from start until a signal ends it.

    start     looks for pods, listens
    SIGTERM   readiness is 503; for drain_delay_s new requests are served, and responses close their connections
    drain     new requests get 503; running ones continue for at most drain_s
    stop      requests that still run get an error; connections close, then the `Gateway`

Liveness depends only on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import resource
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import uvicorn

from common.errors import ConfigError
from common.logs import setup_logs
from common.model.directory import default_served_name, resolve_model
from common.pb import inference_pb2_grpc
from common.process.lifecycle import Lifecycle, log_phase
from common.process.watchdog import Watchdog
from common.rpc import RpcServer
from common.settings.gateway import GatewayConfig
from common.settings.kinds import host_port, is_loopback
from common.tls import TlsFiles
from common.tracing.tracer import Tracer
from gateway.admission.client_limits import MAX_ALL_SLOW, ClientLimits
from gateway.admission.key_store import KeyRing
from gateway.api.grpc.limits import CallLimit, connection_options
from gateway.api.grpc.servicer import InferenceServicer
from gateway.api.http.protocol import BoundedHttpProtocol, WriteBatcher
from gateway.api.openai.responses.store import ResponseStore
from gateway.app import build_app
from gateway.dashboard.history import MetricsHistory
from gateway.pods.endpoint_slices import EndpointSliceWatcher, KubernetesApi
from gateway.serving.gateway import Gateway
from gateway.serving.models import TextProcessor
from gateway.telemetry.demand import DemandSampler
from prefix_index.demand import DemandPublisher
from prefix_index.reader import IndexReader

STOP_S = 15.0  #: Longest time of `GatewayServer.stop`.
GRPC_DRAIN_DELAY_S = 0.25  #: After GOAWAY, gRPC calls that were on their way are served for this long.
GRPC_STOP_S = 0.5  #: Aborted gRPC calls have this long to send their error.
GC_THRESHOLD = 20_000  #: New objects after which Python's garbage collector examines the youngest generation.
MAX_FILES = 1 << 16  #: Open files that a gateway asks the system for.
RESERVED_FILES = 256  #: Open files that stay free for pods and Redis.
GRPC_SHARE = 4  #: gRPC clients get one in this many open files, if gRPC is on.
_log = logging.getLogger(__name__)


class _UvicornServer(uvicorn.Server):
    """uvicorn without signal handlers, which are those of Lifecycle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()  # set when connections are accepted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    def close_after_responses(self) -> None:
        """Makes every response close its connection from now on."""
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)  # uvicorn builds the default headers from these once a second
        self.server_state.default_headers = [*self.server_state.default_headers, close]

    def close_idle(self) -> None:
        """Closes idle connections now, and the others after their response."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a bound TCP socket; port 0 chooses a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given. Without it the first token, the second packet of a
    # response, waits 40 ms for the client's delayed acknowledgement of the headers, the first packet.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by accepted sockets on Linux
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as e:
        sock.close()
        raise ConfigError(f"port: cannot listen on {host_port(host, port)}: {e.strerror}", field="port") from e
    return sock


def make_gateway(config: GatewayConfig) -> Gateway:
    """Returns the `Gateway` for a configuration. The model directories need no weights.

    Raises ConfigError, also if the configuration names no source of pods: that gateway would never be ready.
    """
    if config.redis is None and not config.pods and config.discovery != "k8s":
        expected = "--redis URL (the prefix index), --pods HOST:PORT,..., or --discovery k8s inside a cluster"
        raise ConfigError(f"pods: no source of pods; expected {expected}", field="pods")
    texts, began = [], time.monotonic()
    for name, model in config.served_models().items():
        model_dir = resolve_model(model, weights=False)
        variables = json.loads(config.default_chat_template_kwargs or "{}")
        names = ("tool_parser", "reasoning_parser", "chat_template", "generation_config", "reranker")
        options = {option: getattr(config, option) for option in names}
        text = TextProcessor.load(
            name or default_served_name(model), model_dir, template_variables=variables, **options
        )
        texts.append(text)
    log_phase(f"tokenizer and chat template: {time.monotonic() - began:.1f} s", done=True)
    index = None if config.redis is None else IndexReader(config.redis)
    instance = f"{socket.gethostname()}:{config.port}"
    tracer = Tracer.open(config.traces, service="gateway", instance=instance, sample=config.trace_sample)
    return Gateway(config, texts, index, KeyRing(config.api_keys, config.redis, config.api_key), tracer)


class GatewayServer:
    """The HTTP and gRPC servers of one gateway, and its watch of Kubernetes."""

    def __init__(self, config: GatewayConfig, gateway: Gateway, *, api: KubernetesApi | None = None) -> None:
        """`api` is the Kubernetes API for config.discovery "k8s"; None uses that of this process's cluster."""
        self._config = config
        self.gateway = gateway
        self.metrics_history = MetricsHistory.of_gateway(gateway)
        self.port = 0
        self.grpc_port: int | None = None  #: None if gRPC is off.
        self._http: _UvicornServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._grpc: RpcServer | None = None
        self._grpc_leaving: asyncio.Task[None] | None = None
        self._endpoints: EndpointSliceWatcher | None = None
        if config.discovery == "k8s":
            api = api or KubernetesApi.in_cluster()
            self._endpoints = EndpointSliceWatcher(api, config.k8s_services, self._set_endpoints)
        self._tls: TlsFiles | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self._tls = TlsFiles(Path(config.tls_cert), Path(config.tls_key), setting="tls_cert")
            gateway.metrics.base.certificates["clients"] = self._tls.expires_at
        self._demand: DemandPublisher | None = None
        if config.redis is not None:
            models = list(gateway.models)
            sampler = DemandSampler(gateway.metrics, len(models), lambda: sum(m.gate.waiting for m in models))
            self._demand = DemandPublisher(config.redis, secrets.token_hex(8), sampler.record)
        self._responses: ResponseStore | None = None
        if config.redis is not None and config.response_ttl_s and config.response_memory:
            ttl_s, most = config.response_ttl_s, config.response_memory
            self._responses = ResponseStore(config.redis, ttl_s=ttl_s, max_bytes_per_tenant=most)

    async def start(self) -> None:
        """Starts to listen. Returns when requests are accepted. Raises ConfigError."""
        config = self._config
        sock = listening_socket(config.host, config.port)
        try:
            if config.grpc_port:
                calls = self._client_limits()  # counts calls, and HTTP's limits count connections
                self._grpc = RpcServer(
                    config.host,
                    config.grpc_port,
                    config.max_body_bytes,
                    tls=self._tls,
                    interceptors=(CallLimit(calls),),
                    options=connection_options(calls, _max_files() // GRPC_SHARE),
                )
                add = inference_pb2_grpc.add_InferenceServicer_to_server
                self._grpc.add_servicer(add, InferenceServicer(self.gateway), "baton.v1.Inference")
                self.grpc_port = await self._grpc.start()
        except ConfigError:
            sock.close()
            raise
        self.port = sock.getsockname()[1]
        await self.gateway.start()
        await self.metrics_history.start()
        if self._demand is not None:
            await self._demand.start()
        for model in self.gateway.models:
            model.pod_table.on_change(self._on_change)
        if self._endpoints is not None:
            await self._endpoints.start()
        options = uvicorn.Config(
            build_app(self.gateway, self.metrics_history, self._responses),
            http=functools.partial(  # type: ignore[arg-type]  # uvicorn only calls it
                BoundedHttpProtocol, batcher=WriteBatcher(), limits=self._client_limits()
            ),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        if self._tls is not None:
            options.load()
            options.ssl = self._tls.server_context()
        self._http = _UvicornServer(options)
        self._http_task = asyncio.get_running_loop().create_task(self._http.serve(sockets=[sock]))
        accepting = asyncio.ensure_future(self._http.accepting.wait())
        await asyncio.wait({accepting, self._http_task}, return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        if self._http_task.done():
            self._http_task.result()
            raise ConfigError("port: the HTTP server did not start", field="port")
        scheme = "http" if self._tls is None else "https"
        address = f"{scheme}://{host_port(config.host, self.port)}"
        _log.info("gateway listens on %s (gRPC: %s)", address, self.grpc_port or "off")
        if self._tls is None and not is_loopback(config.host):
            _log.warning("keys and prompts of clients are not encrypted: give --tls-cert, or put a TLS proxy before")

    def _client_limits(self) -> ClientLimits:
        files = _max_files()
        free = files - RESERVED_FILES - (files // GRPC_SHARE if self._config.grpc_port else 0)
        return ClientLimits(
            self.gateway.metrics,
            connections=self._config.max_client_connections,
            slow=self._config.max_client_slow,
            all_connections=max(free, files // 2),
            all_slow=min(MAX_ALL_SLOW, self._config.max_inflight),
        )

    def _on_change(self) -> None:
        if self._grpc is not None:
            self._grpc.set_serving(self.gateway.ready)

    def _set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        for model in self.gateway.models:
            model.pod_table.set_endpoints(endpoints)

    async def drain(self) -> None:
        """Announces the end to clients for drain_delay_s, then refuses new requests and waits for the running ones."""
        if self._config.drain_delay_s:
            self.gateway.leaving = True
            self._on_change()
            if self._http is not None:
                self._http.close_after_responses()
            await asyncio.sleep(self._config.drain_delay_s)
            if self._http is not None:
                self._http.close_idle()
            if self._grpc is not None:  # sends GOAWAY: clients send later calls to another gateway by themselves
                self._grpc_leaving = asyncio.get_running_loop().create_task(self._grpc.stop(self._config.drain_s))
                await asyncio.sleep(GRPC_DRAIN_DELAY_S)
        drained = asyncio.ensure_future(self.gateway.drain())
        await asyncio.sleep(0)
        self._on_change()
        await drained

    async def stop(self) -> None:
        """Aborts running requests with an error for their clients, and closes everything, within STOP_S."""
        closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.wait({closing}, timeout=STOP_S)
        if closing.done():
            closing.result()
        else:
            closing.cancel()
            _log.error("the gateway did not close within %.0f s", STOP_S)

    async def _close(self) -> None:
        if self._endpoints is not None:
            await self._endpoints.stop()
        self.gateway.abort_requests()  # before connections close, so that each stream can end with its error
        if self._grpc is not None:
            await self._grpc.stop(GRPC_STOP_S)
        if self._grpc_leaving is not None:
            await asyncio.wait({self._grpc_leaving}, timeout=GRPC_STOP_S)
            self._grpc_leaving.cancel()
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await self._http_task
        if self._responses is not None:
            await self._responses.close()
        if self._demand is not None:
            await self._demand.stop()
        await self.metrics_history.stop()
        await self.gateway.stop()
        if self.gateway.tracer is not None:
            await asyncio.to_thread(self.gateway.tracer.close)


def _tune_gc() -> None:
    # With its defaults, Python's garbage collector takes 5% of the time. Objects loaded at the start are never garbage,
    # and streams leave no reference cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)


def _max_files() -> int:
    """Returns the limit of open files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_FILES if files == resource.RLIM_INFINITY else files


def _raise_file_limit() -> None:
    """Raises the limit of open files. Shells often allow 1024, which a thousand idle connections would use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(config: GatewayConfig) -> None:
    """Runs a gateway until SIGTERM or SIGINT. Raises ConfigError."""
    setup_logs(config.log_level, config.log_format)
    _raise_file_limit()
    server = GatewayServer(config, make_gateway(config))
    lifecycle = Lifecycle(server.drain, drain_s=config.drain_s)
    lifecycle.install_signals()
    stuck_loops = server.gateway.metrics.stuck_loops
    watchdog = Watchdog(config.stuck_step_s, on_stuck=lambda loop: stuck_loops.labels(loop).inc())
    try:
        await server.start()
        _tune_gc()
        watchdog.watch_event_loop()
        watchdog.start()
        lifecycle.ready()
        await lifecycle.wait_stopped()
    finally:
        watchdog.stop()
        await server.stop()
