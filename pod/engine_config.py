"""Engine configuration of a pod."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.errors import ConfigError
from common.model.directory import resolve_model
from common.settings.configs import PodConfig
from common.types import Role
from engine.config import EngineConfig


def _draft_dir(config: PodConfig) -> Path | None:
    """Returns the directory of the draft model, which may be a known name, or of the EAGLE head."""
    name = config.speculation_model
    if name is None:
        return None
    try:
        if config.speculation == "draft_model":
            return resolve_model(name, tokenizer=False, weights=config.load_format == "auto")
    except ConfigError as error:
        raise ConfigError(error.message, field="speculation_model") from error
    return Path(name).resolve()


def engine_config(config: PodConfig) -> EngineConfig:
    """Builds the engine's part of a pod's configuration. Decode pods compute local prompts in small chunks."""
    made = EngineConfig(
        model_dir=resolve_model(config.model, tokenizer=False, weights=config.load_format == "auto"),
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        load_format=config.load_format,
        weights_seed=config.weights_seed,
        block_size=config.block_size,
        kv_memory=config.kv_memory,
        host_cache=config.host_cache,
        checksums=config.checksums,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_model_len=config.max_model_len,
        chunk_tokens=config.chunk_tokens,
        max_seqs=config.max_seqs,
        cuda_graphs=config.cuda_graphs,
        chunk_graphs=config.chunk_graphs,
        overlap=config.overlap,
        speculation=config.speculation,
        speculation_model=_draft_dir(config),
        speculation_tokens=config.speculation_tokens,
        speculation_accept=config.speculation_accept,
        threads=config.threads,
        tensor_parallel_size=config.tensor_parallel_size,
        tensor_parallel_nodes=config.tensor_parallel_nodes,
        tensor_parallel_master=config.tensor_parallel_master,
    )
    if config.role is not Role.DECODE:
        return made
    local = config.local_chunk_tokens or (256 if made.resolve_device().type == "cuda" else 64)
    return dataclasses.replace(made, local_chunk_tokens=local)
