"""The engine in this process, without services: prompts in, completions out. Scripts, tests and benchmarks use it.

    llm = LLM("smollm2")
    for completion in llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8)):
        print(completion.text)

A call runs the pods' own loop on a thread for as long as it takes, so what it does is what a pod does. Calls of several
threads take turns; between calls the engine rests, and keeps its prefix cache.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BatonError, ConfigError, InternalError, InvalidRequest
from common.model.chat_template import ChatTemplate
from common.model.directory import resolve_model
from common.types import FinishReason, Grammar, SamplingParams, Token, ValidRequest
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.models.spec import read_json
from engine.progress import Progress, progress
from engine.schedule.outputs import StepResult
from engine.schedule.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LIVENESS_POLL_S = 1.0  # how often the loop's thread is looked after
STOP_S = 60.0


@dataclass(slots=True)
class Completion:
    """What became of one prompt, or of one of its n sequences: child.

    prompt: its text, None where it came as ids. tokens: with log-probabilities if the params asked for them.
    cached_tokens: prompt tokens that the prefix cache supplied. error: why finish is ERROR.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    decode: Callable[[list[int]], str] = field(repr=False)
    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: BatonError | None = None
    child: int = 0

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        """Of the tokens, without special ones; ConfigError where the model has no tokenizer."""
        return self.decode(self.ids)


class LLM:
    """model: a directory with safetensors, or smollm2 once `baton up` has converted it. Keyword arguments are those of
    EngineConfig.

    On a GPU chunk_tokens is prompt_step_tokens unless it is given: nobody waits for the next token of a text, so prompts go
    through in the fewest steps.

    Raises ConfigError when the model cannot be served here, or an argument will not do. `engine` is open to tests.
    """

    def __init__(self, model: Path | str, **config: Any) -> None:
        weights = config.get("load_format", "auto") == "auto"
        self.model_dir = resolve_model(str(model), tokenizer=False, weights=weights)
        if config.get("speculation_model") is not None:
            config["speculation_model"] = Path(config["speculation_model"])
        self.engine = Engine(for_throughput(EngineConfig(model_dir=self.model_dir, **config)))
        self._requests = 0
        self._turn = threading.Lock()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The directory's tokenizer.json; ConfigError where there is none."""
        from tokenizers import Tokenizer

        path = self.model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{self.model_dir} has no tokenizer.json: give prompts as token ids", field="model")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}", field="model") from error

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The directory's chat template."""
        return ChatTemplate(self.model_dir, read_json(self.model_dir / "tokenizer_config.json", required=False))

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer puts around one."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ignore_eos: bool = False,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        cache_salt: str = "",
        show_progress: bool = True,
    ) -> list[Completion]:
        """Completions in the order of the prompts, texts or token ids, which run concurrently as far as they fit. A
        prompt whose params have an n gets n of them, for one prefill.

        params: one for all, or one for each; the default is greedy with 16 tokens. The noise of sampling is keyed by
        params.seed, so the same prompt with the same params has one answer. The model's end-of-sequence tokens end a
        completion unless ignore_eos is set. grammar: what it has to match (common/grammar.py), one for all or for each.
        show_progress: a bar on a terminal, else lines in the log.

        Raises InvalidRequest, and runs nothing, when one of them can never run.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(isinstance(p, int) for p in texts):
            raise InvalidRequest("one prompt of token ids goes in a list, as several do", field="prompts")
        given = [(p, self.encode(p)) if isinstance(p, str) else (None, tuple(p)) for p in texts]
        return self._complete(given, params, ignore_eos, grammar, cache_salt, show_progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ignore_eos: bool = False,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        cache_salt: str = "",
        show_progress: bool = True,
    ) -> list[Completion]:
        """`generate` for conversations, one or several: the model's chat template makes the prompts of them.

        A message has a role and a content. Raises InvalidRequest too where the model has no template, or it refuses.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        rendered = [self.template.render(conversation) for conversation in conversations]
        given = [(text, self.encode(text, special_tokens=False)) for text in rendered]
        return self._complete(given, params, ignore_eos, grammar, cache_salt, show_progress)

    def _complete(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        ignore_eos: bool,
        grammar: Grammar | Sequence[Grammar | None] | None,
        cache_salt: str,
        show_progress: bool,
    ) -> list[Completion]:
        if params is None:
            params = SamplingParams(temperature=0.0)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, and {len(each)} params", field="params")
        follow = [grammar] * len(prompts) if grammar is None or isinstance(grammar, Grammar) else list(grammar)
        if len(follow) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, and {len(follow)} grammars", field="grammar")
        if not ignore_eos:
            each = [replace(p, stop_token_ids=(*p.stop_token_ids, *self.engine.eos_token_ids)) for p in each]
        with self._turn:
            return self._run(prompts, each, follow, cache_salt, show_progress)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        each: Sequence[SamplingParams],
        follow: Sequence[Grammar | None],
        cache_salt: str,
        show_progress: bool,
    ) -> list[Completion]:
        run = _GenerateCall()
        for (text, ids), sampling, rules in zip(prompts, each, follow, strict=True):
            self._requests += 1
            request = ValidRequest(
                f"local-{self._requests}", self.engine.layout.model, ids, sampling, cache_salt, grammar=rules
            )
            for child in range(sampling.n):
                run.completions[request.request_id, child] = Completion(text, ids, self.decode, child=child)
            run.seqs.append(self.engine.new_sequence(request))
        if run.seqs:
            most = sum(sampling.n * sampling.max_tokens for sampling in each)
            with progress("generating", most, "tokens", show=show_progress) as shown:
                run.run(self.engine, shown)
        return list(run.completions.values())


