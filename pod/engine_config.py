"""Engine configuration of a pod."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.errors import ConfigError
from common.model.directory import resolve_model
from common.settings.configs import PodConfig, PodEngineSettings
from common.settings.table import declared
from common.types import Role
from engine.config import EngineConfig


def _draft_dir(config: PodConfig) -> Path | None:
    """Returns the directory of the draft model, which may be a known name, or of the EAGLE head."""
    if config.speculation_model is None:
        return None
    name = str(config.speculation_model)
    try:
        if config.speculation == "draft_model":
            return resolve_model(name, tokenizer=False, weights=config.load_format == "auto")
    except ConfigError as error:
        raise ConfigError(error.message, field="speculation_model") from error
    return Path(name).resolve()


def engine_config(config: PodConfig) -> EngineConfig:
    """Builds the engine's part of a pod's configuration. Decode pods compute local prompts in small chunks."""
    shared = {name: getattr(config, name) for name in declared(PodEngineSettings)}
    shared["speculation_model"] = _draft_dir(config)
    model_dir = resolve_model(config.model, tokenizer=False, weights=config.load_format == "auto")
    made = EngineConfig(model_dir=model_dir, **shared)
    if config.role is Role.DECODE:
        local = config.local_chunk_tokens or (256 if made.resolve_device().type == "cuda" else 64)
        return dataclasses.replace(made, local_chunk_tokens=local)
    return dataclasses.replace(made, local_chunk_tokens=0)
