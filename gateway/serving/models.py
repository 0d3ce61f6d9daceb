"""The models that one gateway serves, fixed for its life. They share no pods, index scopes, tokenizers or templates.

The LoRA adapters of a model come and go. A `ServedModel` with an adapter shares everything else with its model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from common.errors import ConfigError, ModelNotFound
from common.model.chat_template import ChatTemplate
from common.model.generation import GenerationDefaults, generation_defaults
from common.types import AdapterEntry
from gateway.admission.gate import Gate
from gateway.pods.table import PodTable
from gateway.routing.router import Router
from gateway.text.chat_format import ChatFormat
from gateway.text.reranker import Reranker, TextPrefixes, choose_reranker
from gateway.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextProcessor:
    """Tokenizer, chat format and generation defaults of one model."""

    name: str  #: Name under which the pods serve the model.
    tokenizer: TextTokenizer
    chat_format: ChatFormat
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    reranker: Reranker | None = None  #: How pairs are judged, None if their embeddings are compared.
    text_prefixes: TextPrefixes = field(default_factory=TextPrefixes)  #: For comparisons by embeddings.

    @classmethod
    def load(
        cls,
        name: str,
        model_dir: Path,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        generation_config: str = "auto",
        reranker: str = "auto",
    ) -> Self:
        """Loads all of it from a model directory; weights may be missing. Raises ConfigError.

        `chat_template` is a file that replaces the model's templates. The others are the settings of these names.
        """
        tokenizer = TextTokenizer(model_dir)
        file = None if chat_template is None else Path(chat_template)
        template = ChatTemplate(model_dir, tokenizer.config, file=file, variables=template_variables)
        defaults = GenerationDefaults() if generation_config == "none" else generation_defaults(model_dir)
        chat_format = ChatFormat(
            model_dir, tokenizer, template, tool_parser=tool_parser, reasoning_parser=reasoning_parser, name=name
        )
        chat_format.warm_up()
        pairs = choose_reranker(reranker, name, model_dir, tokenizer)
        return cls(name, tokenizer, chat_format, defaults, pairs, TextPrefixes.of_directory(model_dir))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model with its pods, its router and its gate."""

    name: str  #: Name under which the pods serve the model.
    tokenizer: TextTokenizer
    chat_format: ChatFormat
    pod_table: PodTable
    router: Router
    gate: Gate
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)  #: For parameters that a client omits.
    reranker: Reranker | None = None  #: How pairs are judged, None if their embeddings are compared.
    text_prefixes: TextPrefixes = field(default_factory=TextPrefixes)
    adapter: AdapterEntry | None = None  #: The LoRA adapter that a client named; None for the model itself.
    created: int = field(default_factory=lambda: int(time.time()))  # start of the gateway, in seconds since the epoch

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names by which an API key allows it. A key for the model allows none of its adapters."""
        return (self.name,) if self.adapter is None else (self.adapter.name, f"{self.name}:{self.adapter.name}")


class ModelRegistry:
    """The served models as configured. Raises ConfigError for a name with two meanings or an alias of no model."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str]) -> None:
        self._models = tuple(models)
        own: dict[str, ServedModel] = {}
        for model in models:
            if own.setdefault(model.name, model) is not model:
                raise ConfigError(f"model: two models have the name {model.name}", field="model")
        for alias, name in aliases.items():
            if alias in own:
                raise ConfigError(f"alias: {alias} is a model's own name", field="alias")
            if name not in own:
                served = ", ".join(own)
                raise ConfigError(f"alias: {alias} stands for {name}, which is not one of {served}", field="alias")
        self.aliases = dict(aliases)  # model name by alias
        named = own | {alias: own[name] for alias, name in aliases.items()}
        self.by_name = dict(sorted(named.items()))  #: The model for each name and alias, sorted by name.

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def with_adapter(self, name: str) -> ServedModel:
        """Returns the model with the LoRA adapter NAME or MODEL:NAME, for a name that is not in `by_name`.

        Raises ModelNotFound, also if adapters of two models have the name.
        """
        base, _, adapter = name.rpartition(":")
        tried = [(self.by_name[base], adapter)] if base in self.by_name else [(model, name) for model in self._models]
        found = [
            replace(model, adapter=entry)
            for model, own in tried
            if (entry := model.pod_table.adapters.find(own)) is not None
        ]
        if len(found) > 1:
            served = ", ".join(f"{model.name}:{name}" for model in found)
            raise ModelNotFound(f"several models have an adapter {name!r}: name one of {served}", field="model")
        if not found:
            text = f"the model {name[:200]!r} does not exist; /v1/models lists those that do"
            raise ModelNotFound(text, field="model")
        return found[0]

    def count_pods(self) -> list[tuple[tuple[str, ...], float]]:
        """Returns the number of pods by model, role and state."""
        counts = Counter(
            (model.name, "unknown" if pod.info is None else pod.info.role.value, pod.state)
            for model in self._models
            for pod in model.pod_table.pods.values()
        )
        return [(labels, float(number)) for labels, number in counts.items()]

    def listed(self) -> Iterator[tuple[str, ServedModel]]:
        """Yields each name and alias with its model, then each adapter's name."""
        yield from self.by_name.items()
        names = set(self.by_name)
        for model in self._models:
            for entry in model.pod_table.adapters.all():
                name = entry.name if entry.name not in names else f"{model.name}:{entry.name}"
                names.add(name)
                yield name, replace(model, adapter=entry)

    @property
    def first(self) -> ServedModel:
        """The model that was configured first; most gateways serve no other."""
        return self._models[0]
