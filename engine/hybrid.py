"""Models with several kinds of layers: their KV groups, the number of their states, and what they do not support."""

from __future__ import annotations

import logging
from typing import Any

import torch

from common.errors import ConfigError
from common.kv_groups import split_layers
from common.kv_layout import LayerGroup
from engine.config import DEFAULT_KV_MEMORY, EngineConfig
from engine.device import format_bytes
from engine.kv.groups.state_pool import EXTRA_SLOTS, StatePool, StateShape, default_num_states
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.models.base import ModelShape

log = logging.getLogger(__name__)


def check_hybrid(config: EngineConfig, spec: ModelShape) -> None:
    """Raises ConfigError for settings that a model with recurrent states does not support."""
    if spec.states is None:
        return
    if not config.recurrent_states:
        problem = (
            f"{spec.architecture} has a recurrent state, which pods hand over with KV groups only: set --kv-groups"
        )
        raise ConfigError(f"model: {problem}", field="model")
    refused = {
        "speculation": config.speculation != "none" and "a rejected draft would have to be taken out of the state",
        "host_cache": config.host_cache > 0 and "host memory keeps blocks, and no states",
        "max_adapters": config.max_adapters > 0 and "the layers with a state have no products with adapters",
        "tensor_parallel_size": config.tensor_parallel_size > 1 and "the layers with a state are not split over ranks",
    }
    for field, reason in refused.items():
        if reason:
            problem = f"not supported for {spec.architecture}, which has a recurrent state: {reason}; leave it off"
            raise ConfigError(f"{field}: {problem}", field=field)


def kv_groups_of(config: EngineConfig, spec: ModelShape) -> tuple[LayerGroup, ...]:
    """Returns the KV groups of a model. Raises ConfigError for groups with a setting that does not support them."""
    groups = split_layers(spec.windows) if config.kv_groups and spec.states is None else ()
    for name, asked, why in (
        ("tensor_parallel_size", config.tensor_parallel_size > 1, "ranks exchange whole blocks"),
        ("kv_order", config.kv_order == "heads", "it is for pods with several ranks, which exchange whole blocks"),
        ("speculation_model", config.speculation_model is not None, "the draft model's KV lies in whole blocks"),
        ("host_cache", config.host_cache > 0, "the host tier keeps whole blocks"),
        ("max_adapters", config.max_adapters > 0, "adapters were not proven with several block tables"),
        ("prefix_cache", not config.prefix_cache, "window pages are released into the prefix cache"),
        ("cache_policy", config.cache_policy != "lru", "pages that left a window need an order of their own"),
        ("cache_pin", config.cache_pin > 0, "a pinned block has no window pages"),
    ):
        if groups and asked:
            problem = f"{name} {getattr(config, name)} cannot be combined with kv_groups for this model: {why}"
            raise ConfigError(problem, field=name)
    return groups


def state_layout(shape: StateShape | None, dtype: str) -> dict[str, Any]:
    """Returns the fields of the KV layout that describe recurrent states; none for a model without."""
    if shape is None:
        return {}
    return {"states": shape.describe(dtype), "state_bytes": shape.slot_bytes(TORCH_DTYPES[dtype])}


def _check_float32(device: torch.device) -> None:
    """Raises ConfigError if the kernels for prompts do not fit this card in float32."""
    from engine.kernels.card import shared_bytes
    from engine.kernels.gated_delta.chunks import FLOAT32_SHARED_BYTES

    if (size := shared_bytes(device)) < FLOAT32_SHARED_BYTES:
        need = f"{FLOAT32_SHARED_BYTES} bytes of shared memory, this card has {size}: use bfloat16"
        raise ConfigError(f"dtype: float32 with gated delta layers needs {need}", field="dtype")


def num_states(
    config: EngineConfig, shape: StateShape | None, device: torch.device, dtype: torch.dtype, max_seqs: int
) -> int:
    """Returns the slots for recurrent states of an engine after the weights are loaded; 0 for a model without."""
    if shape is None:
        return 0
    if device.type == "cuda" and dtype == torch.float32:
        _check_float32(device)
    size = shape.slot_bytes(dtype)
    count = config.num_states
    if not count:
        memory = config.kv_memory or DEFAULT_KV_MEMORY
        if not config.kv_memory and device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            memory = max(0, free - int(total * (1 - config.gpu_memory_utilization)))
        count = default_num_states(size, memory, max_seqs)
    log.info("%d recurrent states, %s each", count, format_bytes(size))
    return count


def make_states(shape: StateShape | None, kv: KVPool, dtype: str) -> StatePool | None:
    """Returns the states in the slots of a KV pool; None for a model without."""
    if shape is None:
        return None
    return StatePool(shape, kv.state_slots - EXTRA_SLOTS, kv.data.device, TORCH_DTYPES[dtype], kv.states)
