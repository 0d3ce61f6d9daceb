"""The part of a model that one tensor-parallel rank holds. `layers.Linear` says how its weight is split."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.errors import ConfigError
from engine.models.base import ModelShape
from engine.models.spec import ModelSpec


def shard_error(text: str) -> ConfigError:
    """Returns the error of a model that cannot be split as configured."""
    return ConfigError(f"tensor_parallel_size: {text}", field="tensor_parallel_size")


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
            raise shard_error(f"{spec.architecture} is computed by transformers, on one device only")
        for name, count in (
            ("num_key_value_heads", spec.num_kv_heads),
            ("num_attention_heads", spec.num_heads),
            ("intermediate_size", spec.intermediate_size),
        ):
            if count % self.size:
                raise shard_error(f"{self.size} does not divide the model's {name}, {count}")
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
            intermediate_size=spec.intermediate_size // self.size,
            # Only rank 0 computes logits. With a tied embedding the other ranks allocate no LM head.
            tie_word_embeddings=spec.tie_word_embeddings or self.rank > 0,
        )


UNSHARDED = Shard()
