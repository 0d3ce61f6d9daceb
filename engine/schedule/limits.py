"""The limits of the scheduler's steps."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError


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
