"""Data that gateways and pods exchange: the validated request, its sampling parameters, tokens, KV targets, loads."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

MAX_N = 128  #: Max sequences of one request (`n`).
MAX_WARM_ADAPTERS = 64  #: Digests of adapters in one load report.


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
    TOOL_CALLS = "tool_calls"  #: STOP, for an answer that calls tools. Set by the gateway, which parses the calls.


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled. The gateway has validated every field.

    To add a parameter, change these places too (`git grep -w min_p` shows them):
    - the messages in proto/baton/v1/types.proto and inference.proto, with a field of the same name; `make proto`;
    - sampling: engine/sampling/sampler.py, engine/sampling/device_sampler.py and engine/kernels/sampling.py;
    - the accepted range: pod/limits.py; a test of the effect: tests/e2e/effects.py;
    - requests and the documentation of the API: one field of the same name in gateway/api/openai/bodies.py, in
      Sampling or, if /v1/responses does not have it, in Generation; `make docs`.
    """

    temperature: float = 1.0  # 0: greedy.
    top_k: int = 0  # 0: off.
    top_p: float = 1.0  # 1: off.
    min_p: float = 0.0  # 0: off.
    repetition_penalty: float = 1.0  # 1: off.
    presence_penalty: float = 0.0  # 0: off.
    frequency_penalty: float = 0.0  # 0: off.
    logit_bias: tuple[tuple[int, float], ...] = ()  # Pairs of token id and the value that is added to its logit.
    seed: int = 0  # The noise of child c at a position is a function of (seed, c, position).
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  #: They end the answer; the model's own are included, unless ignored.
    logprobs: int | None = None  #: Alternatives per generated token, 0 to 20; None: no log-probabilities.
    n: int = 1  # Sequences per prompt, at most MAX_N.
    allowed_token_ids: tuple[int, ...] = ()  # The only tokens that may be generated; empty: all.
    bad_words: tuple[tuple[int, ...], ...] = ()  #: Token sequences that are never generated: the last id is banned.
    prompt_logprobs: int | None = None  #: Like `logprobs`, for the prompt, which is then computed as a whole.
    #: The alternatives of `logprobs` are tokens that grammar, allowed_token_ids and bad_words allow; their
    #: log-probabilities stay those of the model. An output that completes the grammar gets a token without alternatives
    #: and the finish reason STOP. For the beams of a search.
    allowed_logprobs: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Grammar:
    """The llguidance grammar of an answer, made by common/grammar/compiler.py. All pods build the same matcher."""

    text: str
    field: str = "structured_outputs"  # The request's field that the grammar came from, for error messages.


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
    output_ids: tuple[int, ...] = ()  #: Tokens that another pod generated before; empty for a new request.
    child: int = 0  #: First sequence among the client's n; not 0 only for a request that continues.
    adapter: str = ""  #: Digest of the LoRA adapter; empty for the base model. Block hashes contain it.
    cache_priority: int = 0  #: Of the cached blocks of its context: -1 low, 0 normal, 1 high, 2 pinned.
    cache_ttl_s: int = 0  #: Seconds after the last use for which it holds; 0: until eviction.

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
    logprobs: tuple[float, ...]  # Log-probabilities of the prompt's own tokens.
    ranks: tuple[int, ...]  # Rank of each prompt token among the vocabulary; 1 is the likeliest.
    top_ids: tuple[int, ...] = ()  #: Alternatives, likeliest first: k for the first position, k for the next, ...
    top_logprobs: tuple[float, ...] = ()  # Log-probabilities of `top_ids`.

    def top(self, index: int) -> tuple[TokenLogprob, ...]:
        """Returns the alternatives at position first + index."""
        count = len(self.top_ids) // len(self.logprobs)
        alternatives = slice(index * count, (index + 1) * count)
        return tuple(map(TokenLogprob, self.top_ids[alternatives], self.top_logprobs[alternatives]))


@dataclass(slots=True)  # never changed, but not frozen: creating a frozen instance takes three times as long
class Token:
    """One generated token."""

    index: int  # Position in the output, from 0.
    id: int
    logprob: float | None = None  # None if the request asks for no log-probabilities.
    top: tuple[TokenLogprob, ...] = ()  # Alternatives, likeliest first.
    child: int = 0  # Index of the token's sequence among the client's n.


