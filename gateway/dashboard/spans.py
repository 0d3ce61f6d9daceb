"""The phases of one request, computed from its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Descriptions of the transports that kv_transfer reports.
_TRANSPORTS = {
    "cma": "shared memory (cma)",
    "shm": "shared memory (shm)",
    "cuda_ipc": "NVLink or PCIe (cuda_ipc)",
    "cuda": "CUDA copies",
    "rdma": "RDMA",
    "tcp": "TCP",
    "staged_shm": "host memory, shared (staged_shm)",
    "staged_cma": "host memory (staged_cma)",
    "staged_rdma": "host memory and RDMA (staged_rdma)",
    "staged_tcp": "host memory and TCP (staged_tcp)",
    "loopback": "loopback (no network)",
    "unknown": "a transport that UCX chose",
}
#: Events of the gateway, and its work until each of them.
_GATEWAY = (("tokenized", "tokenize"), ("admitted", "wait"), ("reserved", "route, reserve"))


@dataclass(frozen=True)
class Span:
    """One phase of a request."""

    kind: str  #: "gateway", "queue", "chunk", "pushes", "hand_off" or "decode".
    name: str
    start_s: float  #: Seconds since the request arrived.
    end_s: float
    detail: str = ""
    style: str = "cyan"  #: Colour in a terminal.
    parts: tuple[tuple[str, float, float], ...] = ()  #: Name, start and end of each part of the phase.


def spans_of(timeline: Mapping[str, Any], *, tokens: int, end_s: float) -> list[Span]:
    """Returns the phases of a request, from the JSON of GET /debug/requests/{id}.

    Phases that did not happen, and phases of an attempt that was retried, are left out. `t` of an event is the second
    in which the gateway received it, so a phase on a pod is placed by the arrival of its messages.

    Args:
        tokens: Number of generated tokens.
        end_s: When the client had the last token.
    """
    events: list[Mapping[str, Any]] = timeline["events"]
    last = {event["event"]: event for event in events}
    retried = max((i for i, event in enumerate(events) if event["event"] in ("retry", "resume")), default=-1)
    chunks = [event for event in events[retried + 1 :] if event["event"] == "chunk"]
    spans: list[Span] = []
    reserved, first, handed_off = last.get("reserved"), last.get("first_token"), last.get("handed_off")
    if reserved:
        work = "tokenize, route" + (", reserve" if reserved["outcome"] == "target" else "; decode prefills itself")
        marks = [(word, last[event]["t"]) for event, word in _GATEWAY if event in last]
        starts = (0.0, *(end for _, end in marks))
        parts = tuple((word, start, end) for start, (word, end) in zip(starts, marks, strict=False))
        detail = f"{work} on {reserved['pod']}"
        spans.append(Span("gateway", "gateway", 0.0, reserved["t"], detail, "blue", parts))
    if first:
        start = max(first["t"] - first["compute_s"], 0.0)
        spans.append(Span("queue", "queue", max(start - first["queue_s"], 0.0), start, f"on {first['pod']}", "yellow"))
        done = first["cached_tokens"]
        for number, chunk in enumerate(chunks, 1):
            detail = f"tokens {done}-{chunk['computed_tokens']}, {chunk['delivered_blocks']} blocks delivered"
            spans.append(Span("chunk", f"chunk {number}", min(start, chunk["t"]), chunk["t"], detail, "cyan"))
            start, done = chunk["t"], chunk["computed_tokens"]
    if first and handed_off:
        early = handed_off["blocks_before_last_chunk"]
        by = _TRANSPORTS.get(handed_off["transport"], handed_off["transport"])
        moved = f"{handed_off['blocks']} blocks, {handed_off['bytes'] / 2**20:.1f} MiB by {by}"
        detail = f"{moved}, {early} before the last chunk's end"
        pushes = tuple((f"blocks {p[0]}-{p[0] + p[1] - 1}", p[2], p[3]) for p in handed_off.get("pushes", ()))
        begin = min([*(chunk["t"] for chunk in chunks), first["t"], *(start for _, start, _ in pushes)])
        spans.append(Span("pushes", "pushes", begin, handed_off["t"], detail, "magenta", pushes))
        begin = max(handed_off["t"] - handed_off["exposed_s"], 0.0)
        detail = "from the last chunk until decode has everything"
        spans.append(Span("hand_off", "hand-off", begin, handed_off["t"], detail, "magenta"))
    decode = last.get("decode")
    if decode and reserved and reserved["outcome"] == "local":
        detail = f"by {reserved['pod']} itself, beside what it decodes"
        spans.append(Span("chunk", "prefill", reserved["t"], decode["t"], detail, "cyan"))
    if decode:
        begin = first["t"] if first else decode["t"]
        rest = tokens - 1 if first else tokens
        detail = f"{rest} tokens, {rest / max(end_s - begin, 1e-9):.0f} tokens/s"
        spans.append(Span("decode", "decode", begin, max(end_s, decode["t"]), detail, "green"))
    return spans
