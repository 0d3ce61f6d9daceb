"""Data that gateways and pods exchange: the validated request, its sampling parameters, tokens, KV targets, loads."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

#: Most sequences of one request (`n`).
MAX_N = 128


class Role(enum.StrEnum):
    """The part of a request that a pod computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    #: STOP, for an answer that calls tools. Set by the gateway, which parses the calls.
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled. The gateway has validated every field.

    To add a parameter, change these places too (`git grep -w min_p` shows them):
    - the messages in proto/baton/v1/types.proto and inference.proto, and their conversion in common/wire.py;
    - sampling: engine/sampling/sampler.py, engine/sampling/device_sampler.py and engine/kernels/sampling.py;
    - the accepted range: pod/limits.py;
    - requests: gateway/serving/request.py, gateway/api/openai/requests.py, gateway/api/openai/responses/request.py and
      gateway/api/grpc/servicer.py;
    - the documentation of the API: gateway/api/docs/parameters/shared.py and responses.py.
    """

    #: 0: greedy.
    temperature: float = 1.0
    #: 0: off.
    top_k: int = 0
    #: 1: off.
    top_p: float = 1.0
    #: 0: off.
    min_p: float = 0.0
    #: 1: off.
    repetition_penalty: float = 1.0
    #: 0: off.
    presence_penalty: float = 0.0
    #: 0: off.
    frequency_penalty: float = 0.0
    #: Pairs of token id and the value that is added to its logit.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: The noise of child c at a position is a function of (seed, c, position).
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    #: Token ids that end the answer. They include the model's end-of-sequence tokens, unless the client ignores those.
    stop_token_ids: tuple[int, ...] = ()
    #: Number of alternatives per generated token, 0 to 20; None: no log-probabilities at all.
    logprobs: int | None = None
    #: Sequences per prompt, at most MAX_N.
    n: int = 1
    #: The only tokens that may be generated; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    #: Token sequences that are never generated: the last token is banned where the tokens before it match.
    bad_words: tuple[tuple[int, ...], ...] = ()
    #: Like `logprobs`, for the prompt's tokens. The whole prompt is then computed, even if a cache holds its KV.
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Grammar:
    """The llguidance grammar that an answer must match, made by common/grammar.py. All pods build the same matcher."""

    text: str
    #: The request's field that the grammar came from, for error messages.
    field: str = "structured_outputs"


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that passed the gateway's validation. Client input always has other types.

    A request that continues on another pod (`resumed`) is one sequence with the tokens that were generated before. All
    other fields keep the client's values; max_tokens still counts from the end of the prompt.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    grammar: Grammar | None = None
    #: Tokens that another pod generated before this request continued; empty for a new request.
    output_ids: tuple[int, ...] = ()
    #: Index of the first sequence among the client's n sequences; not 0 only for a request that continues.
    child: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The tokens before the next one: the prompt, then the output so far."""
        return self.prompt_ids + self.output_ids

    @property
    def context_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def child_indices(self) -> range:
        """Indices of this request's sequences among the client's n."""
        return range(self.child, self.child + self.sampling.n)

    def resumed(self, child: int, output: Iterable[int]) -> ValidRequest:
        """Returns the request that continues sequence `child` after `output`; it has no prompt_logprobs."""
        sampling = replace(self.sampling, n=1, prompt_logprobs=None)
        return replace(self, sampling=sampling, child=child, output_ids=tuple(output))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability (natural logarithm)."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens at positions first, first + 1, ... Token 0 has none."""

    first: int
    #: Log-probabilities of the prompt's own tokens.
    logprobs: tuple[float, ...]
    #: Rank of each prompt token among the vocabulary; 1 is the likeliest.
    ranks: tuple[int, ...]
    #: Alternatives, likeliest first: k for the first position, then k for the next, and so on.
    top_ids: tuple[int, ...] = ()
    #: Log-probabilities of `top_ids`.
    top_logprobs: tuple[float, ...] = ()

    def top(self, index: int) -> tuple[TokenLogprob, ...]:
        """Returns the alternatives at position first + index."""
        count = len(self.top_ids) // len(self.logprobs)
        alternatives = slice(index * count, (index + 1) * count)
        return tuple(map(TokenLogprob, self.top_ids[alternatives], self.top_logprobs[alternatives]))


@dataclass(slots=True)  # never changed, but not frozen: creating a frozen instance takes three times as long
class Token:
    """One generated token."""

    #: Position in the output, from 0.
    index: int
    id: int
    #: None if the request asks for no log-probabilities.
    logprob: float | None = None
    #: Alternatives, likeliest first.
    top: tuple[TokenLogprob, ...] = ()
    #: Index of the token's sequence among the client's n.
    child: int = 0


@dataclass(frozen=True, slots=True, order=True)
class TransferId:
    """Names one transfer to a decode pod. Never reused: `number` counts within one `generation` of that pod."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation:x}-{self.number:x}"


@dataclass(frozen=True, slots=True)
class KvTarget:
    """The blocks on a decode pod that a prompt's KV is written to."""

    transfer_id: TransferId
    pod: str
    address: str
    #: First logical block of the transfer; the decode pod's cache holds the blocks before it.
    first_block: int
    #: blocks[i] is the physical block for logical block first_block + i.
    blocks: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Number of blocks in each state; the sum is the size of the pool."""

    free: int
    cached: int
    leased: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.leased + self.quarantined


@dataclass(frozen=True, slots=True)
class PodLoad:
    """Load and measured speed that a pod reports. A rate or time of 0 has not been measured yet."""

    #: Prompt tokens that are not computed yet.
    queued_tokens: int = 0
    #: Sequences in the engine's steps.
    running: int = 0
    #: Sequences in the engine's queue.
    waiting: int = 0
    #: Sequences that wait for their KV from a prefill pod.
    reserved: int = 0
    #: Blocks that are free or evictable.
    free_blocks: int = 0
    draining: bool = False
    #: Prompt tokens per second in full steps.
    prefill_rate: float = 0.0
    #: Fixed time that each prompt takes beyond its tokens.
    prefill_overhead_s: float = 0.0
    #: A decode step of n sequences takes step_s + n * step_slope_s.
    step_s: float = 0.0
    step_slope_s: float = 0.0
    #: Prompt tokens per second that the transfer of KV reaches.
    transfer_rate: float = 0.0
    #: Fixed time at the end of a hand-off, after the last byte.
    hand_off_s: float = 0.0
    #: Fixed time of a pull, without the bytes.
    pull_s: float = 0.0

    @property
    def has_decode_times(self) -> bool:
        """The pod has measured decode steps."""
        return self.step_s > 0 or self.step_slope_s > 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str) -> PodLoad:
        """Parses the load from `to_json`. Unknown fields, of a newer pod, are ignored. Raises ValueError, TypeError."""
        values = json.loads(raw)
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass(frozen=True, slots=True)
class RemotePrefillCost:
    """Predicted cost of computing a prompt on a prefill pod: RemotePrefill in proto/baton/v1/decode.proto."""

    #: Time in the prefill pod's queue.
    queue_s: float
    compute_s: float
    #: Time from the end of computing until the decode pod can continue.
    hand_off_s: float
    #: Prompt tokens per second of the prefill pod.
    tokens_per_s: float

    @property
    def seconds(self) -> float:
        return self.queue_s + self.compute_s + self.hand_off_s
