"""LoRA adapters in PEFT's format with random weights, and the models that result from merging them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from common.types import SamplingParams
from engine.llm import LLM, Completion
from tests.rigs.engine.tiny_models import TINY_ENGINE, save_reference

Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
LAYER_MODULES = (Q, K, V, OUT, GATE, UP, DOWN)


def save_adapter(
    directory: Path,
    model: nn.Module,
    *,
    seed: int,
    modules: Sequence[str] = LAYER_MODULES,
    rank: int = 4,
    alpha: float = 8.0,
    rslora: bool = False,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    size: float = 0.15,
    **config: Any,
) -> Path:
    """Writes an adapter for a model of transformers and returns its directory.

    modules: ends of module names. ranks, alphas: rank_pattern and alpha_pattern, whose keys are ends of module names.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not any(name == end or name.endswith(f".{end}") for end in modules):
            continue
        own = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        outputs, inputs = module.weight.shape
        a, b = (torch.randn(shape, generator=generator) * size for shape in ((own, inputs), (outputs, own)))
        if isinstance(module, nn.Embedding):
            a, b = (
                torch.randn(own, outputs, generator=generator) * size,
                torch.randn(inputs, own, generator=generator) * size,
            )
            tensors |= {f"base_model.model.{name}.lora_embedding_A": a, f"base_model.model.{name}.lora_embedding_B": b}
        else:
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({end.rpartition(".")[2] for end in modules}),
        "use_rslora": rslora,
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": dict(alphas or {}),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(model: Any, directory: Path) -> Any:
    """Returns a copy of a model of transformers with an adapter merged, as PEFT's merge_and_unload defines it.

    This is the oracle: it shares no code with the engine. W + scale * B @ A, scale = alpha / r, or alpha / sqrt(r) with
    rsLoRA. Embedding and LM head are untied first.
    """
    from safetensors.torch import load_file

    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    merged = copy.deepcopy(model)
    if merged.lm_head.weight is merged.model.embed_tokens.weight:
        merged.lm_head.weight = nn.Parameter(merged.lm_head.weight.detach().clone())
    for name, module in merged.named_modules():
        prefix = f"base_model.model.{name}."
        a = tensors.get(prefix + "lora_A.weight", tensors.get(prefix + "lora_embedding_A"))
        b = tensors.get(prefix + "lora_B.weight", tensors.get(prefix + "lora_embedding_B"))
        if a is None or b is None:
            continue
        rank = next((r for end, r in config["rank_pattern"].items() if name.endswith(end)), config["r"])
        alpha = next((x for end, x in config["alpha_pattern"].items() if name.endswith(end)), config["lora_alpha"])
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        change = (a.T @ b.T if isinstance(module, nn.Embedding) else b @ a) * scale
        with torch.no_grad():
            module.weight += change
    return merged.eval()


#: Options of `save_adapter` by name.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "some": {"seed": 2, "modules": (Q, V, OUT, UP), "rank": 20, "rslora": True},
    "patterns": {
        "seed": 3,
        "modules": (*LAYER_MODULES, "lm_head", "embed_tokens"),
        "ranks": {GATE: 9, "0.self_attn.q_proj": 33},
        "alphas": {DOWN: 3.0, "lm_head": 2.0},
    },
}
NAMES: list[str | None] = [None, "all", "some", "patterns"]


@dataclass(frozen=True)
class Oracle:
    """A model directory, adapters over it, and the merged models by the adapter's name; None is the base."""

    directory: Path
    adapters: dict[str, Path]
    models: dict[str | None, Any]

    def check(self, completion: Completion, adapter: str | None) -> None:
        """Asserts that a greedy completion is that of the merged model, with its log-probabilities."""
        with torch.inference_mode():
            ids = torch.tensor([[*completion.prompt_ids, *completion.ids]])
            logits = self.models[adapter](ids).logits[0, len(completion.prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        assert completion.ids == logprobs.argmax(-1).tolist(), f"adapter {adapter}"
        for row, token in zip(logprobs, completion.tokens, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)
            for other in token.top:
                assert other.logprob == pytest.approx(float(row[other.token]), abs=1e-3)


def make_oracle(directory: Path, case: dict[str, Any], adapters: dict[str, dict[str, Any]]) -> Oracle:
    model = save_reference(directory / "base", case)
    paths = {name: save_adapter(directory / name, model, **options) for name, options in adapters.items()}
    merged = {name: merge(model, path) for name, path in paths.items()}
    return Oracle(directory / "base", paths, {None: model, **merged})


def make_llm(oracle: Oracle, **config: Any) -> LLM:
    settings = TINY_ENGINE | {"num_blocks": 160, "max_adapters": 4, "max_adapter_rank": 64, "dtype": "float32"} | config
    llm = LLM(oracle.directory, **settings)
    for name, path in oracle.adapters.items():
        llm.add_adapter(path, name)
    return llm


def answers(llm: LLM, names: list[str | None], prompts: list[list[int]], **params: Any) -> list[Completion]:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "logprobs": 3} | params))
    return llm.generate(prompts, sampling, adapter=names, ignore_eos=True, show_progress=False)
