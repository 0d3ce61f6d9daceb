"""Generation in this process, without services: prompts in, completions out.

    llm = LLM("smollm2")
    for completion in llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8)):
        print(completion.text)

A call runs the loop that pods run, on a thread of its own. Calls from several threads run one after another. The prefix
cache stays between calls.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BatonError, ConfigError, InternalError, InvalidRequest, describe
from common.model.chat_template import ChatTemplate
from common.model.directory import resolve_model
from common.model.generation import generation_defaults
from common.settings.table import current_names
from common.types import FinishReason, Grammar, SamplingParams, Token, ValidRequest
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.models.loader import open_model
from engine.models.spec import read_json
from engine.progress import Progress, progress
from engine.schedule.outputs import StepResult
from engine.schedule.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LIVENESS_POLL_S = 1.0  # Time between two checks that the loop's thread is alive
STOP_S = 60.0  # Longest wait for the end of the loop's thread


@dataclass(slots=True)
class Completion:
    """The output for one prompt, or one of its n samples."""

    prompt: str | None  # Text of the prompt; None if it was given as token ids
    prompt_ids: tuple[int, ...]
    decode: Callable[[list[int]], str] = field(repr=False)  # Returns the text of token ids
    tokens: list[Token] = field(default_factory=list)  # Output tokens, with log-probabilities if the params ask for it
    finish: FinishReason | None = None  # Why the output ended
    cached_tokens: int = 0  # Prompt tokens that the prefix cache supplied
    error: BatonError | None = None  # Set if `finish` is ERROR
    child: int = 0  # Number among the n samples of the prompt

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        """Text of the output without special tokens; ConfigError if the model has no tokenizer."""
        return self.decode(self.ids)


class LLM:
    """A model in this process. Tests and benchmarks may use its attribute `engine`; its interface is not stable."""

    def __init__(self, model: Path | str, **config: Any) -> None:
        """Loads a model.

        Args:
            model: A model of the hub (OWNER/NAME[@REVISION]), a model directory, or `smollm2` after `baton up` has
                converted it.
            config: Fields of EngineConfig. On a GPU chunk_tokens defaults to prompt_step_tokens, so that prompts take
                the fewest steps; a longer step delays the decodes, which matters less without streaming.

        Raises ConfigError if this machine does not support the model, or a field has a wrong value.
        """
        weights = config.get("load_format", "auto") == "auto"
        self.model_dir = resolve_model(str(model), tokenizer=False, weights=weights, check=open_model)
        config = current_names(EngineConfig, config)
        self.engine = Engine(for_throughput(EngineConfig(model_dir=self.model_dir, **config)))
        self._requests = 0
        self._turn = threading.Lock()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.json; ConfigError without one."""
        from tokenizers import Tokenizer

        path = self.model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{self.model_dir} has no tokenizer.json: pass prompts as token ids", field="model")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a valid tokenizer: {describe(error)}", field="model") from error

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return ChatTemplate(self.model_dir, read_json(self.model_dir / "tokenizer_config.json", required=False))

    def default_params(self, **fields: Any) -> SamplingParams:
        """Returns sampling parameters with these fields, and the defaults of generation_config.json for the others."""
        defaults = generation_defaults(self.model_dir)
        own = {} if defaults.max_tokens is None else {"max_tokens": defaults.max_tokens}
        return defaults.fill(SamplingParams(**{**own, **fields}), fields)

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Returns token ids of a text, by default with the special tokens that the tokenizer adds."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ignore_eos: bool = False,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        cache_salt: str = "",
        adapter: str | Sequence[str | None] | None = None,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Generates completions for prompts, concurrently as far as memory allows.

        Args:
            prompts: One text, or a list of texts and lists of token ids.
            params: One for all prompts, or a list with one for each; None for 16 greedy tokens. The seed keys the noise
                of sampling, so the same prompt with the same params gives the same output.
            ignore_eos: Do not stop at the model's end-of-sequence tokens.
            grammar: A grammar that the output has to match, one for all prompts or a list.
            cache_salt: Prompts share prefix cache entries only with prompts of the same salt.
            adapter: The name of a LoRA adapter (`add_adapter`), one for all prompts or a list; None for the base model.
            show_progress: Show a bar on a terminal, else log lines.

        Returns the completions in the order of the prompts. A prompt with n > 1 has n of them in a row, after one
        prefill. Raises InvalidRequest if a prompt can never run; in that case none of the prompts runs.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(isinstance(p, int) for p in texts):
            raise InvalidRequest("put the token ids of one prompt in a list of prompts: [[1, 2, 3]]", field="prompts")
        pairs = [(p, self.encode(p)) if isinstance(p, str) else (None, tuple(p)) for p in texts]
        return self._complete(pairs, params, ignore_eos, grammar, cache_salt, adapter, show_progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ignore_eos: bool = False,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        cache_salt: str = "",
        adapter: str | Sequence[str | None] | None = None,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Generates completions for one conversation or a list of them, rendered by the model's chat template.

        A message is a mapping with `role` and `content`. The other arguments are the arguments of `generate`. Also
        raises InvalidRequest if the model has no chat template or the template rejects a conversation.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        rendered = [self.template.render(conversation) for conversation in conversations]
        pairs = [(text, self.encode(text, special_tokens=False)) for text in rendered]
        return self._complete(pairs, params, ignore_eos, grammar, cache_salt, adapter, show_progress)

    def add_adapter(self, directory: Path | str, name: str) -> None:
        """Loads a LoRA adapter in PEFT's format, for the argument `adapter`. See `Engine.add_adapter`."""
        self.engine.add_adapter(Path(directory), name)

    def remove_adapter(self, name: str) -> None:
        """Forgets a LoRA adapter. Raises InvalidRequest for an unknown name."""
        self.engine.remove_adapter(name)

    def _complete(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        ignore_eos: bool,
        grammar: Grammar | Sequence[Grammar | None] | None,
        cache_salt: str,
        adapter: str | Sequence[str | None] | None,
        show_progress: bool,
    ) -> list[Completion]:
        params = SamplingParams(temperature=0.0) if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        grammars = [grammar] * len(prompts) if grammar is None or isinstance(grammar, Grammar) else list(grammar)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(each)} params", field="params")
        if len(grammars) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(grammars)} grammars", field="grammar")
        adapters = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(adapters) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(adapters)} adapters", field="adapter")
        if not ignore_eos:
            each = [replace(p, stop_token_ids=(*p.stop_token_ids, *self.engine.eos_token_ids)) for p in each]
        with self._turn:
            call = _GenerateCall()
            # The adapters themselves, because another thread may remove a name before the sequence is made.
            loaded = [None if name is None else self.engine.adapters.named(name) for name in adapters]
            for (text, ids), sampling, own_grammar, own_adapter in zip(prompts, each, grammars, loaded, strict=True):
                self._requests += 1
                request = ValidRequest(
                    f"local-{self._requests}",
                    self.engine.layout.model,
                    ids,
                    sampling,
                    cache_salt,
                    grammar=own_grammar,
                    adapter="" if own_adapter is None else own_adapter.digest,
                )
                for child in range(sampling.n):
                    call.completions[request.request_id, child] = Completion(text, ids, self.decode, child=child)
                call.seqs.append(self.engine.new_sequence(request))
            if call.seqs:
                most_tokens = sum(sampling.n * sampling.max_tokens for sampling in each)
                with progress("generating", most_tokens, "tokens", show=show_progress) as shown:
                    call.run(self.engine, shown)
            return list(call.completions.values())


