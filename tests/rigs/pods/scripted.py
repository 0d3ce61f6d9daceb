"""The script of a fake pod: the tokens of its answers, its faults, and the calls that it has seen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from common.errors import BatonError
from common.pb import (
    decode_pb2,
    prefill_pb2,
)
from common.types import FinishReason, Token, TokenLogprob, ValidRequest

Script = Callable[[ValidRequest], list[int]]


def counting(request: ValidRequest) -> list[int]:
    """Returns ids of ASCII letters in the SmolLM2 vocabulary, which depend on the prompt."""
    return [66 + (sum(request.prompt_ids) + 5 * i) % 26 for i in range(request.sampling.max_tokens)]


#: Awaited before a call goes on.
Gate = Callable[[ValidRequest], Awaitable[object]]


async def _open(_request: ValidRequest) -> None:
    """Returns at once."""


@dataclass
class Faults:
    """Faults of a pod. An integer n means the next n calls; `..._errors` is how often `..._error` is raised."""

    info_delay_s: float = 0.0
    #: Reserve is rejected.
    reject: int = 0
    reserve_error: BatonError | None = None
    reserve_delay_s: float = 0.0
    #: A decode pod computes prompts itself, and answers Reserve so much later than it starts them.
    local_after_s: float | None = None
    abort_errors: int = 0
    prefill_delay_s: float = 0.0
    prefill_error: BatonError | None = None
    prefill_errors: int = 1 << 30
    hand_off_error: BatonError | None = None
    hand_off_errors: int = 1 << 30
    #: The Prefill call ends after the first tokens.
    drop_prefill_after_first: int = 0
    #: The decode pod gets the KV, and the Prefill call ends before the first tokens, as over a broken connection.
    lose_first_tokens: int = 0
    token_delay_s: float = 0.0
    #: Decoding stops for ever after so many tokens.
    stall_after: int | None = None
    #: Every token is sent twice, or pairs of tokens in reverse order.
    duplicate: bool = False
    reorder: bool = False
    decode_error: BatonError | None = None
    decode_errors: int = 1 << 30
    #: The decode pod sends tokens before the prefill pod sends the first.
    decode_before_first: bool = False
    reset_error: BatonError | None = None
    embed_error: BatonError | None = None
    embed_delay_s: float = 0.0
    target_error: BatonError | None = None
    before_reserve: Gate = _open
    before_prefill: Gate = _open
    before_decode_error: Gate = _open


@dataclass
class Seen:
    """The calls that a pod got."""

    infos: int = 0
    reserved: list[ValidRequest] = field(default_factory=list)
    prefilled: list[ValidRequest] = field(default_factory=list)
    decode_aborts: list[str] = field(default_factory=list)
    child_aborts: list[tuple[str, int]] = field(default_factory=list)
    prefill_cancels: list[str] = field(default_factory=list)
    #: Sequences that stopped after `stall_after` tokens.
    stalls: list[str] = field(default_factory=list)
    hand_offs: list[str] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    remote_costs: list[decode_pb2.RemotePrefill] = field(default_factory=list)
    pull_hints: list[prefill_pb2.PullHint] = field(default_factory=list)
    #: Request ids of SetTarget calls.
    late_targets: list[str] = field(default_factory=list)
    #: Highest acknowledged batch.
    acked: int = 0
    resets: int = 0
    embedded: list[ValidRequest] = field(default_factory=list)
    #: Tokens whose logits the calls of Embed asked for.
    logit_ids: list[tuple[int, ...]] = field(default_factory=list)


def outcome(request: ValidRequest, script: Script, child: int = 0) -> tuple[list[Token], FinishReason]:
    """Returns all tokens of one sequence and its finish reason. Ids of child n are those of the script plus n."""
    tokens: list[Token] = []
    sampling = request.sampling
    for i, token in enumerate(script(request)[: sampling.max_tokens]):
        token += child if token not in sampling.stop_token_ids else 0
        logprob, top = None, ()
        if sampling.logprobs is not None:
            logprob = -0.5 - i + 0.125 * child
            top = tuple(TokenLogprob(token + k, logprob - k) for k in range(sampling.logprobs))
        tokens.append(Token(i, token, logprob, top, child))
        if token in sampling.stop_token_ids and i + 1 > sampling.min_tokens:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH
