"""The part of a model that one tensor-parallel rank computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from common.errors import ConfigError
from engine.models.base import ModelShape
from engine.models.spec.model import MXFP4_GROUP, ModelSpec, MoeSpec


def shard_error(text: str) -> ConfigError:
    """Returns the error of a model that cannot be split as configured."""
    return ConfigError(f"tensor_parallel_size: {text}", field="tensor_parallel_size")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` in a group of `size`; 1: the whole model. `layers.Linear` says how weights are split.

    With more ranks than KV heads, neighbouring ranks have the same KV head and different query heads of it.
    """

    rank: int = 0
    size: int = 1
    #: Each rank holds whole experts (expert parallelism). False: each rank holds a part of every expert, if the experts
    #: can be split so.
    whole_experts: bool = False

    def shard_spec(self, spec: ModelShape) -> ModelShape:
        """Returns the shape of this rank's part. Raises ConfigError if the model cannot be split into `size` parts."""
        if self.size == 1:
            return spec
        if not isinstance(spec, ModelSpec):
            raise shard_error(f"{spec.architecture} is computed by transformers, on one device only")
        if spec.states is not None:
            raise shard_error(f"the gated delta layers of {spec.architecture} are computed on one device only")
        # A latent belongs to all heads, so every rank has all latents.
        kv_heads, kv_copies = (spec.num_kv_heads, 1) if spec.latent_dim else self._kv_part(spec.num_kv_heads)
        names = {"num_heads": "num_attention_heads"}
        fields = ["num_heads"]
        if spec.moe is None or not all(spec.moe.layers):
            fields.append("intermediate_size")
        parts: dict[str, Any] = {
            field: self._part(getattr(spec, field), f"the model's {names.get(field, field)}") for field in fields
        }
        moe = None if spec.moe is None else self._shard_experts(spec.moe)
        # Only rank 0 computes logits. With a tied embedding the other ranks allocate no LM head.
        tied = spec.tie_word_embeddings or self.rank > 0
        return replace(spec, **parts, num_kv_heads=kv_heads, kv_copies=kv_copies, moe=moe, tie_word_embeddings=tied)

    def among(self, copies: int) -> Shard:
        """Returns the part of this rank in a tensor that `copies` neighbouring ranks have alike."""
        return self if copies == 1 else replace(self, rank=self.rank // copies, size=self.size // copies)

    def splits_experts(self, moe: MoeSpec) -> bool:
        """Returns whether each rank holds a part of every expert, otherwise it holds whole experts."""
        size, rest = divmod(moe.expert_size, self.size)
        return not self.whole_experts and not rest and not (moe.mxfp4 and size % MXFP4_GROUP)

    def _shard_experts(self, moe: MoeSpec) -> MoeSpec:
        shared = self._part(moe.shared_size, "the intermediate size of the shared experts")
        if self.splits_experts(moe):
            bias = moe.down_bias and self.rank == 0
            return replace(moe, expert_size=moe.expert_size // self.size, shared_size=shared, down_bias=bias)
        if moe.num_experts % self.size:
            problem = f"{self.size} divides neither an expert's intermediate size, {moe.expert_size}"
            raise shard_error(f"{problem}, nor the number of experts, {moe.num_experts}")
        experts = moe.num_experts // self.size
        return replace(moe, first_local=self.rank * experts, num_local=experts, shared_size=shared)

    def _kv_part(self, heads: int) -> tuple[int, int]:
        """Returns the KV heads of a rank, and the number of ranks that have the same ones."""
        if heads % self.size and self.size % heads:
            problem = f"{self.size} ranks cannot share the model's num_key_value_heads, {heads}"
            raise shard_error(f"{problem}: expected a divisor or a multiple of it")
        return max(1, heads // self.size), max(1, self.size // heads)

    def _part(self, whole: int, name: str) -> int:
        part, rest = divmod(whole, self.size)
        if rest:
            raise shard_error(f"{self.size} does not divide {name}, {whole}")
        return part


UNSHARDED = Shard()
