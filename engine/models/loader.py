"""Loads a model directory: with our own decoder if it supports the architecture, otherwise with the transformers code.

`open_model` reads configuration files only, so an unsupported model is refused before its weights are read.
`ModelSource.load` reads the weights, or makes random ones. transformers is imported only for models that need it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from common.errors import ConfigError
from engine.device import format_bytes, require_memory
from engine.models.base import Model, ModelShape
from engine.models.decoder import Decoder
from engine.models.ops import AllReduce
from engine.models.spec import UNSHARDED, ModelSpec, NotNative, Shard, eos_token_ids, parse_spec, read_config
from engine.models.weights.load import load_weights
from engine.models.weights.random_weights import randomize
from engine.models.weights.revision import digest, weights_revision
from engine.quantization.formats import read_quantization
from engine.quantization.scheme import Quantization, at_load

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded."""

    spec: ModelShape
    model_dir: Path
    seed: int | None  # Seed of random weights. None: the weights are the directory's safetensors files.
    quantization: Quantization | None = None  # How linear layers are quantised, in the checkpoint or while they load.
    deterministic: bool = False  # Compute every token in one order of sums.

    @property
    def weights_text(self) -> str:
        """How the weights are quantised, in words; "" if they are not. Pods compare it, and clients see it."""
        return "" if self.quantization is None else self.quantization.text

    def revision(self, device: torch.device) -> str:
        """Returns 16 hex digits for configuration and weights. Equal revisions compute the same KV on `device`."""
        if self.seed is None:
            revision = weights_revision(self.spec, self.model_dir)
        else:
            revision = digest(f"dummy {self.seed} {device.type} {self.spec!r}")
        forms = [] if self.quantization is None else [repr(self.quantization)]
        # The KV of the deterministic mode has other bits, so pods with and without it must not exchange blocks.
        forms += ["deterministic"] if self.deterministic else []
        return digest(" ".join([revision, *forms])) if forms else revision

    def check_layers(self) -> None:
        """Raises ConfigError if layers are quantised in a way that `load` refuses. It makes them without memory."""
        if isinstance(self.spec, ModelSpec) and self.quantization is not None:
            Decoder(self.spec, 1, torch.device("meta"), torch.float32, quantization=self.quantization)

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
                if self.deterministic:
                    problem = f"{spec.architecture} is computed by transformers, which has no fixed order of sums"
                    raise ConfigError(f"deterministic: {problem}: leave it off for this model", field="deterministic")
                return load_hf_model(spec, self.model_dir, device, dtype, seed=self.seed)
            quantization = self.quantization
            options: dict[str, Any] = {"quantization": quantization, "deterministic": self.deterministic}
            model = Decoder(spec, max_len, device, dtype, all_reduce=all_reduce, **options)
            if self.seed is None:
                assert isinstance(self.spec, ModelSpec)
                load_weights(model, self.model_dir, self.spec, shard, quantization)
            else:
                randomize(model, self.seed, shard)
            if quantization is not None:
                _log.info("weights: %s, %s in the layers", quantization.text, format_bytes(model.quantized_size()))
            model.prepare()
            return model


def open_model(
    model_dir: Path, load_format: str = "auto", seed: int = 0, form: str = "auto", *, deterministic: bool = False
) -> ModelSource:
    """Reads a model directory's configuration. Raises ConfigError if it is malformed, or the model is not supported.

    load_format "auto" reads the weights; "dummy" makes random weights from `seed` and needs config.json only. `form`
    is the setting `weights`: auto, or the kind to which an unquantised checkpoint is quantised. `deterministic` is the
    field of the result; it raises ConfigError for quantised weights and mixtures of experts.
    """
    config, generation = read_config(model_dir)
    stored = read_quantization(model_dir, config)
    if stored is not None and form != "auto":
        problem = f"the checkpoint is quantised already, as {stored.text}"
        raise ConfigError(f"weights {form}: {problem}: use --weights auto", field="weights")
    quantization = at_load(form) if stored is None else stored
    try:
        spec: ModelShape = parse_spec(config, generation)
    except NotNative as reason:
        try:
            from engine.models.hf.spec import trace_spec
        except ImportError as error:
            remedy = "other models need transformers: pip install 'baton-serving[hf]'"
            raise ConfigError(f"{reason.message}; {remedy} ({error})", field="model") from error
        if quantization is not None:
            field = "weights" if stored is None else "model"
            where = f"weights {form}" if stored is None else f"{stored.file}: weights of the format {stored.method!r}"
            problem = f"{reason.message}, and transformers computes it in its dtype only"
            raise ConfigError(f"{where} are not supported for this model: {problem}", field=field) from reason
        spec = trace_spec(model_dir, eos_token_ids(config, generation))
    if deterministic:
        _check_fixed_order(spec, quantization)
    return ModelSource(spec, model_dir, seed if load_format == "dummy" else None, quantization, deterministic)


