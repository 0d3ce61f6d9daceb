"""What the config.json of an EAGLE head says: EAGLE and EAGLE-2 (Li et al. 2024, one checkpoint format), and EAGLE-3
(Li et al. 2025), as their authors and the trainers that follow them write it.

EAGLE is told from EAGLE-3 by the vocabulary of its own that the latter has (`draft_vocab_size`), or by its name. The
layer is a Llama layer (or a Qwen2 one, with biases) in both. speculators nests the layer's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from engine.models.spec import ARCHITECTURES, ModelSpec, NotNative, parse_spec, read_json

SPECULATION_FIELD = "speculation_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """layer: of the one layer, and what is around it. taps: layers of the target before which its residual stream is
    taken, for EAGLE-3; None: the layers that EAGLE-3's authors take; empty: EAGLE, which takes what the target's head
    is applied to. target_hidden: numbers of each. draft_vocab: tokens that the head knows, 0 for the target's.
    norm_before_residual: the residual stream of EAGLE-3 begins with the normed state. fc_bias: the first product has a
    bias; None: if the checkpoint has one.
    """

    layer: ModelSpec
    aux_layers: tuple[int, ...] | None
    target_hidden: int
    draft_vocab: int
    norm_before_residual: bool
    fc_bias: bool | None

    @property
    def is_eagle3(self) -> bool:
        """EAGLE-3: it fuses several states of the target."""
        return self.aux_layers != ()

    def aux_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """For a target of so many layers. ConfigError when it has not that many."""
        taps = (2, num_layers // 2, num_layers - 3) if self.aux_layers is None else self.aux_layers
        if taps and not 0 <= min(taps) <= max(taps) <= num_layers:
            raise ConfigError(
                f"the EAGLE-3 head takes states of layers {taps}, the model has {num_layers}", field=SPECULATION_FIELD
            )
        return taps


def load_eagle_spec(model_dir: Path) -> EagleSpec:
    """Reads config.json; ConfigError, with the field speculation_model, when it is none of an EAGLE head."""
    try:
        return parse_eagle_spec(read_json(model_dir / "config.json", required=True))
    except ConfigError as error:
        raise ConfigError(f"{model_dir}: {error.message}", field=SPECULATION_FIELD) from error


def parse_eagle_spec(config: Mapping[str, Any]) -> EagleSpec:
    """See the top of this file."""
    nested = config.get("transformer_layer_config") or config.get("model")
    config = {**(nested if isinstance(nested, Mapping) else {}), **config}
    names = config.get("architectures") or [""]
    name = str(names[0])
    fuses = "eagle3" in name.lower() or config.get("draft_vocab_size") is not None
    known = name if name in ARCHITECTURES else "LlamaForCausalLM"
    try:
        layer = parse_spec({**config, "architectures": [known]})
    except NotNative as error:
        raise ConfigError(f"an EAGLE head with {error.message}", field=SPECULATION_FIELD) from error
    if layer.num_layers != 1:
        raise ConfigError(
            f"an EAGLE head of {layer.num_layers} layers is not served: it has one", field=SPECULATION_FIELD
        )
    if layer.qk_norm:
        raise ConfigError("an EAGLE head that norms queries and keys is not served", field=SPECULATION_FIELD)
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
    """Named at the top, a layer is one whose input is taken (vLLM, speculators); in `eagle_config`, one whose output is
    (SGLang, ModelOpt).
    """
    above = config.get("eagle_aux_hidden_state_layer_ids")
    inside = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = above if above is not None else inside
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != 3 or not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"eagle_aux_hidden_state_layer_ids {ids!r} are not three layers", field=SPECULATION_FIELD)
    return tuple(i if above is not None else i + 1 for i in ids)
