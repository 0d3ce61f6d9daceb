"""Loads the parameters of an EagleHead from a checkpoint: model.safetensors, or the authors' pytorch_model.bin.

Tensors have the names in the authors' code (`layers.0.` for EAGLE, `midlayer.` for EAGLE-3), with or without the prefix
`model.`. An EAGLE checkpoint has a copy of the target's embedding, which is not read. An EAGLE-3 checkpoint may have
this copy or an embedding of its own. A missing tensor or an unknown tensor is a ConfigError.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.models import weights
from engine.models.decoder import Decoder
from engine.models.eagle import EagleHead
from engine.models.eagle_spec import EagleSpec, draft_error

_SAMPLES, _SAMPLE_BYTES = 1024, 256  # `eagle_revision` hashes this many samples of the file, of this size.
_UNUSED = ("rotary_emb.inv_freq", "t2d")  # Tensors with these name endings are ignored.
#: The part of a tensor's name that `EagleHead` leaves out.
_PREFIX = re.compile(r"^(model\.)?(midlayer\.|layers\.0\.)?")


def load_eagle_head(spec: EagleSpec, model_dir: Path, target: Decoder, max_len: int, device: torch.device) -> EagleHead:
    """Loads the head of a checkpoint in the target's dtype. Raises ConfigError if it does not fit spec or target."""
    tensors = _read(model_dir)
    if not spec.is_eagle3:  # EAGLE uses the target's
        tensors.pop("lm_head.weight", None)
        tensors.pop("embed_tokens.weight", None)
    elif "embed_tokens.weight" in tensors and _equal(tensors["embed_tokens.weight"], target.embedding.weight):
        del tensors["embed_tokens.weight"]
    head = EagleHead(
        spec,
        target,
        max_len,
        device,
        target.embedding.weight.dtype,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    if "d2t" in tensors:
        offsets = tensors.pop("d2t").to(device, torch.int64)
        if offsets.shape != (spec.draft_vocab or len(offsets),):
            raise draft_error(f"d2t has {len(offsets)} tokens, the config says {spec.draft_vocab}")
        head.token_ids = torch.arange(len(offsets), device=device) + offsets
        if not 0 <= int(head.token_ids.min()) <= int(head.token_ids.max()) < target.spec.vocab_size:
            raise draft_error("d2t maps to tokens outside the model's vocabulary")
    elif spec.draft_vocab:
        raise draft_error("the head has its own vocabulary, but the checkpoint has no d2t")
    targets = {name: part.tensor for name, part in weights.checkpoint_targets(head).items()}
    for name, tensor in tensors.items():
        if name not in targets:
            raise draft_error(f"the checkpoint has a tensor {name} that an EAGLE head does not use")
        shape, expected = tuple(tensor.shape), tuple(targets[name].shape)
        if shape != expected:
            raise draft_error(f"{name} has shape {shape}, the config says {expected}")
        targets[name].copy_(tensor)
    if missing := targets.keys() - tensors.keys():
        raise draft_error(f"the checkpoint lacks {len(missing)} tensors, for example {min(missing)}")
    return head


def random_eagle_head(spec: EagleSpec, seed: int, target: Decoder, max_len: int, device: torch.device) -> EagleHead:
    """Makes a head with random parameters. Its vocabulary is the first tokens of the target's vocabulary."""
    dtype, bias = target.embedding.weight.dtype, bool(spec.fc_bias)
    own_embedding = spec.is_eagle3 and spec.layer.hidden_size != target.spec.hidden_size
    head = EagleHead(
        spec, target, max_len, device, dtype, own_embedding=own_embedding, own_head=spec.is_eagle3, fc_bias=bias
    )
    weights.randomize(head, seed)
    return head


def eagle_revision(spec: EagleSpec, model_dir: Path) -> str:
    """Returns 16 hex digits that identify configuration and content. Hashes samples spread over the file."""
    path = _file(model_dir)
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{spec!r} {size}".encode(), digest_size=8)
    with path.open("rb") as file:
        for offset in range(0, size, max(size // _SAMPLES, 1)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _file(model_dir: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (model_dir / name).is_file():
            return model_dir / name
    raise draft_error(f"{model_dir} has neither model.safetensors nor pytorch_model.bin")


def _read(model_dir: Path) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors by their names in `EagleHead`, without unused tensors."""
    path = _file(model_dir)
    try:
        tensors: Mapping[str, Tensor]
        if path.suffix == ".bin":
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            tensors = load_file(path)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise draft_error(f"{path} cannot be read: {error}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise draft_error(f"{path} cannot be read: expected a mapping of names to tensors")
    return {_PREFIX.sub("", name): tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}


def _equal(embedding: Tensor, target: Tensor) -> bool:
    """Returns whether the checkpoint's embedding equals the target's. Compares about 512 rows."""
    if embedding.shape != target.shape:
        return False
    rows = torch.arange(0, len(target), max(1, len(target) // 512))
    return torch.equal(embedding[rows].to(target.dtype), target[rows.to(target.device)].cpu())
