"""Spans of one traced request on a decode pod, recorded when the pod holds nothing of it any more.

All are children of the gateway's attempt:
decode.reserve      until the answer to Reserve
decode.receive      until every block and the commit arrived; only for a remote prefill
decode.run          in the engine, until the end
"""

from __future__ import annotations

import time

from common.tracing.context import TraceContext
from common.tracing.tracer import Attributes, Tracer
from decode_service.hand_off import DecodeHandOff


def record_spans(tracer: Tracer, parent: TraceContext, hand_off: DecodeHandOff) -> None:
    """Records the spans of a hand-off below `parent`, the caller's span."""
    now = time.monotonic()
    request, running = hand_off.request, hand_off.running_since
    named: Attributes = {"baton.request_id": request.request_id, "baton.local": hand_off.local}
    reserved = hand_off.reserved_at or now
    tracer.record_span(
        "decode.reserve", parent.new_child(), parent, hand_off.arrived_at, reserved, named, kind="server"
    )
    if not hand_off.local:
        tracer.record_span("decode.receive", parent.new_child(), parent, reserved, running or now)
    if running is not None and hand_off.seqs:
        finishes = ",".join(str(seq.finish_reason) for seq in hand_off.seqs if seq.finish_reason is not None)
        counted: Attributes = {
            "baton.prompt_tokens": request.prompt_len,
            "baton.output_tokens": sum(seq.num_output for seq in hand_off.seqs),
            "baton.preemptions": sum(seq.preemptions for seq in hand_off.seqs),
            "baton.finish": finishes or None,
        }
        tracer.record_span("decode.run", parent.new_child(), parent, running, now, counted)
