"""Opens the draft model or EAGLE head that the configuration names.

`open_draft` reads configurations only. It returns a `DraftSource` that knows which fields the draft adds to the KV
layout before any weights are read. A draft that does not fit the target raises a ConfigError of the field
`speculation_model`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from engine.models import eagle
from engine.models.base import Model, ModelShape
from engine.models.decoder import Decoder
from engine.models.eagle import EagleSpec, draft_error
from engine.models.loader import ModelSource, open_model
from engine.models.spec import ModelSpec
from engine.models.weights.revision import digest
from engine.speculation.draft_model import BuildDraftModel, EagleDraftModel, SeparateDraftModel

_log = logging.getLogger(__name__)

MAX_VOCAB_PADDING = 1024  # Largest difference of vocabulary sizes in a model family. The additional tokens are unused.


def _layout_fields(draft: ModelShape, revision: str) -> dict[str, Any]:
    sizes = {"draft_kv_heads": draft.num_kv_heads, "draft_head_dim": draft.head_dim}
    return {"draft_layers": draft.num_layers, **sizes, "draft_revision": revision}


@dataclass(frozen=True, slots=True)
class SeparateDraftSource:
    """A whole second model with the tokenizer of the target, not loaded yet."""

    source: ModelSource
    target: ModelShape

    def layout_fields(self, device: torch.device) -> dict[str, Any]:
        """Returns the fields that the draft sets in KVLayout."""
        return _layout_fields(self.source.spec, self.source.revision(device))

    def load(self, target: Model, max_len: int, device: torch.device, dtype: torch.dtype) -> BuildDraftModel:
        """Loads the weights, or makes random ones. Raises ConfigError if they do not fit the target."""
        shape, vocab = self.source.spec, self.target.vocab_size
        model = self.source.load(max_len, device, dtype)
        return lambda kv, attention: SeparateDraftModel(model, shape, vocab, kv, attention)


@dataclass(frozen=True, slots=True)
class EagleSource:
    """An EAGLE head of the target, not loaded yet. Its methods are those of `SeparateDraftSource`."""

    spec: EagleSpec
    model_dir: Path
    seed: int | None  # Seed of random weights; None: the weights of `model_dir`.

    def layout_fields(self, device: torch.device) -> dict[str, Any]:
        if self.seed is None:
            revision = eagle.eagle_revision(self.spec, self.model_dir)
        else:
            revision = digest(f"eagle dummy {self.seed} {device.type} {self.spec!r}")
        return {**_layout_fields(self.spec.layer, revision), "draft_state": self.spec.layer.hidden_size}

    @torch.inference_mode()
    def load(self, target: Model, max_len: int, device: torch.device, dtype: torch.dtype) -> BuildDraftModel:
        assert isinstance(target, Decoder)
        if self.seed is None:
            head = eagle.load_eagle_head(self.spec, self.model_dir, target, max_len, device)
        else:
            head = eagle.random_eagle_head(self.spec, self.seed, target, max_len, device)
        return lambda kv, attention: EagleDraftModel(head, target, kv, attention)


DraftSource = SeparateDraftSource | EagleSource


def open_draft(
    kind: str, model_dir: Path, target: ModelShape, target_dir: Path, *, load_format: str, seed: int, max_len: int
) -> DraftSource:
    """Opens a draft model (kind "draft_model") or EAGLE head ("eagle") for sequences of up to max_len tokens."""
    if kind == "eagle":
        spec = eagle.load_eagle_spec(model_dir)
        _check_eagle(spec, target)
        return EagleSource(spec, model_dir, seed if load_format == "dummy" else None)
    try:
        source = open_model(model_dir, load_format, seed)
    except ConfigError as error:
        raise draft_error(f"the draft model: {error.message}") from error
    shape = source.spec
    if shape.latent_dim:
        raise draft_error(f"the draft model: {shape.architecture} has latent attention (MLA), use another draft model")
    if shape.states is not None:
        raise draft_error(f"the draft model: {shape.architecture} has a recurrent state, use another draft model")
    if abs(shape.vocab_size - target.vocab_size) > MAX_VOCAB_PADDING or not _same_tokens(model_dir, target_dir):
        raise draft_error(
            f"the draft model in {model_dir} has another vocabulary ({shape.vocab_size} tokens) than the model "
            f"({target.vocab_size} tokens): use a draft model with the same tokenizer"
        )
    if shape.max_position < max_len:
        if not isinstance(shape, ModelSpec):
            raise draft_error(f"the draft model supports {shape.max_position} tokens, but max_model_len is {max_len}")
        _log.warning("the draft model was trained for %d tokens: later drafts are poor", shape.max_position)
    return SeparateDraftSource(source, target)


def _check_eagle(spec: EagleSpec, target: ModelShape) -> None:
    """Raises ConfigError if the head is for another model."""
    if not isinstance(target, ModelSpec):
        raise draft_error(f"EAGLE heads need a model of Baton's own code; transformers computes {target.architecture}")
    spec.aux_layers_of(target.num_layers)
    hidden, vocab = target.hidden_size, target.vocab_size
    if spec.target_hidden != hidden:
        raise draft_error(f"the EAGLE head is for a model of hidden size {spec.target_hidden}, this model has {hidden}")
    if not spec.is_eagle3 and spec.layer.hidden_size != hidden:
        raise draft_error(f"the EAGLE head has hidden size {spec.layer.hidden_size}, its model has {hidden}")
    if spec.layer.vocab_size != vocab:
        raise draft_error(f"the EAGLE head has a vocabulary of {spec.layer.vocab_size} tokens, this model has {vocab}")


def _same_tokens(first_dir: Path, second_dir: Path) -> bool:
    """Returns whether the tokenizers give the same ids. Returns True if the files do not show it."""
    files = [directory / "tokenizer.json" for directory in (first_dir, second_dir)]
    if not all(file.is_file() for file in files):
        return True
    first, second = (file.read_bytes() for file in files)
    try:
        return first == second or bool(json.loads(first)["model"]["vocab"] == json.loads(second)["model"]["vocab"])
    except (ValueError, KeyError, TypeError):
        return True  # unknown kind of tokenizer: only the sizes are compared
