"""Loads the parameters of an EagleHead from a checkpoint: model.safetensors, or the authors' pytorch_model.bin.

Tensors have the names in the authors' code (`layers.0.` for EAGLE, `midlayer.` for EAGLE-3), with or without the prefix
`model.`. An EAGLE checkpoint has a copy of the target's embedding, which is not read. An EAGLE-3 checkpoint may have
this copy or an embedding of its own. A missing tensor or an unknown tensor is a ConfigError.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import ConfigError
from engine.models import weights
from engine.models.decoder import Decoder
from engine.models.eagle import EagleHead
from engine.models.eagle_spec import SPECULATION_FIELD, EagleSpec

#: `eagle_revision` hashes this many samples of the file, of this size.
_SAMPLES, _SAMPLE_BYTES = 1024, 256
#: Tensors with these name endings are ignored.
_UNUSED = ("rotary_emb.inv_freq", "t2d")


def load_eagle_head(spec: EagleSpec, model_dir: Path, target: Decoder, max_len: int, device: torch.device) -> EagleHead:
    """Loads the head of a checkpoint in the target's dtype. Raises ConfigError if it does not fit spec or target."""
    dtype = target.embedding.weight.dtype
    tensors = _read(model_dir)
    embedding = tensors.pop("embed_tokens.weight", None)
    if not spec.is_eagle3:
        embedding = None  # EAGLE uses the target's
        tensors.pop("lm_head.weight", None)
    elif embedding is not None and _equal(embedding, target.embedding.weight):
        embedding = None
    head = EagleHead(
        spec,
        target,
        max_len,
        device,
        dtype,
        own_embedding=embedding is not None,
        own_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    if "d2t" in tensors:
        offsets = tensors.pop("d2t").to(device, torch.int64)
        if head.token_ids is None:
            head.token_ids = torch.arange(len(offsets), device=device)
        if offsets.shape != head.token_ids.shape:
            raise ConfigError(
                f"d2t has {len(offsets)} tokens, the config says {len(head.token_ids)}", field=SPECULATION_FIELD
            )
        head.token_ids = head.token_ids + offsets
        if not 0 <= int(head.token_ids.min()) <= int(head.token_ids.max()) < target.spec.vocab_size:
            raise ConfigError("d2t maps to tokens outside the model's vocabulary", field=SPECULATION_FIELD)
    elif spec.draft_vocab:
        raise ConfigError("the head has its own vocabulary, but the checkpoint has no d2t", field=SPECULATION_FIELD)
    targets = _targets(head)
    for name, tensor in tensors.items():
        if name not in targets:
            raise ConfigError(
                f"the checkpoint has a tensor {name} that an EAGLE head does not use", field=SPECULATION_FIELD
            )
        if targets[name].shape != tensor.shape:
            expected = tuple(targets[name].shape)
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)}, the config says {expected}", field=SPECULATION_FIELD
            )
        targets[name].copy_(tensor)
    missing = targets.keys() - tensors.keys()
    if missing:
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} tensors, for example {min(missing)}", field=SPECULATION_FIELD
        )
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
    raise ConfigError(f"{model_dir} has neither model.safetensors nor pytorch_model.bin", field=SPECULATION_FIELD)


def _read(model_dir: Path) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors by their names in EAGLE's code, without unused tensors."""
    path = _file(model_dir)
    try:
        tensors: Mapping[str, Tensor]
        if path.suffix == ".bin":
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            tensors = load_file(path)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field=SPECULATION_FIELD) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} cannot be read: expected a mapping of names to tensors", field=SPECULATION_FIELD)
    named = {name.removeprefix("model.").replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    return {name: tensor for name, tensor in named.items() if not name.endswith(_UNUSED)}


def _equal(embedding: Tensor, target: Tensor) -> bool:
    """Returns whether the checkpoint's embedding equals the target's. Compares about 512 rows."""
    if embedding.shape != target.shape:
        return False
    rows = torch.arange(0, len(target), max(1, len(target) // 512))
    return torch.equal(embedding[rows].to(target.dtype), target[rows.to(target.device)].cpu())


def _targets(head: EagleHead) -> dict[str, Tensor]:
    """Returns the destination of each checkpoint tensor: a parameter, or its part of a merged parameter."""
    targets = weights.layer_targets("layers.0", head.spec.layer, head.attention, head.mlp)
    targets["layers.0.post_attention_layernorm.weight"] = head.mlp_norm.weight
    targets["fc.weight"] = head.fc.weight
    if head.fc.bias is not None:
        targets["fc.bias"] = head.fc.bias
    for name, norm in (
        ("layers.0.input_layernorm", head.token_norm),
        ("layers.0.hidden_norm", head.state_norm),
        ("norm", head.norm),
    ):
        if norm is not None:
            targets[f"{name}.weight"] = norm.weight
    if head.own_embedding is not None:
        targets["embed_tokens.weight"] = head.own_embedding.weight
    if head.own_head is not None:
        targets["lm_head.weight"] = head.own_head.weight
    return targets
