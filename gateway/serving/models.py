"""The models that one gateway serves, by the names under which clients ask for them.

Each model has its own pods, index scope per layout, tokenizer and chat template; models share none of these. The set
is fixed for the life of the process. Which pods serve a model changes.
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
    """Tokenizer and chat format of one model."""

    #: Name under which the pods serve the model.
    name: str
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
    """One model with its pods, its dispatcher and its gate."""

    text_processor: TextProcessor
    pod_table: PodTable
    dispatcher: Dispatcher
    gate: Gate
    #: Start of the gateway, in seconds since the epoch.
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
        """Limits that all ready pods accept, see PodTable.limits."""
        return self.pod_table.limits()


class ModelRegistry:
    """The served models by name and alias. Raises ConfigError for a name with two meanings or an alias of no model."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str]) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) != len(models):
            raise ConfigError("model: two models have the same name", field="model")
        #: Model name by alias.
        self.aliases = dict(aliases)
        for alias, name in self.aliases.items():
            if alias in self._models:
                raise ConfigError(f"alias: {alias} is a model's own name", field="alias")
            if name not in self._models:
                served = ", ".join(self._models)
                raise ConfigError(f"alias: {alias} stands for {name}, which is not served ({served} is)", field="alias")

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> ServedModel:
        """The model that was configured first; most gateways serve no other."""
        return next(iter(self._models.values()))

    def find(self, name: str) -> ServedModel:
        """Returns the model with this name or alias. Raises ModelNotFound."""
        model = self._models.get(self.aliases.get(name, name))
        if model is None:
            raise ModelNotFound(
                f"the model {name[:200]!r} does not exist; /v1/models lists those that do", field="model"
            )
        return model

    def names(self) -> dict[str, ServedModel]:
        """Returns every name and alias with its model, sorted by name."""
        named = {**self._models, **{alias: self._models[name] for alias, name in self.aliases.items()}}
        return dict(sorted(named.items()))
