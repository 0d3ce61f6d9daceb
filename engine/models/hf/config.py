"""What a configuration of transformers says of a decoder before any of it is computed; the start of hf_trace and hf.

Foreign code is entered inside `explain_refusal` only: whatever it raises becomes one readable line.
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

TRACE_NAME = "baton-trace"  # our name in the registries of transformers while a model is traced


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSpec(ModelShape):
    """config: config.json as a canonical text, for it decides what is computed.

    base: path of the module between embedding and last norm; names: those of the attention modules, by layer. factors:
    what a layer multiplies its queries with, where its scale is not the shape's. grouped: has experts that run
    as grouped products. host_traffic: a forward pass copies from the host. output: what the base model returns.
    """

    config: str
    decoder_path: str
    attention_paths: tuple[str, ...]
    query_scales: tuple[float, ...]
    grouped: bool
    host_traffic: bool
    output_class: type = field(repr=False, compare=False)


class _IdentityDecoder(nn.Module):
    """Stands where the decoder was: its output is its input."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


@contextmanager
def explain_refusal(name: str) -> Iterator[None]:
    """Whatever the foreign code raises, a reason to refuse the model is one readable line. A full device is none."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name} is not served: {error.message}", field="model") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and out_of_memory_message(error) is not None:
            raise
        first = str(error).strip().split("\n")[0]
        if "on meta tensors" in first:
            first = "its forward pass depends on values of tensors"
        elif isinstance(error, KeyError) and TRACE_NAME in first:
            first = "it does not take its attention from the interface that all models share"
        else:
            first = f"{type(error).__name__}: {first}"
        raise ConfigError(f"{name} of transformers cannot be served: {first}", field="model") from error


def read_hf_config(model_dir: Path) -> Any:
    """The configuration of a causal decoder whose kinds of layers and of rope can be served. Code in the directory is
    not run, and nobody is asked whether it may.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(f"transformers cannot read the config.json of {model_dir}: {first}", field="model") from error
    name = next(iter(config.architectures or ()), f"a model of type {config.model_type}")
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is not served: its decoder reads an encoder's output too", field="model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ != name:
        raise ConfigError(f"{name} is not served: transformers knows it as no causal language model", field="model")
    text = config.get_text_config().to_dict()
    kinds = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(f"{name} is not served: it has layers of {', '.join(sorted(kinds))}", field="model")
    if any("dynamic" in rope["rope_type"] for rope in _ropes(text)):
        raise ConfigError(
            f"{name} is not served: with dynamic rope scaling, keys depend on later tokens", field="model"
        )
    return config


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rope parameters of a configuration, one set for all layers or one for each kind."""
    raw = text.get("rope_parameters") or {}
    each = [raw, *(value for value in raw.values() if isinstance(value, Mapping))]
    return [rope for rope in each if "rope_type" in rope]


def max_length(text: Any) -> int:
    """Longest sequence. With longrope all keys would change where it exceeds the original length: it ends there."""
    longest = int(text.max_position_embeddings)
    for rope in _ropes(text.to_dict()):
        if rope["rope_type"] == "longrope":
            longest = min(longest, int(rope["original_max_position_embeddings"]))
    return longest


def canonical_config(config: Any) -> str:
    """What the configuration says about the computation, in one spelling."""
    said = config.to_dict()
    for aside in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"):
        said.pop(aside, None)
    return json.dumps(said, sort_keys=True, default=str)


def build_model(config: Any, attention: str, dtype: torch.dtype) -> Any:
    # A configuration belongs to its model: building one writes the choice of attention into it.
    own = copy.deepcopy(config)
    return AutoModelForCausalLM.from_config(own, attn_implementation=attention, dtype=dtype).eval()


def replace_decoder(causal: Any, base: str, output: type) -> None:
    """From now on the causal model is its head alone: inputs_embeds are the last states of the decoder below it."""
    causal.set_submodule(base, _IdentityDecoder(output))
