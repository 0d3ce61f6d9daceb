"""The models that one gateway serves: their texts, their pods, and the names under which clients ask for them.

Each model has pods, an index scope per layout, a tokenizer and a chat template of its own; nothing of one is ever used
for another. The set is fixed for the life of the process; what changes is which pods serve it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from common.errors import ConfigError, ModelNotFound
from common.model.chat_template import ChatTemplate
from gateway.admission.gate import Gate
from gateway.dispatch.dispatch import Dispatcher
from gateway.pods.info import ModelLimits
from gateway.pods.table import PodTable
from gateway.text.chat_format import ChatFormat
from gateway.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextProcessor:
    """How one model's text becomes tokens, and a conversation text. name: what its pods call it."""

    name: str
    tokenizer: TextTokenizer
    chat_format: ChatFormat

    @classmethod
    def load(cls, name: str, model_dir: Path, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Self:
        """Of a model directory, which needs no weights. Raises ConfigError."""
        tokenizer = TextTokenizer(model_dir)
        template = ChatTemplate(model_dir, tokenizer.config)
        dialect = ChatFormat(model_dir, tokenizer, template, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        dialect.warm_up()
        return cls(name, tokenizer, dialect)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model with the pods that serve it and the gate before them. created: seconds since the epoch."""

    text_processor: TextProcessor
    pod_table: PodTable
    dispatcher: Dispatcher
    gate: Gate
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.text_processor.name

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.text_processor.tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        return self.text_processor.chat_format

    def limits(self) -> ModelLimits:
        """See PodTable.limits."""
        return self.pod_table.limits()


class ModelRegistry:
    """By name and alias. Raises ConfigError when a name means two things, or an alias nothing."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str]) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) != len(models):
            raise ConfigError("model: two models have the same name", field="model")
        self.aliases = dict(aliases)
        for alias, name in self.aliases.items():
            if alias in self._models:
                raise ConfigError(f"alias: {alias} is a model's own name", field="alias")
            if name not in self._models:
                known = ", ".join(self._models)
                raise ConfigError(f"alias: {alias} stands for {name}, which is not served ({known} is)", field="alias")

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> ServedModel:
        """The one that was configured first; the only one of most gateways."""
        return next(iter(self._models.values()))

    def find(self, name: str) -> ServedModel:
        """The model that clients call by this name. Raises ModelNotFound."""
        model = self._models.get(self.aliases.get(name, name))
        if model is None:
            raise ModelNotFound(
                f"the model {name[:200]!r} does not exist; /v1/models lists those that do", field="model"
            )
        return model

    def names(self) -> dict[str, ServedModel]:
        """Every name and alias, sorted."""
        named = {**self._models, **{alias: self._models[name] for alias, name in self.aliases.items()}}
        return dict(sorted(named.items()))
