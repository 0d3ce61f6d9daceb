"""What one rank of a tensor-parallel group holds of a model: whole heads, and its part of the MLP's width.

Queries, keys, values, gate and up are cut by rows, so a rank computes its own heads and its own columns of the MLP;
out and down by columns, so their products are parts of a sum that the group makes. Everything else is whole on each
rank. (Shoeybi et al. 2019, Megatron-LM.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.base import ModelShape
from engine.models.spec import ModelSpec

SHARD_FIELD = "tensor_parallel_size"
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`; of size 1 it is the whole model."""

    rank: int = 0
    size: int = 1

    def shard_spec(self, spec: ModelShape) -> ModelShape:
        """The shape of this rank's part; ConfigError when the model cannot be cut so."""
        if self.size == 1:
            return spec
        if not isinstance(spec, ModelSpec):
            raise ConfigError(
                f"{SHARD_FIELD}: {spec.architecture} is computed by transformers, on one device only", field=SHARD_FIELD
            )
        for name, count in (
            ("num_key_value_heads", spec.num_kv_heads),
            ("num_attention_heads", spec.num_heads),
            ("intermediate_size", spec.intermediate_size),
        ):
            if count % self.size:
                raise ConfigError(
                    f"{SHARD_FIELD}: {self.size} does not divide the model's {name}, {count}", field=SHARD_FIELD
                )
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
            intermediate_size=spec.intermediate_size // self.size,
            tie_word_embeddings=spec.tie_word_embeddings
            or self.rank > 0,  # logits are rank 0's: the others have no head of their own
        )

    def read(self, file: Any, name: str) -> Tensor:
        """This rank's part of a tensor of an open safetensors file; no more than that is read."""
        dim = self._shard_dim(name)
        if dim is None:
            tensor: Tensor = file.get_tensor(name)
            return tensor
        part = file.get_slice(name)
        shape = part.get_shape()
        if dim >= len(shape) or shape[dim] % self.size:
            raise ConfigError(f"{name} of shape {tuple(shape)} cannot be cut into {self.size}", field=SHARD_FIELD)
        width = shape[dim] // self.size
        at = slice(self.rank * width, (self.rank + 1) * width)
        cut: Tensor = part[at] if dim == 0 else part[:, at]
        return cut

    def _shard_dim(self, name: str) -> int | None:
        """The dimension along which a checkpoint's tensor is cut."""
        if self.size == 1:
            return None
        *_, module, kind = ("", *name.split("."))
        if module in ROWS:
            return 0
        return 1 if module in COLUMNS and kind == "weight" else None

    def slice_of(self, name: str, whole: Tensor, spec: ModelSpec) -> Tensor:
        """This rank's part of a parameter of the whole model, by its name in a Decoder; spec: the whole model's."""
        *_, module, kind = ("", *name.split("."))
        merged = {"qkv": [spec.query_size, spec.kv_size, spec.kv_size], "gate_up": [spec.intermediate_size] * 2}
        if self.size == 1:
            return whole
        if module in merged:
            parts = torch.split(whole, merged[module])
            return torch.cat([part.chunk(self.size)[self.rank] for part in parts])
        if module in ("out", "down") and kind == "weight":
            return whole.chunk(self.size, dim=1)[self.rank]
        return whole


UNSHARDED = Shard()
