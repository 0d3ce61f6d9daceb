"""An EAGLE head: one decoder layer that predicts the target's next hidden state from its last state and token.

A *pair* at position p is token p and the state of position p - 1: the target's state if it is known, else the head's
own prediction. From a pair the layer computes its KV at p and the state of p, the input of the next pair and of the
logits. The first token has no previous state: the KV of position 0 stays empty and masked. The KV of one layer depends
on the pairs alone, so `write_kv` writes it for known tokens without attention. Public implementations number the pairs
from 0; the result is the same, because rotary embeddings depend on position differences only.

EAGLE (Li et al. 2024, Speculative sampling requires rethinking feature uncertainty): the state is the input of the
target's LM head. `fc` joins embedding and state. No norm precedes attention. The LM head is the target's.
EAGLE-3 (Li et al. 2025, Scaling up inference acceleration via training-time test): `fc` makes the state from three
residual streams of the target. Embedding and state have a norm each and enter attention side by side. The LM head is
the head's own, with a norm and a vocabulary of its own: its token i is the target's token i + d2t[i].
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.errors import ConfigError, describe
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder, make_ops
from engine.models.layers import MLP, Attention, Embedding, Linear, LinearSlice, RMSNorm, allocate
from engine.models.ops import float32_product, rms_norm_torch
from engine.models.spec import ARCHITECTURES, ModelSpec, NotNative, parse_spec, read_json
from engine.models.weights.load import checkpoint_targets
from engine.models.weights.random_weights import randomize

UNKNOWN_LOGIT = -1e30  # Logit of a token outside the head's vocabulary. Finite: -inf means a failed step.
_SAMPLES, _SAMPLE_BYTES = 1024, 256  # `eagle_revision` hashes this many samples of the file, of this size.
_UNUSED = ("rotary_emb.inv_freq", "t2d")  # Tensors with these name endings are ignored.
_PREFIX = re.compile(r"^(model\.)?(midlayer\.|layers\.0\.)?")  # Part of a tensor's name that `EagleHead` leaves out.


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
            raise draft_error(f"the EAGLE-3 head needs states of layers {layers}, the model has {num_layers} layers")
        return layers


def load_eagle_spec(model_dir: Path) -> EagleSpec:
    """Reads config.json. Raises ConfigError of the field speculation_model if it does not describe an EAGLE head."""
    try:
        return parse_eagle_spec(read_json(model_dir / "config.json", required=True))
    except ConfigError as error:
        raise draft_error(f"{model_dir}: {error.message}") from error


def parse_eagle_spec(config: Mapping[str, Any]) -> EagleSpec:
    """Reads a parsed config.json. Raises ConfigError if it does not describe an EAGLE head.

    A config is EAGLE-3 if it has `draft_vocab_size`, or "eagle3" in the name of its architecture; EAGLE-2 has EAGLE's
    format. The layer is a Llama layer, or a Qwen2 layer (with biases). The library `speculators` nests its config.
    """
    nested = config.get("transformer_layer_config") or config.get("model")
    config = {**(nested if isinstance(nested, Mapping) else {}), **config}
    if config.get("quantization_config") or config.get("compression_config"):
        raise draft_error("EAGLE head: quantised weights are not supported; use the head's unquantised checkpoint")
    name = str((config.get("architectures") or [""])[0])
    fuses = "eagle3" in name.lower() or config.get("draft_vocab_size") is not None
    try:
        layer = parse_spec({**config, "architectures": [name if name in ARCHITECTURES else "LlamaForCausalLM"]})
    except NotNative as error:
        raise draft_error(f"EAGLE head: {error.message}") from error
    if layer.num_layers != 1:
        raise draft_error(f"EAGLE head: {layer.num_layers} layers are not supported, one is needed")
    if layer.latent_dim:
        raise draft_error("EAGLE head: a layer with latent attention (MLA) is not supported")
    if layer.moe is not None:
        raise draft_error("EAGLE head: a layer with experts is not supported")
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


class EagleHead(nn.Module):
    """The head of a target model. Its parameters are uninitialised until `load_eagle_head` fills them.

    Args:
        target: the model that the head drafts for.
        max_len: longest sequence in tokens.
        own_embedding, own_head: the head has an embedding, an LM head; otherwise it uses the target's.
        fused: use Triton kernels; has the meaning of `fused` in `Decoder`.
    """

    def __init__(
        self,
        spec: EagleSpec,
        target: Decoder,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        own_embedding: bool,
        own_head: bool,
        fc_bias: bool,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        layer, hidden = spec.layer, spec.layer.hidden_size
        num_aux_layers = len(spec.aux_layers_of(target.spec.num_layers))
        joined = 2 * hidden if spec.is_eagle3 else hidden
        fc_inputs = num_aux_layers * spec.target_hidden if spec.is_eagle3 else 2 * hidden
        head_vocab = spec.draft_vocab or layer.vocab_size

        def eagle3_norm(name: str) -> RMSNorm | None:
            return RMSNorm(name, hidden, layer.norm_eps) if spec.is_eagle3 else None

        with torch.device("meta"):
            self.fc = Linear(fc_inputs, {"fc": hidden}, bias=fc_bias)
            self.attention = Attention(layer, layer.windows[0], inputs=joined)
            self.mlp_norm = RMSNorm("post_attention_layernorm", hidden, layer.norm_eps)
            self.mlp = MLP(layer)
            self.token_norm, self.state_norm = eagle3_norm("input_layernorm"), eagle3_norm("hidden_norm")
            self.norm = eagle3_norm("norm")
            self.own_embedding = Embedding("embed_tokens", layer.vocab_size, hidden) if own_embedding else None
            self.own_head = Linear(hidden, {"lm_head": head_vocab}, bias=False) if own_head else None
        allocate(self, device, dtype)
        #: int64 [draft_vocab], the target's token id for each token of the head. None: the vocabularies are equal.
        self.token_ids = torch.arange(spec.draft_vocab, device=device) if spec.draft_vocab else None
        self._target_embedding, self._target_head = target.embedding.weight.detach(), target.head.weight.detach()
        self._vocab = target.spec.vocab_size
        self.capturable = device.type == "cuda" if fused is None else fused
        self._ops = make_ops(layer, max_len, device, dtype, self.capturable, None)

    def fuse(self, states: Tensor) -> Tensor:
        """Returns the states of EAGLE-3's pairs, [T, hidden], from the states of three target layers, side by side."""
        return F.linear(states, self.fc.weight, self.fc.bias)

    def write_kv(self, tokens: Tensor, prev_states: Tensor, positions: Tensor, context: ForwardContext) -> None:
        """Writes the keys and values of the pairs (tokens[T], prev_states[T, hidden]) to the one layer of `context`."""
        _, qkv = self._input_qkv(tokens, prev_states)
        write = self._ops.kv_write_for(positions, context)
        write(qkv[:, self.attention.kv_rows], self.attention, context.cache[0])

    def draft_step(self, tokens: Tensor, prev_states: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Predicts the states [T, hidden] of the pairs and writes their keys and values. Overwrites prev_states."""
        x, qkv = self._input_qkv(tokens, prev_states)
        attended = self._ops.attention_for(positions, context)(qkv, self.attention, context.cache[0])
        x = self._ops.add_linear(x, attended, self.attention.out)
        return self._ops.add_linear(x, self._ops.norm_swiglu(x, self.mlp_norm, self.mlp.gate_up), self.mlp.down)

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits float32 [T, target's vocab]. Tokens outside the head's vocabulary get UNKNOWN_LOGIT."""
        weight = self._target_head if self.own_head is None else self.own_head.weight
        if self.norm is not None:
            logits = self._ops.logits(states, self.norm, LinearSlice(weight))
        else:
            logits = float32_product(states, weight)
        if self.token_ids is None:
            return logits
        return logits.new_full((len(logits), self._vocab), UNKNOWN_LOGIT).index_copy_(1, self.token_ids, logits)

    def _input_qkv(self, tokens: Tensor, prev_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual stream [T, hidden], which the caller may overwrite, and qkv."""
        weight = self._target_embedding if self.own_embedding is None else self.own_embedding.weight
        embedded = F.embedding(tokens, weight)
        if self.token_norm is None or self.state_norm is None:
            x = joined = F.linear(torch.cat([embedded, prev_states], dim=-1), self.fc.weight, self.fc.bias)
        else:
            normed = rms_norm_torch(prev_states, self.state_norm)
            joined = torch.cat([rms_norm_torch(embedded, self.token_norm), normed], dim=-1)
            x = normed if self.spec.norm_before_residual else prev_states
        return x, F.linear(joined, self.attention.qkv.weight, self.attention.qkv.bias)


def load_eagle_head(spec: EagleSpec, model_dir: Path, target: Decoder, max_len: int, device: torch.device) -> EagleHead:
    """Loads the head of a checkpoint in the target's dtype. Raises ConfigError if it does not fit spec or target."""
    tensors = _read(model_dir)
    if not spec.is_eagle3:  # EAGLE uses the target's
        tensors.pop("lm_head.weight", None)
        tensors.pop("embed_tokens.weight", None)
    elif "embed_tokens.weight" in tensors and _equal(tensors["embed_tokens.weight"], target.embedding.weight):
        del tensors["embed_tokens.weight"]
    parts = {"own_embedding": "embed_tokens.weight", "own_head": "lm_head.weight", "fc_bias": "fc.bias"}
    present = {part: name in tensors for part, name in parts.items()}
    head = EagleHead(spec, target, max_len, device, target.embedding.weight.dtype, **present)
    if "d2t" in tensors:
        offsets = tensors.pop("d2t").to(device, torch.int64)
        if offsets.shape != (spec.draft_vocab or len(offsets),):
            raise draft_error(f"d2t has {len(offsets)} tokens, the config says {spec.draft_vocab}")
        head.token_ids = torch.arange(len(offsets), device=device) + offsets
        if not 0 <= int(head.token_ids.min()) <= int(head.token_ids.max()) < target.spec.vocab_size:
            raise draft_error("d2t maps to tokens outside the model's vocabulary")
    elif spec.draft_vocab:
        raise draft_error("the head has its own vocabulary, but the checkpoint has no d2t")
    targets = {name: part.tensor for name, part in checkpoint_targets(head).items() if part.tensor is not None}
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
    randomize(head, seed)
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
    for file in (model_dir / "model.safetensors", model_dir / "pytorch_model.bin"):
        if file.is_file():
            return file
    raise draft_error(f"{model_dir} has neither model.safetensors nor pytorch_model.bin")


def _read(model_dir: Path) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors by their names in `EagleHead`, without unused tensors.

    The checkpoint has the names of the authors' code (`layers.0.` for EAGLE, `midlayer.` for EAGLE-3), with or without
    the prefix `model.`. An EAGLE checkpoint has a copy of the target's embedding, which is not read. An EAGLE-3
    checkpoint may have this copy or an embedding of its own.
    """
    path = _file(model_dir)
    try:
        tensors: Mapping[str, Tensor]
        if path.suffix == ".bin":
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            tensors = load_file(path)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise draft_error(f"{path} cannot be read: {describe(error)}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise draft_error(f"{path} cannot be read: expected a mapping of names to tensors")
    return {_PREFIX.sub("", name): tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}


def _equal(embedding: Tensor, target: Tensor) -> bool:
    """Returns whether the checkpoint's embedding equals the target's. Compares about 512 rows."""
    if embedding.shape != target.shape:
        return False
    rows = torch.arange(0, len(target), max(1, len(target) // 512))
    return torch.equal(embedding[rows].to(target.dtype), target[rows.to(target.device)].cpu())
