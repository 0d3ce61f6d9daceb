"""From a model's directory to a Model: our own code where it computes the architecture, else transformers' module.

`open_model` reads configurations only, so what cannot be served is refused before weights are read; `load` reads or
invents them. transformers is imported when a model needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from engine.device import require_memory
from engine.models import weights
from engine.models.base import Model, ModelShape
from engine.models.decoder import Decoder
from engine.models.ops import DecoderOps
from engine.models.shard import Shard
from engine.models.spec import ModelSpec, NotNative, eos_token_ids, parse_spec, read_config


@dataclass(frozen=True, slots=True)
class ModelSource:
    """seed: of random weights; None: the directory's safetensors."""

    spec: ModelShape
    model_dir: Path
    seed: int | None

    def revision(self, device: torch.device) -> str:
        """16 hex digits that name configuration and weights, equal where a model on `device` computes the same KV."""
        if self.seed is None:
            return weights.weights_revision(self.spec, self.model_dir)
        return weights.dummy_revision(self.spec, self.seed, device)

    @torch.inference_mode()
    def load(self, max_len: int, device: torch.device, dtype: torch.dtype) -> Model:
        """The model on its device, for sequences of up to max_len tokens; ConfigError when the weights are not the
        configuration's, or the device has no room for them.
        """
        with require_memory("the weights", "model"):
            return self._load(max_len, device, dtype)

    def _load(self, max_len: int, device: torch.device, dtype: torch.dtype) -> Model:
        if not isinstance(self.spec, ModelSpec):
            from engine.models.hf.config import HfSpec
            from engine.models.hf.model import load_hf_model

            assert isinstance(self.spec, HfSpec)
            return load_hf_model(self.spec, self.model_dir, device, dtype, seed=self.seed)
        model = Decoder(self.spec, max_len, device, dtype)
        if self.seed is None:
            weights.load_weights(model, self.model_dir, self.spec)
        else:
            weights.randomize(model, self.seed)
        return model


def open_model(model_dir: Path, load_format: str = "auto", seed: int = 0) -> ModelSource:
    """load_format auto reads the weights, dummy makes random ones of `seed` (config.json is all that it needs).

    ConfigError when config.json is absent or malformed, or the model cannot be served, and why.
    """
    config, generation = read_config(model_dir)
    try:
        spec: ModelShape = parse_spec(config, generation)
    except NotNative as reason:
        spec = _hf_spec(model_dir, eos_token_ids(config, generation), reason)
    return ModelSource(spec, model_dir, seed if load_format == "dummy" else None)


def _hf_spec(model_dir: Path, eos: tuple[int, ...], reason: NotNative) -> ModelShape:
    try:
        from engine.models.hf.trace import trace_spec
    except ImportError as error:
        raise ConfigError(
            f"{reason.message}; models without go through transformers: pip install 'baton-serving[hf]' ({error})",
            field="model",
        ) from error
    return trace_spec(model_dir, eos)


@torch.inference_mode()
def load_shard(
    source: ModelSource,
    shard: Shard,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    wrap: Callable[[DecoderOps], DecoderOps],
) -> Decoder:
    """What a rank holds of the model; ConfigError when it cannot be cut so, see Shard. wrap: see Decoder."""
    spec = shard.shard_spec(source.spec)
    assert isinstance(source.spec, ModelSpec)
    assert isinstance(spec, ModelSpec)
    with require_memory("its part of the weights", "model"):
        model = Decoder(spec, max_len, device, dtype, wrap_ops=wrap)
        if source.seed is None:
            weights.load_weights(model, source.model_dir, source.spec, shard)
        else:
            weights.randomize_shard(model, source.seed, source.spec, shard)
    return model