@dataclass(frozen=True, slots=True, order=True)
class TransferId:
    """Names one transfer to a decode pod. Never reused: `number` counts within one `generation` of that pod."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation:x}-{self.number:x}"


@dataclass(frozen=True, slots=True)
class KvTarget:
    """The blocks on a decode pod that a prompt's KV is written to. A capability: the decode pod signs it.

    With KV groups, blocks are pages, and logical blocks their numbers in the PageOrder of the prompt.
    """

    transfer_id: TransferId
    pod: str
    address: str
    first_block: int  # First logical block of the transfer; the decode pod's cache holds the blocks before it.
    blocks: tuple[int, ...]  # blocks[i] is the physical block for logical block first_block + i.
    fingerprint: str
    expires_at: int = 0  # End of the signature, in milliseconds since the epoch.
    signature: bytes = b""  # Of these fields, request id and adapter (Signer.sign_target in common/auth.py).


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """The meaning of one LoRA adapter's name: Adapter in proto/baton/v1/control.proto."""

    name: str
    digest: str  # Identity of the adapter, 32 hex digits; empty: the name was removed.
    rank: int = 0
    path: str = ""  # Folder below the adapter directory.
    version: int = 0  # Of two meanings of one name the higher version counts; 0 for an adapter without a name.


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

    queued_tokens: int = 0  # Prompt tokens that are not computed yet.
    running: int = 0  # Sequences in the engine's steps.
    waiting: int = 0  # Sequences in the engine's queue.
    reserved: int = 0  # Sequences that wait for their KV from a prefill pod.
    free_blocks: int = 0  # Blocks that one more sequence can have; without KV groups all that are free or evictable.
    draining: bool = False
    prefill_rate: float = 0.0  # Prompt tokens per second in full steps.
    prefill_overhead_s: float = 0.0  # Fixed time that each prompt takes beyond its tokens.
    step_s: float = 0.0  # A decode step of n sequences takes step_s + n * step_slope_s.
    step_slope_s: float = 0.0
    transfer_rate: float = 0.0  # Prompt tokens per second that the transfer of KV reaches.
    hand_off_s: float = 0.0  # Fixed time at the end of a hand-off, after the last byte.
    pull_s: float = 0.0  # Fixed time of a pull, without the bytes.
    disk_rate: float = 0.0  # Prompt tokens per second whose KV the pod reads from its disk tier.
    shared_cache: bool = False  # The pod reads and writes the shared tier.
    shared_rate: float = 0.0  # Prompt tokens per second whose KV the pod reads from the shared tier.
    #: Digests of the LoRA adapters on the device, the last used first, at most MAX_WARM_ADAPTERS. Info has them too.
    warm_adapters: tuple[str, ...] = ()
    #: Copies of adapters to the device since the start: of two lists the one with more copies is newer.
    adapter_copies: int = 0

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
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        warm = known.pop("warm_adapters", [])
        if not all(isinstance(value, int | float) and abs(value) < 2**63 for value in known.values()):
            raise ValueError(f"a value is not a finite number: {known}")
        if not isinstance(warm, list) or not all(isinstance(digest, str) for digest in warm):
            raise ValueError("warm_adapters is not a list of digests")
        return cls(**known, warm_adapters=tuple(warm[:MAX_WARM_ADAPTERS]))


@dataclass(frozen=True, slots=True)
class RemotePrefillCost:
    """Predicted cost of computing a prompt on a prefill pod: RemotePrefill in proto/baton/v1/decode.proto."""

    queue_s: float  # Time in the prefill pod's queue.
    compute_s: float
    hand_off_s: float  # Time from the end of computing until the decode pod can continue.
    tokens_per_s: float  # Prompt tokens per second of the prefill pod.
    same_processor: bool = False  # The prefill pod computes on the processor of the decode pod.

    @property
    def seconds(self) -> float:
        return self.queue_s + self.compute_s + self.hand_off_s