def for_throughput(config: EngineConfig) -> EngineConfig:
    """Returns the config with chunk_tokens raised to prompt_step_tokens, unless it sets chunk_tokens itself."""
    _, prompt_step_tokens, _ = config.resolve_limits(config.resolve_device())
    if config.chunk_tokens or prompt_step_tokens is None:
        return config
    return replace(config, chunk_tokens=prompt_step_tokens, prompt_step_tokens=prompt_step_tokens)


@dataclass(slots=True)
class _GenerateCall:
    """The sequences and completions of one call. The loop's thread writes them; the caller waits for `finished`."""

    completions: dict[tuple[str, int], Completion] = field(default_factory=dict)
    seqs: list[EngineSequence] = field(default_factory=list)
    unfinished: int = 0
    finished: threading.Event = field(default_factory=threading.Event)

    def run(self, engine: Engine, shown: Progress) -> None:
        """Runs until all sequences have ended. If it is interrupted, it removes its sequences from the engine."""
        self.unfinished = len(self.completions)
        loop = EngineLoop(engine, functools.partial(self._collect, shown))
        loop.start()
        try:
            loop.call(functools.partial(self._add, engine)).result()
            while not self.finished.wait(LIVENESS_POLL_S):
                if not loop.alive:
                    raise InternalError("the engine's thread has ended; see the log for the error")
        finally:
            loop.stop(STOP_S)

    def _add(self, engine: Engine) -> None:
        try:
            for seq in self.seqs:
                engine.add(seq)
        except Exception:
            for seq in self.seqs:
                engine.abort(seq.request_id)
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
            # Before its prompt is computed, a sequence stands for all children.
            for child in range(seq.child, seq.child + seq.num_samples):
                ended = self.completions[seq.request_id, child]
                ended.finish, ended.error = output.finish_reason, output.error
                skipped += seq.request.sampling.max_tokens - len(ended.tokens)
                self.unfinished -= 1
        shown.advance(done, skipped=skipped)
        if not self.unfinished:
            self.finished.set()
