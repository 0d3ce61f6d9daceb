"""The models that one gateway serves, fixed for its life. They share no pods, index scopes, tokenizers or templates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from common.errors import ConfigError
from common.model.chat_template import ChatTemplate
from gateway.admission.gate import Gate
from gateway.pods.table import PodTable
from gateway.routing.router import Router
from gateway.text.chat_format import ChatFormat
from gateway.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextProcessor:
    """Tokenizer and chat format of one model."""

    name: str  #: Name under which the pods serve the model.
    tokenizer: TextTokenizer
    chat_format: ChatFormat

    @classmethod
    def load(cls, name: str, model_dir: Path, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Self:
        """Loads both from a model directory, which needs no weights. Raises ConfigError."""
        tokenizer = TextTokenizer(model_dir)
        template = ChatTemplate(model_dir, tokenizer.config)
        chat_format = ChatFormat(
            model_dir, tokenizer, template, tool_parser=tool_parser, reasoning_parser=reasoning_parser
        )
        chat_format.warm_up()
        return cls(name, tokenizer, chat_format)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model with its pods, its router and its gate."""

    name: str  #: Name under which the pods serve the model.
    tokenizer: TextTokenizer
    chat_format: ChatFormat
    pod_table: PodTable
    router: Router
    gate: Gate
    created: int = field(default_factory=lambda: int(time.time()))  # start of the gateway, in seconds since the epoch


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

    @property
    def first(self) -> ServedModel:
        """The model that was configured first; most gateways serve no other."""
        return self._models[0]
