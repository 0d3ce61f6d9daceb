"""Reads the configuration of a model that transformers computes, and builds its modules.

Model code of transformers runs inside `explain_refusal`, which turns its exceptions into a one-line ConfigError.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError
from engine.device import out_of_memory_message
from engine.models.base import ModelShape

TRACE_NAME = "baton-trace"  # Name of our functions in the registries of transformers while a model is traced.


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSpec(ModelShape):
    """A model that transformers computes."""

    config: str  # config.json in canonical form. It is part of the revision, because it decides the computation.
    decoder_path: str  # Module path of the decoder, the part between embedding and final norm.
    attention_paths: tuple[str, ...]  # Module paths of the attention layers.
    #: Factor on the queries of each layer. Not 1 if the layer's scale differs from the shape's.
    query_scales: tuple[float, ...]
    grouped: bool  # Whether the model has experts that run as grouped products.
    host_traffic: bool  # Whether a forward pass copies from the host.
    output_class: type = field(repr=False, compare=False)  # Class that the decoder returns.


class _IdentityDecoder(nn.Module):
    """The replacement of a model's decoder. It returns its input."""

    def __init__(self, output_class: type) -> None:
        super().__init__()
        self._output_class = output_class

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self._output_class(last_hidden_state=inputs_embeds)


@contextmanager
def explain_refusal(name: str) -> Iterator[None]:
    """Turns every exception inside into a one-line ConfigError, except out-of-memory errors of the device."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name} is not supported: {error.message}", field="model") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and out_of_memory_message(error) is not None:
            raise
        first = str(error).strip().split("\n")[0]
        if "on meta tensors" in first:
            first = "its forward pass depends on values of tensors"
        elif isinstance(error, KeyError) and TRACE_NAME in first:
            first = "it does not use the attention interface of transformers"
        else:
            first = f"{type(error).__name__}: {first}"
        raise ConfigError(f"{name} of transformers is not supported: {first}", field="model") from error


def read_hf_config(model_dir: Path) -> Any:
    """Reads the configuration of a causal decoder. Raises ConfigError for unsupported kinds of layers or rope.

    Code in the directory is not run, and transformers does not ask for permission to run it.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(f"transformers cannot read the config.json of {model_dir}: {first}", field="model") from error
    name = next(iter(config.architectures or ()), f"a model of type {config.model_type}")

    def refusal(reason: str) -> ConfigError:
        return ConfigError(f"{name} is not supported: {reason}", field="model")

    if config.is_encoder_decoder:
        raise refusal("it is an encoder-decoder model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ != name:
        raise refusal("transformers has no causal language model for it")
    text = config.get_text_config().to_dict()
    kinds = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise refusal(f"it has layers of {', '.join(sorted(kinds))}")
    if any("dynamic" in rope["rope_type"] for rope in _ropes(text)):
        raise refusal("with dynamic rope scaling, keys depend on later tokens")
    return config


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the rope parameters of a configuration: one set for all layers, or one for each kind of layer."""
    raw = text.get("rope_parameters") or {}
    sets = [raw, *(value for value in raw.values() if isinstance(value, Mapping))]
    return [rope for rope in sets if "rope_type" in rope]


def max_length(text: Any) -> int:
    """Returns the longest sequence in tokens.

    longrope is limited to its original length, because all keys change when a sequence grows beyond it.
    """
    longest = int(text.max_position_embeddings)
    for rope in _ropes(text.to_dict()):
        if rope["rope_type"] == "longrope":
            longest = min(longest, int(rope["original_max_position_embeddings"]))
    return longest


def canonical_config(config: Any) -> str:
    """Returns the configuration as canonical JSON, without fields that do not change the computation."""
    fields = config.to_dict()
    for name in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"):
        fields.pop(name, None)
    return json.dumps(fields, sort_keys=True, default=str)


def build_model(config: Any, attention: str, dtype: torch.dtype) -> Any:
    """Builds a causal language model that is not loaded; `attention` is a name in transformers' registry."""
    # A copy, because from_config writes the choice of attention into the configuration.
    config_copy = copy.deepcopy(config)
    return AutoModelForCausalLM.from_config(config_copy, attn_implementation=attention, dtype=dtype).eval()


def replace_decoder(causal: Any, decoder_path: str, output_class: type) -> None:
    """Reduces a causal model to its LM head: inputs_embeds are now the decoder's last states."""
    causal.set_submodule(decoder_path, _IdentityDecoder(output_class))
