"""The description of a model for our decoder (`ModelSpec`), read from a Hugging Face config.json, and its shards."""

from engine.models.spec.families import ARCHITECTURES
from engine.models.spec.fields import NotNative, read_json
from engine.models.spec.model import GatedDeltaSpec, HybridModelSpec, LatentModelSpec, LatentSpec, ModelSpec, MoeSpec
from engine.models.spec.parse import eos_token_ids, parse_spec, read_config
from engine.models.spec.rope import RopeSpec
from engine.models.spec.shard import UNSHARDED, Shard, shard_error

__all__ = [
    "ARCHITECTURES",
    "UNSHARDED",
    "GatedDeltaSpec",
    "HybridModelSpec",
    "LatentModelSpec",
    "LatentSpec",
    "ModelSpec",
    "MoeSpec",
    "NotNative",
    "RopeSpec",
    "Shard",
    "eos_token_ids",
    "parse_spec",
    "read_config",
    "read_json",
    "shard_error",
]
