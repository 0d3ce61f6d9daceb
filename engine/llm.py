"""The engine in this process, without services: prompts in, completions out. Tests, benchmarks and scripts use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import BatonError, InternalError
from common.types import FinishReason, SamplingParams, Token, ValidRequest
from engine.config import EngineConfig
from engine.engine import Engine, StepResult


@dataclass(slots=True)
class Completion:
    """tokens with their log-probabilities if asked for; cached_tokens: prompt tokens that the prefix cache supplied."""

    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: BatonError | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class LLM:
    """Keyword arguments are those of EngineConfig; `engine` is open to tests."""

    def __init__(self, model_dir: Path | str, **config: Any) -> None:
        self.engine = Engine(EngineConfig(model_dir=Path(model_dir), **config))
        self._requests = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[Completion]:
        """Completions in the order of the prompts, which run concurrently as far as they fit.

        params: one for all, or one for each; the default is greedy with 16 tokens and the model's stop tokens. Raises
        InvalidRequest, and runs nothing, when one of them can never run.
        """
        if params is None:
            params = SamplingParams(temperature=0.0, stop_token_ids=self.engine.eos_token_ids)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        completions: dict[str, Completion] = {}
        try:
            for prompt, sampling in zip(prompts, each, strict=True):
                self._requests += 1
                name = f"local-{self._requests}"
                request = ValidRequest(name, self.engine.layout.model, tuple(prompt), sampling, cache_salt)
                self.engine.add(self.engine.new_sequence(request))
                completions[name] = Completion()
        except BatonError:
            for name in completions:
                self.engine.abort(name)
            raise
        while self.engine.has_work:
            result = self.engine.step()
            if not result.outputs:
                raise InternalError("sequences wait, and nothing can run")
            _collect(result, completions)
        return list(completions.values())


def _collect(result: StepResult, completions: dict[str, Completion]) -> None:
    for output in result.outputs:
        completion = completions[output.seq.request_id]
        completion.tokens.extend(output.tokens)
        completion.finish = output.finish
        completion.error = output.error
        completion.cached_tokens = output.seq.cached_tokens
