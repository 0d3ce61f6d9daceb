"""Adapters over quantised bases, which is what QLoRA trains: every format, weights quantised at load, and two ranks.

The oracle is transformers with the weights that the files mean. A layer adds the adapter's product of the unrounded
inputs, as PEFT does over a quantised layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.support.quantized_files import FORMATS, QuantizedFiles, write
from engine.adapters.peft import LoraPair, read_adapter
from engine.llm import Completion
from tests.lora.lora_rig import ADAPTERS, Oracle, answers, make_llm, make_oracle
from tests.quantization.test_formats import rounded
from tests.rigs.engine.tiny_models import tiny_prompt
from tests.rigs.parallel.thread_ranks import thread_ranks

torch.set_num_threads(1)
#: Adapters of the modules that the formats quantise, and those of the other tests.
OPTIONS = {**ADAPTERS, "wide": {"seed": 5, "rank": 40}}
ROWS: list[str | None] = [None, "all", "some", "wide"]
#: Formats that round the inputs of products too.
ROUNDED_INPUTS = {"ct-fp8-tensor", "ct-fp8-channel", "ct-fp8-block", "ct-int8"} | {
    "fp8-block",
    "autofp8",
    "autofp8-dynamic",
    "modelopt",
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("lora"), {"model_type": "llama"}, OPTIONS)


def quantised(oracle: Oracle, directory: Path, name: str) -> Oracle:
    """Writes the base in a format, and returns the oracle of base and adapters over it."""
    meaning = write(oracle.directory, directory, name)
    models = {None: over(oracle.models[None], meaning, {})}
    linears = ((name, module) for name, module in models[None].named_modules() if isinstance(module, torch.nn.Linear))
    shapes = {name: (linear.in_features, linear.out_features) for name, linear in linears}
    adapters = {name: oracle.adapters[name] for name in ROWS if name is not None}
    for adapter, path in adapters.items():
        models[adapter] = over(oracle.models[None], meaning, read_adapter(path, shapes, 256).pairs)
    return Oracle(directory, adapters, models)


def over(base: Any, meaning: QuantizedFiles, pairs: Mapping[str, LoraPair]) -> Any:
    """Returns the model with the quantised weights, and an adapter beside them."""
    model = copy.deepcopy(base)
    for name, weight in meaning.weights.items():
        linear, pair = model.get_submodule(name), pairs.get(name)
        linear.weight.data.copy_(weight)
        linear.forward = partial(product, linear, pair, meaning, meaning.input_scales.get(name))
    return model


def product(
    linear: Any, pair: LoraPair | None, meaning: QuantizedFiles, scale: float | None, x: torch.Tensor
) -> torch.Tensor:
    inputs = x if meaning.activations == "none" else rounded(x, meaning, scale)
    out = F.linear(inputs, linear.weight, linear.bias)
    return out if pair is None else out + pair.scale * F.linear(F.linear(x, pair.a), pair.b)


def errors(oracle: Oracle, completion: Completion, name: str | None) -> torch.Tensor:
    """Returns how far the log-probabilities of an answer are from those of a model of the oracle."""
    with torch.inference_mode():
        ids = torch.tensor([[*completion.prompt_ids, *completion.ids]])
        logits = oracle.models[name](ids).logits[0, len(completion.prompt_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    return (torch.tensor([token.logprob for token in completion.tokens]) - expected).abs()


def run(oracle: Oracle, **config: Any) -> list[Completion]:
    """Answers one batch of the base and three adapters."""
    llm = make_llm(oracle, **config)
    try:
        return answers(llm, ROWS, [tiny_prompt(9 + 5 * number, seed=number) for number in range(len(ROWS))])
    finally:
        llm.engine.close()


def require_own_adapter(oracle: Oracle, found: list[Completion]) -> None:
    """Asserts that each row is near its own model, though the oracle rounds inputs or weights otherwise."""
    for name, completion in zip(ROWS, found, strict=True):
        own = float(errors(oracle, completion, name).mean())
        others = [float(errors(oracle, completion, other).mean()) for other in ROWS if other != name]
        assert own < min(others) / 3, name


@pytest.mark.parametrize("name", FORMATS)
def test_a_format(name: str, oracle: Oracle, tmp_path: Path) -> None:
    """An input that is rounded to its other neighbour, because sums have another order, changes answers a little."""
    files = quantised(oracle, tmp_path, name)
    found = run(files)
    if name in ROUNDED_INPUTS:
        every = torch.cat([errors(files, row, own) for own, row in zip(ROWS, found, strict=True)])
        assert every.median() < 1e-3
        assert every.max() < 0.2
        require_own_adapter(files, found)
        return
    for own, completion in zip(ROWS, found, strict=True):
        files.check(completion, own)


@pytest.mark.parametrize("name", ["awq", "gptq-order", "ct-w8", "ct-int8", "ct-fp8-channel", "fp8-block"])
def test_a_format_on_two_ranks(name: str, oracle: Oracle, tmp_path: Path) -> None:
    """Each rank rounds its part of the inputs of out and down by the scale of this part."""
    files = quantised(oracle, tmp_path, name)
    with thread_ranks():
        found = run(files, tensor_parallel_size=2)
    require_own_adapter(files, found)
    for own, completion in zip(ROWS, found, strict=True):
        if name not in ROUNDED_INPUTS:
            files.check(completion, own)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_weights_quantised_at_load(weights: str, ranks: int, oracle: Oracle) -> None:
    """The oracle has the unquantised weights."""
    plain = Oracle(oracle.directory, {name: oracle.adapters[name] for name in ROWS if name}, oracle.models)
    with thread_ranks():
        require_own_adapter(plain, run(plain, weights=weights, tensor_parallel_size=ranks))