def _check_fixed_order(spec: ModelShape, quantization: Quantization | None) -> None:
    """Raises ConfigError if a model has products without a fixed order of sums."""
    experts = isinstance(spec, ModelSpec) and spec.moe is not None
    latent = ["latent attention"] if spec.latent_dim else []
    quantised = ["quantised weights"] if quantization is not None else []
    latent += ["gated delta layers"] if spec.states is not None else []
    for problem in quantised + latent + (["experts"] if experts else []):
        text = f"deterministic: products with {problem} have no fixed order of sums: leave it off for this model"
        raise ConfigError(text, field="deterministic")


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """How a model is served. It says nothing about the weights, which are not read."""

    source: ModelSource | None  # None if the model is not served.
    reason: str  # Why the model is not native, or not served; empty for a native one.

    @property
    def how(self) -> Literal["native", "transformers", "no"]:
        """The code that computes the model."""
        if self.source is None:
            return "no"
        return "native" if isinstance(self.source.spec, ModelSpec) else "transformers"

    @property
    def text(self) -> str:
        """One line for people."""
        if self.source is None:
            return f"not served: {self.reason}"
        spec = self.source.spec
        parts = [spec.architecture, f"{spec.num_layers} layers"]
        if isinstance(spec, ModelSpec) and spec.moe is not None:
            parts.append(f"{spec.moe.num_experts} experts, {spec.moe.top_k} for each token")
        if spec.latent_dim:
            parts.append(f"latents of {spec.head_dim} numbers a token and layer")
        if (states := spec.states) is not None:
            size = format_bytes(states.slot_bytes(torch.bfloat16))
            parts.append(f"{states.layers} of them with a recurrent state, {size} for each sequence")
        parts += [self.source.weights_text] if self.source.weights_text else []
        how = "native" if self.how == "native" else f"through transformers, because {self.reason}"
        return f"{how} ({', '.join(parts)}, up to {spec.max_position} tokens)"

    @property
    def details(self) -> dict[str, Any]:
        """The facts in `text`, for JSON."""
        found: dict[str, Any] = {"served": self.how, "reason": self.reason or None}
        if self.source is not None:
            spec = self.source.spec
            found |= {"architecture": spec.architecture, "layers": spec.num_layers, "max_model_len": spec.max_position}
            found["weights"] = self.source.weights_text or None
            vectors = 1 if spec.latent_dim else 2
            found["kv_numbers_per_token"] = vectors * spec.kv_layers * spec.num_kv_heads * spec.head_dim
            if isinstance(spec, ModelSpec) and spec.moe is not None:
                found |= {"experts": spec.moe.num_experts, "experts_per_token": spec.moe.top_k}
        return {name: value for name, value in found.items() if value is not None}


def model_support(model_dir: Path) -> ModelSupport:
    """Returns how a model directory is served. Raises ConfigError if its config.json is missing or unreadable."""
    config, generation = read_config(model_dir)
    try:
        source = open_model(model_dir)
        source.check_layers()
    except ConfigError as error:
        return ModelSupport(None, error.message)
    try:
        parse_spec(config, generation)
    except NotNative as error:
        return ModelSupport(source, error.message)
    return ModelSupport(source, "")
