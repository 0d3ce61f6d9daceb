"""The request as the system knows it after validation, and what comes back: plain frozen data."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

MAX_N = 128  # sequences of one request


class Role(enum.StrEnum):
    """What a pod does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class FinishReason(enum.StrEnum):
    """Why a sequence ended. TOOL_CALLS: STOP of an answer that calls tools; only the gateway can tell."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples; every field is explicit and was validated by the gateway.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 mean off.
    stop_token_ids holds the model's end-of-sequence tokens too, unless the client ignores them.
    logprobs: None for none, else the number of alternatives beside each token's own (0..20).
    allowed_token_ids: nothing else is generated; empty means all. bad_words: token sequences that are not generated:
    the last token of one is banned where the others stand before it. prompt_logprobs: like logprobs, for the prompt's
    tokens, which are then computed whatever a cache holds.
    n: sequences per prompt, MAX_N at most; child c of them is sampled with noise keyed by (seed, c, position).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to match: an llguidance grammar, as text, from which every pod builds the same matcher.

    field: the request's field that it came from, for errors. Made by common/grammar.py.
    """

    text: str
    field: str = "structured_outputs"


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that passed the gateway's validation: another type than anything a client sends.

    output_ids: of one that goes on elsewhere, the tokens that were generated already; it is a single sequence (n is 1),
    and the next token is the one that would have followed them. child: which of the client's n sequences that is.
    Everything else is as the client's request says, max_tokens too: it counts from the prompt's end.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    grammar: Grammar | None = None
    output_ids: tuple[int, ...] = ()
    child: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """What has to be computed before the next token can be sampled: the prompt, and the output so far."""
        return self.prompt_ids + self.output_ids

    @property
    def context_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def child_indices(self) -> range:
        """The numbers of its sequences."""
        return range(self.child, self.child + self.sampling.n)

    def resumed(self, child: int, output: Iterable[int]) -> ValidRequest:
        """The request for the rest of one of its sequences. The prompt's log-probabilities are not asked for again."""
        sampling = replace(self.sampling, n=1, prompt_logprobs=None)
        return replace(self, sampling=sampling, child=child, output_ids=tuple(output))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one token."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens at positions first, first + 1, ...; nothing stands before token 0.

    logprobs: of the prompt's own tokens. ranks: how many tokens are likelier than that one, plus 1. top_ids,
    top_logprobs: alternatives, best first, the same number for each position, one position after the other.
    """

    first: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def top(self, index: int) -> tuple[TokenLogprob, ...]:
        """The alternatives at position first + index."""
        count = len(self.top_ids) // len(self.logprobs)
        at = slice(index * count, (index + 1) * count)
        return tuple(map(TokenLogprob, self.top_ids[at], self.top_logprobs[at]))


@dataclass(slots=True)  # not frozen, though nobody changes one: a frozen one takes three times as long to make
class Token:
    """One generated token: its position in the output (from 0), its id and, when asked for, log-probabilities.

    top holds the alternatives, best first. child: which of the request's n sequences it belongs to.
    """

    index: int
    id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    child: int = 0


@dataclass(frozen=True, slots=True, order=True)
class TransferId:
    """Names one transfer into a decode pod; never reused: `number` counts within the minting pod's `generation`."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation:x}-{self.number:x}"


@dataclass(frozen=True, slots=True)
class KvTarget:
    """Home of a prompt's KV on a decode pod.

    blocks[i] is the physical block for logical block first_block + i; blocks before first_block are already there.
    """

    transfer_id: TransferId
    pod: str
    address: str
    first_block: int
    blocks: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; the sum is the pool's size."""

    free: int
    cached: int
    leased: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.leased + self.quarantined


@dataclass(frozen=True, slots=True)
class PodLoad:
    """How busy a pod says it is, and how fast it measured itself to be; a rate or time of 0 is not known yet.

    queued_tokens: prompt tokens that wait for computing. running, waiting, reserved: sequences in the engine, and those
    whose KV is still to come. free_blocks: free or evictable.
    prefill_rate: prompt tokens per second of full steps; prefill_overhead_s: what a prompt takes beyond that.
    step_s + step_slope_s * sequences: a decode step. transfer_rate: prompt tokens per second whose KV moves;
    hand_off_s: what the end of a hand-off takes beyond that. pull_s: what pulling takes beyond moving bytes.
    """

    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0
    reserved: int = 0
    free_blocks: int = 0
    draining: bool = False
    prefill_rate: float = 0.0
    prefill_overhead_s: float = 0.0
    step_s: float = 0.0
    step_slope_s: float = 0.0
    transfer_rate: float = 0.0
    hand_off_s: float = 0.0
    pull_s: float = 0.0

    @property
    def has_decode_times(self) -> bool:
        """It has decoded."""
        return self.step_s > 0 or self.step_slope_s > 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str) -> PodLoad:
        """Reads what to_json wrote; fields of a newer pod are ignored. Raises ValueError, TypeError."""
        values = json.loads(raw)
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass(frozen=True, slots=True)
class RemotePrefillCost:
    """What having it computed elsewhere takes, see RemotePrefill in decode.proto."""

    queue_s: float
    compute_s: float
    hand_off_s: float
    tokens_per_s: float

    @property
    def seconds(self) -> float:
        return self.queue_s + self.compute_s + self.hand_off_s
