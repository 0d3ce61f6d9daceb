"""Spans of one traced prefill, recorded when the pod holds nothing of it any more.

prefill.request                     child of the gateway's attempt
    prefill.pull                    pull of a prefix from another pod
    prefill.queue
    prefill.chunk                   one per step
    transfer.hand_off               from the first push or the last chunk to the commit
        transfer.push               one per chunk's blocks
"""

from __future__ import annotations

import time

from common.errors import BatonError
from common.tracing.context import TraceContext
from common.tracing.tracer import Attributes, Tracer
from kv_transfer.messages import TransferReport
from prefill_service.hand_off import PrefillHandOff


def record_spans(tracer: Tracer, parent: TraceContext, hand_off: PrefillHandOff) -> None:
    """Records the spans of a hand-off below `parent`, the caller's span."""
    request_span, seq, outcome = parent.new_child(), hand_off.seq, hand_off.outcome
    end_at = next((entry.at for entry in hand_off.history if entry.kind == "end"), time.monotonic())
    chunks = [entry for entry in hand_off.history if entry.kind == "chunk"]

    def record(name: str, start: float, end: float, attributes: Attributes | None = None) -> None:
        tracer.record_span(name, request_span.new_child(), request_span, start, end, attributes)

    queued = hand_off.arrived_at
    if hand_off.pulled_from is not None:
        pod, queued = hand_off.pulled_from
        record("prefill.pull", hand_off.arrived_at, queued, {"baton.pod": pod})
    if chunks:
        record("prefill.queue", queued, chunks[0].start)
    done = seq.cached_tokens
    for chunk in chunks:
        counted: Attributes = {"baton.tokens": chunk.value - done, "baton.computed_tokens": chunk.value}
        record("prefill.chunk", chunk.start, chunk.at, counted)
        done = chunk.value
    if hand_off.pushes or isinstance(outcome, TransferReport):
        _record_transfer(tracer, request_span, hand_off, end_at)
    named: Attributes = {
        "baton.request_id": seq.request_id,
        "baton.prompt_tokens": seq.prompt_len,
        "baton.cached_tokens": seq.cached_tokens,
        "baton.preemptions": seq.preemptions,
    }
    error = outcome.message if isinstance(outcome, BatonError) else None
    tracer.record_span(
        "prefill.request", request_span, parent, hand_off.arrived_at, end_at, named, kind="server", error=error
    )


def _record_transfer(tracer: Tracer, parent: TraceContext, hand_off: PrefillHandOff, end_at: float) -> None:
    span, outcome = parent.new_child(), hand_off.outcome
    pushes = sorted(hand_off.pushes.items())
    computed = max((entry.at for entry in hand_off.history if entry.kind in ("chunk", "first_token")), default=end_at)
    start = min([computed, *(push.start for _, push in pushes)])
    for first, push in pushes:
        blocks: Attributes = {"baton.first_block": first, "baton.blocks": push.blocks}
        tracer.record_span("transfer.push", span.new_child(), span, push.start, push.end or end_at, blocks)
    attributes: dict[str, str | int | float] = {
        "baton.decode_pod": "" if hand_off.target is None else hand_off.target.pod
    }
    if isinstance(outcome, TransferReport):
        attributes |= {
            "baton.blocks": outcome.blocks,
            "baton.bytes": outcome.bytes,
            "baton.transport": outcome.transport,
            "baton.exposed_s": outcome.exposed_s,
            "baton.blocks_early": outcome.delivered_before_finish,
        }
    error = outcome.message if isinstance(outcome, BatonError) else None
    tracer.record_span("transfer.hand_off", span, parent, start, end_at, attributes, kind="client", error=error)
