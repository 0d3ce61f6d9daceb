"""The spans of one traced prefill, recorded when nothing of it is left on the pod.

prefill.request                     child of the gateway's attempt
    prefill.pull                    of a prefix, where another pod held one
    prefill.queue
    prefill.chunk                   for each step
    transfer.hand_off               from the first push, or the last chunk, to the commit
        transfer.push (one for each chunk's blocks)
"""

from __future__ import annotations

import time

from common.errors import BatonError
from common.trace_context import TraceContext
from common.tracing import Tracer
from kv_transfer.messages import TransferReport
from prefill_service.hand_off import HandOff


def record_prefill(tracer: Tracer, parent: TraceContext, hand_off: HandOff) -> None:
    """parent: the caller's span."""
    own, seq, end = parent.child(), hand_off.seq, hand_off.ended_with
    over = next((entry.at for entry in hand_off.trace if entry.kind == "end"), time.monotonic())
    chunks = [entry for entry in hand_off.trace if entry.kind == "chunk"]
    queued = hand_off.arrived
    if hand_off.fetched is not None:
        pod, queued = hand_off.fetched
        tracer.record("prefill.pull", own.child(), own, hand_off.arrived, queued, {"baton.pod": pod})
    if chunks:
        tracer.record("prefill.queue", own.child(), own, queued, chunks[0].start)
    done = seq.cached_tokens
    for chunk in chunks:
        counted = {"baton.tokens": chunk.value - done, "baton.computed_tokens": chunk.value}
        tracer.record("prefill.chunk", own.child(), own, chunk.start, chunk.at, counted)
        done = chunk.value
    if hand_off.pushes or isinstance(end, TransferReport):
        _record_transfer(tracer, own, hand_off, over)
    tracer.record(
        "prefill.request",
        own,
        parent,
        hand_off.arrived,
        over,
        {
            "baton.request_id": seq.request_id,
            "baton.prompt_tokens": seq.prompt_len,
            "baton.cached_tokens": seq.cached_tokens,
            "baton.preemptions": seq.preemptions,
        },
        kind="server",
        error=end.message if isinstance(end, BatonError) else None,
    )


def _record_transfer(tracer: Tracer, parent: TraceContext, hand_off: HandOff, over: float) -> None:
    own, end = parent.child(), hand_off.ended_with
    pushes = sorted(hand_off.pushes.items())
    computed = max((entry.at for entry in hand_off.trace if entry.kind in ("chunk", "first_token")), default=over)
    start = min([computed, *(push.start for _, push in pushes)])
    for first, push in pushes:
        blocks = {"baton.first_block": first, "baton.blocks": push.blocks}
        tracer.record("transfer.push", own.child(), own, push.start, push.end or over, blocks)
    to = "" if hand_off.target is None else hand_off.target.pod
    found: dict[str, str | int | float] = {"baton.decode_pod": to}
    if isinstance(end, TransferReport):
        found |= {"baton.blocks": end.blocks, "baton.bytes": end.bytes, "baton.transport": end.transport}
        found |= {"baton.exposed_s": end.exposed_s, "baton.blocks_early": hand_off.delivered_before_last_chunk()}
    error = end.message if isinstance(end, BatonError) else None
    tracer.record("transfer.hand_off", own, parent, start, over, found, kind="client", error=error)
