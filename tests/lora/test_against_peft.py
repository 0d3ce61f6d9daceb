"""PEFT itself as the oracle: it writes the adapters, reads them, and merges them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from tests.lora.lora_rig import ADAPTERS, LAYER_MODULES, NAMES, Oracle, answers, make_llm, make_oracle, merge
from tests.rigs.engine.tiny_models import tiny_prompt

peft = pytest.importorskip("peft", reason="pip install peft: the other tests merge as PEFT documents it")

#: Options of LoraConfig for adapters that PEFT makes.
MADE: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 20, "lora_alpha": 7, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": [end.rpartition(".")[2] for end in LAYER_MODULES] + ["lm_head", "embed_tokens"],
        "rank_pattern": {"q_proj": 33, r"layers\.1\.mlp\.down_proj": 5},
        "alpha_pattern": {"up_proj": 12, "lm_head": 1},
    },
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("lora"), {"model_type": "llama"}, ADAPTERS)


def load(oracle: Oracle, path: Path) -> Any:
    """Returns the model with an adapter merged by PEFT."""
    base = AutoModelForCausalLM.from_pretrained(oracle.directory, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, path).merge_and_unload().eval()


def test_models_that_peft_merges_answer_like_rows_of_one_batch(oracle: Oracle) -> None:
    """The base and three adapters; the other tests' own merging is the same as PEFT's."""
    merged = {name: load(oracle, path) for name, path in oracle.adapters.items()}
    for name, path in oracle.adapters.items():
        ours = merge(oracle.models[None], path).state_dict()
        for key, weight in merged[name].state_dict().items():
            torch.testing.assert_close(weight, ours[key], atol=1e-5, rtol=1e-5)
    by_peft = Oracle(oracle.directory, oracle.adapters, {None: oracle.models[None], **merged})
    prompts = [tiny_prompt(8 + 7 * number, seed=number) for number in range(len(NAMES))]
    for name, completion in zip(NAMES, answers(make_llm(by_peft), NAMES, prompts), strict=True):
        by_peft.check(completion, name)


@pytest.mark.parametrize("name", MADE)
def test_an_adapter_that_peft_saves_is_read(name: str, oracle: Oracle, tmp_path: Path) -> None:
    base = copy.deepcopy(oracle.models[None])
    model = peft.get_peft_model(base, peft.LoraConfig(**MADE[name]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that it saves embeddings
        model.save_pretrained(tmp_path)
    own = Oracle(oracle.directory, {name: tmp_path}, {None: oracle.models[None], name: load(oracle, tmp_path)})
    for row, completion in zip(
        (None, name), answers(make_llm(own), [None, name], [tiny_prompt(20, seed=2)] * 2), strict=True
    ):
        own.check(completion, row)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"trainable_token_indices": {"embed_tokens": [1, 2]}}, "trainable_token_indices is not supported"),
    ],
)
def test_what_peft_saves_beside_plain_lora_is_refused_by_name(
    options: dict[str, Any], words: str, oracle: Oracle, tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], **options)
    peft.get_peft_model(copy.deepcopy(oracle.models[None]), config).save_pretrained(tmp_path)
    llm = make_llm(Oracle(oracle.directory, {}, oracle.models))
    with pytest.raises(ConfigError, match=words):
        llm.add_adapter(tmp_path, "refused")
