"""Loads a model directory: with our own decoder if it supports the architecture, otherwise with the transformers code.

`open_model` reads configuration files only, so an unsupported model is refused before its weights are read.
`ModelSource.load` reads the weights, or makes random ones. transformers is imported only for models that need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from engine.device import require_memory
from engine.models import weights
from engine.models.base import Model, ModelShape
from engine.models.cpu_weights import quantize
from engine.models.decoder import Decoder
from engine.models.ops import AllReduce
from engine.models.spec import UNSHARDED, ModelSpec, NotNative, Shard, eos_token_ids, parse_spec, read_config


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded."""

    spec: ModelShape
    model_dir: Path
    seed: int | None  # Seed of random weights. None: the weights are the directory's safetensors files.
    weights: str = "auto"  # Form of the weights: in the dtype of the model (auto), or int8.
    deterministic: bool = False  # Compute every token in one order of sums.

    def revision(self, device: torch.device) -> str:
        """Returns 16 hex digits for configuration and weights. Equal revisions compute the same KV on `device`."""
        if self.seed is None:
            revision = weights.weights_revision(self.spec, self.model_dir)
        else:
            revision = weights.digest(f"dummy {self.seed} {device.type} {self.spec!r}")
        forms = [self.weights] if self.weights != "auto" else []
        # The KV of the deterministic mode has other bits, so pods with and without it must not exchange blocks.
        forms += ["deterministic"] if self.deterministic else []
        return weights.digest(" ".join([revision, *forms])) if forms else revision

    @torch.inference_mode()
    def load(
        self,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard = UNSHARDED,
        all_reduce: AllReduce | None = None,
    ) -> Model:
        """Loads the model, or one rank's part of it, for sequences of up to max_len tokens.

        Raises ConfigError if the weights do not fit the configuration or the memory of the device, or if the model
        cannot be sharded this way. A shard needs `all_reduce`, see `TorchOps`.
        """
        spec = shard.shard_spec(self.spec)
        with require_memory("the weights", "model"):
            if not isinstance(spec, ModelSpec):
                from engine.models.hf.model import load_hf_model
                from engine.models.hf.spec import HfSpec

                assert isinstance(spec, HfSpec)
                if self.weights != "auto":
                    problem = f"{spec.architecture} is computed by transformers, in its dtype only"
                    raise ConfigError(f"weights {self.weights}: {problem}: use --weights auto", field="weights")
                if self.deterministic:
                    problem = f"{spec.architecture} is computed by transformers, which has no fixed order of sums"
                    raise ConfigError(f"deterministic: {problem}: leave it off for this model", field="deterministic")
                return load_hf_model(spec, self.model_dir, device, dtype, seed=self.seed)
            model = Decoder(spec, max_len, device, dtype, all_reduce=all_reduce, deterministic=self.deterministic)
            if self.seed is None:
                assert isinstance(self.spec, ModelSpec)
                weights.load_weights(model, self.model_dir, self.spec, shard)
            else:
                weights.randomize(model, self.seed, shard)
            if self.weights == "int8":
                quantize(list(model.layers))
            return model


def open_model(
    model_dir: Path, load_format: str = "auto", seed: int = 0, form: str = "auto", *, deterministic: bool = False
) -> ModelSource:
    """Reads a model directory's configuration. Raises ConfigError if it is malformed, or the model is not supported.

    load_format "auto" reads the weights; "dummy" makes random weights from `seed` and needs config.json only. `form`
    and `deterministic` are the fields `weights` and `deterministic` of the result.
    """
    config, generation = read_config(model_dir)
    try:
        spec: ModelShape = parse_spec(config, generation)
    except NotNative as reason:
        try:
            from engine.models.hf.spec import trace_spec
        except ImportError as error:
            remedy = "other models need transformers: pip install 'baton-serving[hf]'"
            raise ConfigError(f"{reason.message}; {remedy} ({error})", field="model") from error
        spec = trace_spec(model_dir, eos_token_ids(config, generation))
    return ModelSource(spec, model_dir, seed if load_format == "dummy" else None, form, deterministic)
