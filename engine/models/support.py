"""Says how a model directory is served: by our decoder, by the code of transformers, or not at all and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError
from engine.models.base import ModelShape
from engine.models.loader import open_model
from engine.models.spec import ModelSpec, NotNative, parse_spec, read_config


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """How a model is served. It says nothing about the weights, which are not read."""

    how: Literal["native", "transformers", "no"]
    reason: str  # Why the model is not native, or not served; empty for a native one.
    shape: ModelShape | None  # None if the model is not served.

    @property
    def text(self) -> str:
        """One line for people."""
        if self.shape is None:
            return f"not served: {self.reason}"
        shape = self.shape
        parts = f"{shape.architecture}, {shape.num_layers} layers"
        if isinstance(shape, ModelSpec) and shape.moe is not None:
            mxfp4 = " in MXFP4" if shape.moe.mxfp4 else ""
            parts += f", {shape.moe.num_experts} experts{mxfp4}, {shape.moe.top_k} for each token"
        how = "native" if self.how == "native" else f"through transformers, because {self.reason}"
        return f"{how} ({parts}, up to {shape.max_position} tokens)"

    @property
    def details(self) -> dict[str, Any]:
        """The facts in `text`, for JSON."""
        if self.shape is None:
            return {"reason": self.reason}
        shape = self.shape
        found = {"architecture": shape.architecture, "layers": shape.num_layers, "max_model_len": shape.max_position}
        if isinstance(shape, ModelSpec) and shape.moe is not None:
            found |= {"experts": shape.moe.num_experts, "experts_per_token": shape.moe.top_k}
        return found | ({"reason": self.reason} if self.reason else {})


def model_support(model_dir: Path) -> ModelSupport:
    """Returns how a model directory is served. Raises ConfigError if its config.json is missing or unreadable."""
    config, generation = read_config(model_dir)
    reason = ""
    try:
        return ModelSupport("native", "", parse_spec(config, generation))
    except NotNative as error:
        reason = error.message
    except ConfigError as error:
        return ModelSupport("no", error.message, None)
    try:
        return ModelSupport("transformers", reason, open_model(model_dir).spec)
    except ConfigError as error:
        return ModelSupport("no", error.message, None)
