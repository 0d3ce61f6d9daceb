"""Runs a decoder of transformers over our paged KV pool: our attention function replaces the model's attention.

`engine.models.hf.spec` has found the shape of the layers. `load_hf_model` reads the weights, connects each attention
module to its layer of the pool, and verifies the result: two interleaved sequences of a few tokens, computed in chunks,
must give the same states as transformers' own attention. The check refuses models with state other than keys and
values, and models that do not take positions from `position_ids`.

A step is one flat sequence [1, T] with position_ids. Only attention knows the sequences of the step. The LM head, with
its softcap or scale, is the model's own code, with an identity in place of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from common.errors import ConfigError
from common.model.directory import directory_name
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.hf.spec import HfSpec, build_model, explain_refusal, read_hf_config, replace_decoder
from engine.models.weights.files import only_pickled
from engine.progress import progress

ATTENTION_NAME = "baton"  # Name of our attention function in transformers' registry.
VERIFY_TOKENS, VERIFY_BLOCK_SIZE = 24, 4
#: Largest median relative error of states.
VERIFY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(slots=True)
class _Running:
    """The running forward pass, for attention."""

    context: ForwardContext | None = None


@dataclass(frozen=True, slots=True)
class _PagedLayer:
    """The connection of an attention module to its layer of the KV pool: the module's attribute `paged`."""

    running: _Running
    index: int
    window: int | None
    query_scale: float


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Computes attention over the KV pool, [1, T, heads, D], as transformers calls it.

    query is [1, heads, T, D]; key and value are [1, kv_heads, T, D].
    """
    layer: _PagedLayer = module.paged
    context = layer.running.context
    assert context is not None
    if layer.query_scale != 1.0:
        query = query * layer.query_scale
    if query.stride(3) != 1:
        query = query.contiguous()
    kv = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=1)
    cache = context.cache[layer.index]
    out = context.backend.attend(query[0].transpose(0, 1), kv, cache, context.metadata, layer.window)
    return out.unsqueeze(0), None


class HfModel:
    """A loaded model of transformers (`engine.models.base.Model`)."""

    def __init__(self, spec: HfSpec, causal: Any, dtype: torch.dtype) -> None:
        self.spec = spec
        # In other dtypes than bf16 transformers computes experts one by one and reads their sizes on the host.
        self.capturable = not spec.host_traffic and not (spec.grouped and dtype != torch.bfloat16)
        self._running = _Running()
        self._causal, self._decoder = causal, causal.get_submodule(spec.decoder_path)
        for index, path in enumerate(spec.attention_paths):
            paged = _PagedLayer(self._running, index, spec.windows[index], spec.query_scales[index])
            causal.get_submodule(path).paged = paged
        replace_decoder(causal, spec.decoder_path, spec.output_class)

    def forward(self, tokens: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        self._running.context = context
        out = self._decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        states: Tensor = out.last_hidden_state[0]
        return states if rows is None else states[rows]

    def write_kv(self, tokens: Tensor, positions: Tensor, context: ForwardContext) -> None:
        """Runs all of `forward`: the model's code cannot stop after the last keys and values."""
        self.forward(tokens, positions, context)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Returns its argument: `forward` has already applied the final norm."""
        return hidden

    def logits(self, hidden: Tensor, adapters: Any = None) -> Tensor:
        assert adapters is None, "adapters are for a Decoder"
        logits: Tensor = self._causal(inputs_embeds=hidden[None]).logits[0]
        return logits.float()

    def reference_forward(self, tokens: Tensor) -> Tensor:
        """Computes the states [T, hidden] of one sequence tokens[T] with transformers' own attention."""
        self._decoder.set_attn_implementation("eager")
        try:
            states: Tensor = self._decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        finally:
            self._decoder.set_attn_implementation(ATTENTION_NAME)
        return states


