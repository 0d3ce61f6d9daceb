"""A rank other than rank 0: a shard of the model and of its KV, and a loop that runs what rank 0 sends.

    python -m engine.parallel.rank RANK HOST:PORT        (the group's secret is in BATON_SECRET)

    join -> open -> connect -> load -> adapters -> pool -> step, replay, zero, copy, put, drop ... -> stop

The process ends at once when rank 0 has ended, even while it waits for a device. An error ends it too; rank 0 notices,
and the group has failed. A rank has no scheduler, sampler or prefix cache.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import ConfigError, Unavailable, describe
from common.kv_layout import KVLayout
from common.process.rank_channel import RankChannel, RankMessage
from common.process.watchdog import PERIOD_S, Heartbeat, Watchdog
from common.tls import TlsFiles
from engine.attention.base import AttentionBackend
from engine.attention.latent import LatentAttentionBackend
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.device import make_current
from engine.kv.kv_pool import TORCH_DTYPES, KVPool, LayerKV
from engine.kv.lease import BlockCopy
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.loader import ModelSource, open_model
from engine.models.spec import UNSHARDED, Shard
from engine.parallel.adapters import RankAdapters
from engine.parallel.collectives import Collectives, join_store, load_shard, unpack_step
from engine.parallel.graphs import DeviceStep, RankGraphs
from engine.parallel.host_pool import RankHostTier
from engine.parallel.rank_group import (
    ENGINE_CHANNEL,
    ENGINE_KINDS,
    JOIN_S,
    POLL_S,
    SECRET_VARIABLE,
    STOP_S,
    split_address,
)

_log = logging.getLogger(__name__)
EXIT_FAILED, EXIT_ABANDONED = 1, 5


class Rank:
    """One rank other than rank 0, which `channels` lead to: of each kind of ENGINE_KINDS one, in this order.

    `on_pool` is called with each new KV pool.
    """

    def __init__(
        self, rank: int, channels: Sequence[RankChannel], on_pool: Callable[[KVPool], None] = lambda _: None
    ) -> None:
        channel, host, adapters = channels
        self.heartbeat = Heartbeat()  # Beats once per message; idle while no message has come
        self.step_bound_s = 0.0  # Longest time of a step, from rank 0; 0 while it does not watch
        self._rank, self._channel, self._on_pool = rank, channel, on_pool
        self._host_tier, self._adapters = RankHostTier(host), RankAdapters(adapters)
        self._source: ModelSource | None = None
        self._model: Decoder | None = None
        self._shard = UNSHARDED
        self._collectives: Collectives | None = None
        self._device = torch.device("cpu")
        self._kv: KVPool | None = None
        self._cache: tuple[LayerKV, ...] = ()
        self._attention: AttentionBackend[Any] | None = None
        self._graphs = self._new_graphs()

    def run(self) -> None:
        """Runs the messages of rank 0 until it sends "stop". Raises Unavailable if rank 0 has ended.

        An error of this rank is sent to rank 0 and then raised.
        """
        answered = {
            "open": self._open,
            "connect": self._connect,
            "load": self._load,
            "adapters": self._open_adapters,
            "pool": self._create_pool,
            "host": self._open_host_tier,
            "capture": self._capture,
        }
        unanswered = {"step": self._step, "zero": self._zero, "copy": self._copy}
        unanswered |= {"put": self._adapters.put, "drop": self._adapters.drop}
        unanswered |= {"device_step": self._device_step, "replay": self._replay}
        self.heartbeat.begin()
        while (message := self._receive()).kind != "stop":
            if message.kind in unanswered:
                unanswered[message.kind](message)
                self._host_tier.on_handled()
                continue
            try:
                answered[message.kind](message)
            except Exception as error:
                self._channel.send("failed", error=describe(error))
                self._channel.wait_readable(STOP_S)  # rank 0 reads the message, then closes
                raise
            if message.kind != "open":  # rank 0 does not count it
                self._host_tier.on_handled()
            self._channel.send("done")

    def _receive(self) -> RankMessage:
        self.heartbeat.idle = True
        message = self._channel.receive()
        self.heartbeat.beats += 1
        self.step_bound_s = message.fields.get("bound_s", self.step_bound_s)
        self.heartbeat.idle = False
        return message

    def _open(self, message: RankMessage) -> None:
        """Opens device and model, so that an error of this rank shows before the ranks wait for each other."""
        fields = message.fields
        torch.set_num_threads(fields["threads"])
        self._device = torch.device(fields["device"])
        make_current(self._device)
        if self._device.type == "cuda":
            torch.set_float32_matmul_precision("highest")
        names = ("load_format", "weights_seed", "weights")
        self._source = open_model(Path(fields["model_dir"]), *(fields[name] for name in names))
        revision = self._source.revision(self._device)
        if revision != fields["revision"]:
            difference = f"revision {revision} instead of {fields['revision']}"
            text = f"rank {self._rank} has another model than rank 0 in {fields['model_dir']}: {difference}"
            raise ConfigError(text, field="model")

    @torch.inference_mode()
    def _connect(self, message: RankMessage) -> None:
        """Connects the devices of all ranks; all ranks do it at the same time."""
        fields = message.fields
        store = join_store(fields["host"], fields["store"])
        place = self._rank, fields["size"], self._device, self._channel.host
        self._collectives = Collectives(store, *place, one_shot=fields["one_shot"], graphs=fields["graphs"])

    @torch.inference_mode()
    def _load(self, message: RankMessage) -> None:
        fields, source, collectives = message.fields, self._source, self._collectives
        assert source is not None
        assert collectives is not None
        self._shard = shard = Shard(self._rank, fields["size"], fields["whole_experts"])
        dtype = TORCH_DTYPES[fields["dtype"]]
        self._model = load_shard(source, shard, collectives, fields["max_len"], self._device, dtype)

    def _open_adapters(self, message: RankMessage) -> None:
        assert self._model is not None
        self._adapters.open(self._model, self._shard, message, self._device)

    def _create_pool(self, message: RankMessage) -> None:
        self._kv, self._cache, self._attention = None, (), None  # frees the memory of the old pool
        self._graphs = self._new_graphs()  # the old graphs read the old pool
        assert self._model is not None
        layout = KVLayout(**message.fields["layout"]).of_rank(self._rank)
        self._kv = kv = KVPool(layout, message.fields["num_blocks"], self._device)
        spec, self._cache = self._model.spec, kv.layers()
        kind: type[TritonAttention] | type[TorchAttention] = TorchAttention
        if self._device.type == "cuda":
            kind = LatentAttentionBackend if spec.latent_dim else TritonAttention
        score: dict[str, Any] = {"scale": spec.scale, "softcap": spec.softcap}
        self._attention = kind(self._cache, spec.num_heads, spec.windows, kv.dummy_block, **score)
        self._on_pool(kv)

    def _new_graphs(self) -> RankGraphs:
        return RankGraphs(self._device, self._compute, self._adapters.wait_for_copies)

    def _open_host_tier(self, message: RankMessage) -> None:
        assert self._kv is not None
        fields = message.fields
        self._host_tier.open(self._kv, fields["num_host_blocks"], checksums=fields["checksums"])

    @torch.inference_mode()
    def _step(self, message: RankMessage) -> None:
        assert self._model is not None
        assert self._collectives is not None
        assert self._attention is not None
        tokens, rows = message.fields["tokens"], message.fields["rows"]
        joined = torch.empty(2 * tokens + (rows or 0), dtype=torch.int64, device=self._device)
        self._collectives.broadcast(joined)
        adapters, packed = self._adapters.of_step(message)
        metadata = self._attention.prepare(unpack_step(packed))
        ids, positions, row_indices = torch.split(joined, [tokens, tokens, rows or 0])
        context = ForwardContext(self._cache, self._attention, metadata, adapters=adapters)
        self._model.forward(ids, positions, context, None if rows is None else row_indices)

    @torch.inference_mode()
    def _device_step(self, message: RankMessage) -> None:
        self._graphs.run(message)

    @torch.inference_mode()
    def _capture(self, message: RankMessage) -> None:
        self._graphs.capture(message)

    @torch.inference_mode()
    def _replay(self, message: RankMessage) -> None:
        self._graphs.replay(message)

    def _compute(self, step: DeviceStep) -> None:
        """Queues the layers of a device step, whose numbers rank 0 broadcasts. A graph can record it."""
        assert self._model is not None
        assert self._collectives is not None
        assert self._attention is not None
        packed = step.empty_buffer(self._device)
        self._collectives.broadcast(packed)
        numbers = step.unpack(packed)
        metadata, adapters = numbers.metadata(step, self._attention), self._adapters.of_device_step(step, numbers)
        context = ForwardContext(self._cache, self._attention, metadata, adapters=adapters)
        rows = None if step.results is None else numbers.results.long()
        self._model.forward(numbers.tokens.long(), numbers.positions.long(), context, rows)

    @torch.inference_mode()
    def _zero(self, message: RankMessage) -> None:
        assert self._kv is not None
        self._kv.zero(np.frombuffer(message.payload, dtype=np.int32).tolist())

    @torch.inference_mode()
    def _copy(self, message: RankMessage) -> None:
        assert self._kv is not None
        pairs = np.frombuffer(message.payload, dtype=np.int32).reshape(-1, 2).tolist()
        self._kv.copy([BlockCopy(*pair) for pair in pairs])


def join(
    rank: int, master: str, kind: str = ENGINE_CHANNEL, timeout_s: float = JOIN_S, tls: TlsFiles | None = None
) -> RankChannel:
    """Opens a channel to rank 0. Raises Unavailable if rank 0 does not listen in time, Unauthenticated."""
    host, port = split_address(master)
    until, secret, reason = time.monotonic() + timeout_s, os.environ[SECRET_VARIABLE].encode(), ""
    while True:
        try:
            return RankChannel.connect(host, port, secret, "rank 0", kind, tls, rank=rank)
        except Unavailable as error:
            if time.monotonic() > until:
                raise
            if reason != error.message:
                reason = error.message
                _log.info("waiting for rank 0: %s", reason)
            time.sleep(POLL_S)


def exit_with(channel: RankChannel) -> None:
    """Ends this process when rank 0 has ended, even while it waits for a device or another rank."""

    def watch() -> None:
        while not channel.peer_closed():
            time.sleep(POLL_S)
        time.sleep(POLL_S)  # time to read the last message
        os._exit(EXIT_ABANDONED)

    threading.Thread(target=watch, name="rank-0", daemon=True).start()


def serve(rank: Rank) -> int:
    """Runs the rank, and ends this process if a step is stuck. Returns the exit code."""
    watchdog = Watchdog(10 * PERIOD_S)  # samples once per PERIOD_S
    watchdog.watch("rank", rank.heartbeat, lambda: rank.step_bound_s)
    watchdog.start()
    try:
        rank.run()
    except Unavailable as error:
        _log.error("%s", error.message)
        return EXIT_ABANDONED
    except Exception:
        _log.exception("this rank failed")
        return EXIT_FAILED
    finally:
        watchdog.stop()
    return 0


def main(argv: list[str]) -> int:
    number, master = int(argv[0]), argv[1]
    logging.basicConfig(level=logging.WARNING, format=f"rank {number}: %(levelname)s %(name)s: %(message)s")
    channels = [join(number, master, kind) for kind in ENGINE_KINDS]
    exit_with(channels[0])
    return serve(Rank(number, channels))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # skips clean-up: there is nothing to clean, and threads of torch may wait for other ranks