def for_throughput(config: EngineConfig) -> EngineConfig:
    """The same with the tokens of prompt_step_tokens in every step, unless it says how many."""
    _, prompt_step_tokens, _ = config.resolve_limits(config.resolve_device())
    if config.chunk_tokens or prompt_step_tokens is None:
        return config
    return replace(config, chunk_tokens=prompt_step_tokens, prompt_step_tokens=prompt_step_tokens)


@dataclass(slots=True)
class _GenerateCall:
    """One call's sequences and what has become of them; the loop's thread writes, the caller waits for `over`."""

    completions: dict[tuple[str, int], Completion] = field(default_factory=dict)
    seqs: list[EngineSequence] = field(default_factory=list)
    unfinished: int = 0
    finished: threading.Event = field(default_factory=threading.Event)

    def run(self, engine: Engine, shown: Progress) -> None:
        """Runs until all ended. Whatever interrupts it, nothing of it stays in the engine."""
        self.unfinished = len(self.completions)
        loop = EngineLoop(engine, functools.partial(self._collect, shown))
        loop.start()
        try:
            loop.call(functools.partial(self._add, engine)).result()
            while not self.finished.wait(LIVENESS_POLL_S):
                if not loop.alive:
                    raise InternalError("the engine's thread has ended; its log says why")
        finally:
            loop.stop(STOP_S)

    def _add(self, engine: Engine) -> None:
        added: list[str] = []
        try:
            for seq in self.seqs:
                engine.add(seq)
                added.append(seq.request_id)
        except Exception:
            for request_id in added:
                engine.abort(request_id)
            raise

    def _collect(self, shown: Progress, result: StepResult) -> None:
        done = skipped = 0
        for output in result.outputs:
            seq = output.seq
            completion = self.completions[seq.request_id, seq.child]
            completion.tokens.extend(output.tokens)
            completion.cached_tokens = seq.cached_tokens
            done += len(output.tokens)
            if output.finish_reason is None:
                continue
            # A request that ends before its prompt is computed ends for all children.
            for child in range(seq.child, seq.child + seq.num_samples):
                ended = self.completions[seq.request_id, child]
                ended.finish, ended.error = output.finish_reason, output.error
                skipped += seq.request.sampling.max_tokens - len(ended.tokens)
                self.unfinished -= 1
        shown.advance(done, skipped=skipped)
        if not self.unfinished:
            self.finished.set()
