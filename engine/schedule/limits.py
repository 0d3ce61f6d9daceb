"""The limits of the scheduler: of its steps, and of a sequence that can ever run."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError, InvalidRequest
from common.types import MAX_N
from engine.kv.blocks import BlockPool
from engine.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the steps. Raises ConfigError with the name of a wrong field."""

    chunk_tokens: int  # Tokens of one step
    #: Tokens of a step without decodes, which delays no decode; None for chunk_tokens. A lone prompt gets twice that.
    prompt_step_tokens: int | None = None
    local_chunk_tokens: int = 0  # Max prompt tokens of a step with decodes; 0 for all that are left
    max_seqs: int  # Sequences that run at once
    max_model_len: int  # Tokens of one sequence

    def __post_init__(self) -> None:
        for field in ("chunk_tokens", "max_seqs", "max_model_len"):
            if (value := getattr(self, field)) < 1:
                raise ConfigError(f"{field} must be at least 1, is {value}", field=field)
        if self.prompt_step_tokens is not None and self.prompt_step_tokens < self.chunk_tokens:
            text = f"prompt_step_tokens {self.prompt_step_tokens} is less than chunk_tokens {self.chunk_tokens}"
            raise ConfigError(text, field="prompt_step_tokens")

    @property
    def max_step_tokens(self) -> int:
        """Max tokens of any step."""
        return self.chunk_tokens if self.prompt_step_tokens is None else 2 * self.prompt_step_tokens

    @property
    def step_limits(self) -> tuple[int, int, int]:
        """Max tokens of any step, max sequences of a step, and max tokens of a sequence."""
        return self.max_step_tokens, self.max_seqs, self.max_model_len


def num_future_forks(seq: Sequence) -> int:
    """Returns how many children `fork` will make of the sequence that need blocks of their own in this pod."""
    return 0 if seq.hand_off or seq.request.sampling.max_tokens == 1 else seq.num_samples - 1


def require_fitting(seq: Sequence, config: SchedulerConfig, pool: BlockPool) -> None:
    """Raises InvalidRequest, with the name of the field, if the sequence can never run here."""
    limit, prompt_len, max_len = config.max_model_len, seq.prompt_len, seq.max_len
    num_blocks, block_size = pool.num_blocks, pool.block_size
    if prompt_len == 0:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if prompt_len >= limit:
        raise InvalidRequest(
            f"{prompt_len} prompt tokens leave no room for output in a context of {limit} tokens", field="prompt"
        )
    if max_len > limit:
        raise InvalidRequest(
            f"{prompt_len} prompt tokens and {max_len - prompt_len} new ones exceed a context of {limit} tokens",
            field="max_tokens",
        )
    never_fit = f"never fit in {num_blocks} blocks of {block_size} tokens"
    if pool.pages_for(max_len - 1) > num_blocks:
        field = "prompt" if pool.pages_for(prompt_len) > num_blocks else "max_tokens"
        raise InvalidRequest(f"{max_len} tokens {never_fit}", field=field)
    if not 1 <= seq.request.sampling.n <= MAX_N:
        raise InvalidRequest(f"n is {seq.request.sampling.n}; it must be from 1 to {MAX_N}", field="n")
    forked_pages = num_future_forks(seq) * pool.pages_per_block
    if pool.pages_for(prompt_len) + forked_pages > num_blocks:
        raise InvalidRequest(f"{seq.num_samples} sequences of {prompt_len} prompt tokens {never_fit}", field="n")
