"""The part of a model that one tensor-parallel rank holds (Megatron-LM, Shoeybi et al. 2019).

The q, k, v, gate and up matrices are split by rows: a rank computes whole heads and its columns of the MLP. The out and
down matrices are split by columns: a rank computes a partial sum, which an all-reduce completes. Every rank holds all
other parameters in full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.base import ModelShape
from engine.models.spec import ModelSpec

#: The setting that errors of this module name.
SHARD_FIELD = "tensor_parallel_size"
#: Checkpoint matrices that are split by rows.
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
#: Checkpoint matrices that are split by columns.
COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` in a group of `size`. Size 1 is the whole model."""

    rank: int = 0
    size: int = 1

    def shard_spec(self, spec: ModelShape) -> ModelShape:
        """Returns the shape of this rank's part. Raises ConfigError if the model cannot be split into `size` parts."""
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
            # Only rank 0 computes logits. With a tied embedding the other ranks allocate no LM head.
            tie_word_embeddings=spec.tie_word_embeddings or self.rank > 0,
        )

    def read(self, file: Any, name: str) -> Tensor:
        """Reads this rank's part of a tensor from an open safetensors file, and no other bytes of it."""
        dim = self._shard_dim(name)
        if dim is None:
            tensor: Tensor = file.get_tensor(name)
            return tensor
        part = file.get_slice(name)
        shape = part.get_shape()
        if dim >= len(shape) or shape[dim] % self.size:
            raise ConfigError(
                f"{name} of shape {tuple(shape)} cannot be split into {self.size} parts", field=SHARD_FIELD
            )
        width = shape[dim] // self.size
        span = slice(self.rank * width, (self.rank + 1) * width)
        read: Tensor = part[span] if dim == 0 else part[:, span]
        return read

    def _shard_dim(self, name: str) -> int | None:
        """Returns the dimension in which a checkpoint tensor is split. None: it is not split."""
        if self.size == 1:
            return None
        *_, module, kind = ("", *name.split("."))
        if module in ROWS:
            return 0
        return 1 if module in COLUMNS and kind == "weight" else None

    def slice_of(self, name: str, whole: Tensor, spec: ModelSpec) -> Tensor:
        """Returns this rank's part of a parameter of the whole model.

        Args:
            name: the parameter's name in a Decoder.
            whole: the parameter of the whole model.
            spec: the spec of the whole model.
        """
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
