"""Reads the config.json of an EAGLE head.

The module supports EAGLE and EAGLE-2 (Li et al. 2024, one checkpoint format) and EAGLE-3 (Li et al. 2025), in the
formats of their authors and of compatible trainers. A config is EAGLE-3 if it has `draft_vocab_size`, or "eagle3" in
the name of its architecture. The layer is a Llama layer, or a Qwen2 layer (with biases). The `speculators` library
nests the configuration of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from engine.models.spec import ARCHITECTURES, ModelSpec, NotNative, parse_spec, read_json


def draft_error(text: str) -> ConfigError:
    """Returns the error of a draft model or EAGLE head that does not fit."""
    return ConfigError(text, field="speculation_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """The shape of an EAGLE head."""

    layer: ModelSpec  # The one layer, with the embedding and LM head around it.
    #: EAGLE-3: the target layers before which the residual stream is taken. None: the layers of EAGLE-3's authors.
    #: Empty: EAGLE, which takes the input of the target's LM head.
    aux_layers: tuple[int, ...] | None
    target_hidden: int  # Hidden size of the target.
    draft_vocab: int  # Size of the head's vocabulary, 0 if it is the target's.
    norm_before_residual: bool  # EAGLE-3: the residual stream starts with the state after its norm.
    fc_bias: bool | None  # `fc` has a bias. None: `fc` has a bias if the checkpoint has one.

    @property
    def is_eagle3(self) -> bool:
        """Whether the head is EAGLE-3, which fuses states of several target layers."""
        return self.aux_layers != ()

    def aux_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Returns `aux_layers` for a target of num_layers layers. Raises ConfigError if they are too few."""
        layers = (2, num_layers // 2, num_layers - 3) if self.aux_layers is None else self.aux_layers
        if layers and not 0 <= min(layers) <= max(layers) <= num_layers:
            raise draft_error(
                f"the EAGLE-3 head needs the states of layers {layers}, the model has {num_layers} layers"
            )
        return layers


def load_eagle_spec(model_dir: Path) -> EagleSpec:
    """Reads config.json. Raises ConfigError of the field speculation_model if it does not describe an EAGLE head."""
    try:
        return parse_eagle_spec(read_json(model_dir / "config.json", required=True))
    except ConfigError as error:
        raise draft_error(f"{model_dir}: {error.message}") from error


def parse_eagle_spec(config: Mapping[str, Any]) -> EagleSpec:
    """Reads a parsed config.json. Raises ConfigError if it does not describe an EAGLE head."""
    nested = config.get("transformer_layer_config") or config.get("model")
    config = {**(nested if isinstance(nested, Mapping) else {}), **config}
    names = config.get("architectures") or [""]
    name = str(names[0])
    fuses = "eagle3" in name.lower() or config.get("draft_vocab_size") is not None
    layer_architecture = name if name in ARCHITECTURES else "LlamaForCausalLM"
    try:
        layer = parse_spec({**config, "architectures": [layer_architecture]})
    except NotNative as error:
        raise draft_error(f"EAGLE head: {error.message}") from error
    if layer.num_layers != 1:
        raise draft_error(f"EAGLE head: {layer.num_layers} layers are not supported, one is needed")
    if layer.qk_norm:
        raise draft_error("EAGLE head: a norm of queries and keys is not supported")
    bias = config.get("eagle_fc_bias", config.get("bias"))
    vocab = config.get("draft_vocab_size") or 0
    return EagleSpec(
        layer=layer,
        aux_layers=_aux_layers(config) if fuses else (),
        target_hidden=int(config.get("target_hidden_size") or layer.hidden_size),
        draft_vocab=int(vocab) if fuses and vocab != layer.vocab_size else 0,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        fc_bias=None if bias is None else bool(bias),
    )


def _aux_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the layers before which the residual stream is taken, or None if the config names none.

    At the top level of a config the ids mean the input of a layer (vLLM, speculators). In `eagle_config` they mean the
    output of a layer (SGLang, ModelOpt).
    """
    top_level = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = top_level if top_level is not None else nested
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != 3 or not all(isinstance(i, int) for i in ids):
        raise draft_error(f"eagle_aux_hidden_state_layer_ids is {ids!r}, a list of three layers is needed")
    return tuple(i if top_level is not None else i + 1 for i in ids)
