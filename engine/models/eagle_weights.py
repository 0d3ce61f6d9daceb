"""Fills an EagleHead from a public checkpoint: model.safetensors, or the authors' pytorch_model.bin.

Names are those of the authors' code (`layers.0.` for EAGLE, `midlayer.` for EAGLE-3) with or without `model.` before
them. A checkpoint of EAGLE has a copy of the target's embedding, which is not read; EAGLE-3's may have one, or its own.
Every parameter must be filled and every other tensor must be known.
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

_SAMPLES, _SAMPLE_BYTES = 1024, 256  # of a file, for the revision
_UNUSED = ("rotary_emb.inv_freq", "t2d")  # ends of names


def load_eagle_head(spec: EagleSpec, model_dir: Path, target: Decoder, max_len: int, device: torch.device) -> EagleHead:
    """The head of a checkpoint, in the target's dtype; ConfigError when it does not fit spec or target."""
    dtype = target.embedding.weight.dtype
    tensors = _read(model_dir)
    embedding = tensors.pop("embed_tokens.weight", None)
    if not spec.is_eagle3:
        embedding = None  # the target's, by the method
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
            raise ConfigError("d2t leads outside of the model's vocabulary", field=SPECULATION_FIELD)
    elif spec.draft_vocab:
        raise ConfigError("the checkpoint has a vocabulary of its own and no d2t", field=SPECULATION_FIELD)
    homes = _targets(head)
    for name, tensor in tensors.items():
        if name not in homes:
            raise ConfigError(
                f"the checkpoint has a tensor {name} that an EAGLE head does not use", field=SPECULATION_FIELD
            )
        if homes[name].shape != tensor.shape:
            expected = tuple(homes[name].shape)
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)}, the config says {expected}", field=SPECULATION_FIELD
            )
        homes[name].copy_(tensor)
    missing = homes.keys() - tensors.keys()
    if missing:
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} tensors, such as {min(missing)}", field=SPECULATION_FIELD
        )
    return head


def random_eagle_head(spec: EagleSpec, seed: int, target: Decoder, max_len: int, device: torch.device) -> EagleHead:
    """A head with random parameters; its vocabulary is the first tokens of the target's."""
    dtype, bias = target.embedding.weight.dtype, bool(spec.fc_bias)
    own = spec.is_eagle3 and spec.layer.hidden_size != target.spec.hidden_size
    head = EagleHead(spec, target, max_len, device, dtype, own_embedding=own, own_head=spec.is_eagle3, fc_bias=bias)
    weights.randomize(head, seed)
    return head


def eagle_revision(spec: EagleSpec, model_dir: Path) -> str:
    """16 hex digits that name configuration and content: samples spread over the file."""
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
    """Tensors by their names in the authors' code, EAGLE's; those that nobody needs are left out."""
    path = _file(model_dir)
    try:
        found: Mapping[str, Tensor]
        if path.suffix == ".bin":
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            found = load_file(path)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field=SPECULATION_FIELD) from error
    if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ConfigError(f"{path} cannot be read: a mapping of names to tensors is expected", field=SPECULATION_FIELD)
    named = {name.removeprefix("model.").replace("midlayer.", "layers.0."): t for name, t in found.items()}
    return {name: tensor for name, tensor in named.items() if not name.endswith(_UNUSED)}


def _equal(embedding: Tensor, own: Tensor) -> bool:
    """The checkpoint's embedding is the target's, as far as its rows at some places tell."""
    if embedding.shape != own.shape:
        return False
    at = torch.arange(0, len(own), max(1, len(own) // 512))
    return torch.equal(embedding[at].to(own.dtype), own[at.to(own.device)].cpu())


def _targets(head: EagleHead) -> dict[str, Tensor]:
    homes = weights.layer_targets("layers.0", head.spec.layer, head.attention, head.mlp)
    homes["layers.0.post_attention_layernorm.weight"] = head.mlp_norm.weight
    homes["fc.weight"] = head.fc.weight
    if head.fc.bias is not None:
        homes["fc.bias"] = head.fc.bias
    for name, norm in (
        ("layers.0.input_layernorm", head.token_norm),
        ("layers.0.hidden_norm", head.state_norm),
        ("norm", head.norm),
    ):
        if norm is not None:
            homes[f"{name}.weight"] = norm.weight
    if head.own_embedding is not None:
        homes["embed_tokens.weight"] = head.own_embedding.weight
    if head.own_head is not None:
        homes["lm_head.weight"] = head.own_head.weight
    return homes
