"""The gateway's end of a pod's token stream: a fault in one request does not end the stream of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from common.auth import GATEWAY, Signer
from common.errors import BatonError, InternalError, Unavailable
from common.pb import decode_pb2, types_pb2
from gateway.pods import pod as pod_module
from gateway.pods.pod import Pod
from tests.rigs.waiting import until


class Call:
    """A call of Tokens. `batches` gives its batches, or the exception with which it ends."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[decode_pb2.TokenBatch | Exception] = asyncio.Queue()

    async def write(self, message: decode_pb2.TokensRequest) -> None:
        pass

    async def initial_metadata(self) -> tuple[()]:
        return ()

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        pass

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> decode_pb2.TokenBatch:
        item = await self.batches.get()
        if isinstance(item, Exception):
            raise item
        return item


class Sink:
    """Records the tokens of a request. It raises at each delta if it is `broken`."""

    def __init__(self, *, broken: bool = False, on_lost: Callable[[], None] = lambda: None) -> None:
        self.got = 0
        self.lost: list[BatonError] = []
        self._broken, self._on_lost = broken, on_lost

    def on_delta(self, delta: decode_pb2.SequenceDelta) -> None:
        if self._broken:
            raise ValueError("the fault of one request")
        self.got += 1

    def on_stream_lost(self, error: BatonError) -> None:
        self.lost.append(error)
        self._on_lost()

    def progress(self, suspicion: Any, *, queued: bool) -> None:
        return None

    def on_stalled(self, error: BatonError) -> None:
        pass


class Stream:
    """A pod with an open token stream."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.pod = Pod(
            "127.0.0.1:1", Signer(b"s" * 32, GATEWAY, "g", 1), model="m", static=True, on_change=lambda: None
        )
        self.pod.decode = SimpleNamespace(Tokens=self._open)  # type: ignore[assignment]
        self.pod._can_stream.set()

    def _open(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]

    def send(self, *request_ids: str) -> None:
        deltas = [
            decode_pb2.SequenceDelta(request_id=name, finish_reason=types_pb2.FINISH_REASON_STOP)
            for name in request_ids
        ]
        self.calls[-1].batches.put_nowait(decode_pb2.TokenBatch(number=1, deltas=deltas))


@pytest_asyncio.fixture
async def stream(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stream]:
    monkeypatch.setattr(pod_module, "_BACKOFF_S", (0.01, 0.01))
    opened = Stream()
    task = asyncio.create_task(opened.pod._keep_token_stream())
    await until(lambda: opened.pod.token_stream_up)
    yield opened
    assert not task.done()
    task.cancel()
    await opened.pod.stop()


async def test_a_fault_in_one_request_fails_only_this_request(stream: Stream) -> None:
    broken, other = Sink(broken=True), Sink()
    stream.pod.subscribe("broken", broken)
    stream.pod.subscribe("other", other)
    stream.send("broken", "other")
    stream.send("broken", "other")
    await until(lambda: other.got == 2)
    assert [type(error) for error in broken.lost] == [InternalError]
    assert not other.lost
    assert len(stream.calls) == 1
    assert stream.pod.token_stream_up


async def test_an_unexpected_exception_of_the_stream_opens_another_one(stream: Stream) -> None:
    def raises() -> None:
        raise ValueError("a fault")

    sinks = [Sink(on_lost=raises), Sink()]
    for number, sink in enumerate(sinks):
        stream.pod.subscribe(str(number), sink)
    stream.calls[0].batches.put_nowait(ValueError("a fault"))
    await until(lambda: len(stream.calls) == 2 and stream.pod.token_stream_up)
    assert [[type(error) for error in sink.lost] for sink in sinks] == [[Unavailable]] * 2
    again = Sink()
    stream.pod.subscribe("again", again)
    stream.send("again")
    await until(lambda: again.got == 1)
