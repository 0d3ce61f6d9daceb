"""How running pods exchange KV, by their own counters: one finding per pod and per pair of pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc

from cli.doctor.finding import Finding, Level
from common.errors import BatonError
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel
from common.wire import role_from_pb
from prefix_index.reader import IndexReader

INFO_S = 3.0


async def check_pods(redis_url: str | None, addresses: Sequence[str]) -> AsyncIterator[Finding]:
    """Checks the pods at these addresses and the pods in the index, concurrently."""
    known = dict.fromkeys([*addresses, *await _indexed(redis_url)])
    answers = await asyncio.gather(*(_ask(address) for address in known))
    for address, answer in zip(known, answers, strict=True):
        for finding in _of_pod(address, answer):
            yield finding


async def _indexed(redis_url: str | None) -> list[str]:
    """Addresses of the pods in the index; none if it does not answer, which another check reports."""
    if redis_url is None:
        return []
    reader = IndexReader(redis_url)
    try:
        return [status.record.address for status in await reader.pods()]
    except BatonError:
        return []
    finally:
        await reader.close()


async def _ask(address: str) -> transfer_pb2.InfoResponse | str:
    connection = open_channel(address)
    try:
        return await transfer_pb2_grpc.TransferStub(connection).Info(transfer_pb2.InfoRequest(), timeout=INFO_S)
    except grpc.aio.AioRpcError as e:
        return e.details() or e.code().name
    finally:
        await connection.close(None)


def _of_pod(address: str, answer: transfer_pb2.InfoResponse | str) -> list[Finding]:
    if isinstance(answer, str):
        return [Finding(f"pod at {address}", Level.WARN, answer, "the pod has ended, or this machine cannot reach it")]
    state = "ready" if answer.ready else "draining" if answer.draining else "not ready"
    level = Level.OK if answer.ready else Level.WARN
    pod = Finding(f"pod {answer.pod}", level, f"{role_from_pb(answer.role)} at {address}, {state}")
    return [pod, *(_of_pair(answer.pod, pair) for pair in answer.pairs)]


def _of_pair(pod: str, pair: transfer_pb2.Pair) -> Finding:
    """The finding about the KV that a pod sent to another one."""
    what = f"{pod} -> {pair.pod}"
    by = f"{pair.transport} ({pair.transport_source})" if pair.transport else "not connected"
    detail = f"{by}, {pair.gb_s:.2f} GB/s, {pair.transfers} hand-offs and {pair.pulls} pulls of {pair.blocks} blocks"
    if pair.transfers:
        detail += f", {1e3 * pair.exposed_s / pair.transfers:.1f} ms exposed each"
    if pair.failures:
        return Finding(what, Level.WARN, f"{detail}, {pair.failures} failed", "the pods' logs say why")
    return Finding(what, Level.OK, detail)