def load_hf_model(
    spec: HfSpec, model_dir: Path, device: torch.device, dtype: torch.dtype, *, seed: int | None
) -> HfModel:
    """Loads and verifies a model, with random weights if it has a seed. Raises ConfigError if it is not supported."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    config = read_hf_config(model_dir)
    with explain_refusal(spec.architecture):
        causal = _read(config, model_dir, device, dtype) if seed is None else _random(config, device, dtype, seed)
        model = HfModel(spec, causal.requires_grad_(False), dtype)
        _verify(model, device, dtype)
    return model


def _read(config: Any, model_dir: Path, device: torch.device, dtype: torch.dtype) -> Any:
    pickled = only_pickled(model_dir)
    total = sum(file.stat().st_size for file in model_dir.glob("*.bin" if pickled else "*.safetensors")) / 1e9
    with progress(f"loading {directory_name(model_dir)}", total, "GB") as loaded, _quiet():
        options: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION_NAME}
        options |= dict.fromkeys(("local_files_only", "output_loading_info", "weights_only"), True)
        options["use_safetensors"] = not pickled
        target = None if device.type == "cpu" else device
        causal, report = AutoModelForCausalLM.from_pretrained(model_dir, device_map=target, **options)
        loaded.advance(total)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise ConfigError(f"its checkpoint has {len(report[kind])} {kind}, for example {min(report[kind])}")
    return causal.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Disables the progress bars of transformers inside, because `progress` shows one."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()


def _random(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Builds the model on the device with random weights, as the model's own code initialises them."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        return build_model(config, ATTENTION_NAME, dtype)


@torch.inference_mode()
def _verify(model: HfModel, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError if the states of two interleaved sequences in chunks differ from transformers' attention."""
    spec = model.spec
    length = min(VERIFY_TOKENS, spec.max_position)
    blocks = -(-length // VERIFY_BLOCK_SIZE)
    size = (2 * blocks + 1, 2, spec.num_kv_heads, VERIFY_BLOCK_SIZE, spec.head_dim)
    cache = [LayerKV(torch.zeros(size, dtype=dtype, device=device)) for _ in range(spec.num_layers)]
    backend = TorchAttention(cache, spec.num_heads, spec.windows, 2 * blocks, scale=spec.scale, softcap=spec.softcap)
    ids = torch.randint(spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(1)).to(device)
    expected = [model.reference_forward(row) for row in ids]
    tables = [list(range(0, 2 * blocks, 2)), list(range(1, 2 * blocks, 2))]
    errors: list[Tensor] = []
    for ranges in _verify_steps(length):
        rows = [row for row, (start, end) in enumerate(ranges) if end > start]
        starts, counts = [ranges[r][0] for r in rows], [ranges[r][1] - ranges[r][0] for r in rows]
        metadata = backend.prepare(StepShape(starts, counts, [tables[r] for r in rows]))
        tokens = torch.cat([ids[r, slice(*ranges[r])] for r in rows])
        positions = torch.cat([torch.arange(*ranges[r], device=device) for r in rows])
        states = model.forward(tokens, positions, ForwardContext(cache, backend, metadata))
        want = torch.cat([expected[r][slice(*ranges[r])] for r in rows]).float()
        errors.append((states.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-20))
    error = float(torch.cat(errors).median())
    if not error < VERIFY_TOLERANCE[dtype]:
        cause = "its layers keep state other than keys and values, or do not take positions from position_ids"
        raise ConfigError(f"a prompt gives different states in chunks than whole (error {error:.2g}): {cause}")


def _verify_steps(length: int) -> list[list[tuple[int, int]]]:
    """Returns the steps of the check, each the token range [start, end) of both sequences: chunks and single tokens."""
    third, half = length // 3, length // 2
    return [
        [(0, third), (0, half)],
        [(third, third + 1), (half, half + 1)],
        [(third + 1, length), (half + 1, length - 1)],
        [(length, length), (length - 1, length)],
    ]
