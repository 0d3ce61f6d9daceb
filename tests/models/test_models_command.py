"""`baton models`: how a model is served, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.commands.models import models
from tests.rigs.engine.bare_model import GPT2, LLAMA, bare_model

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "head_dim": 8, "sliding_window": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "native": (LLAMA, "native (LlamaForCausalLM, 2 layers, up to 64 tokens)"),
    "experts": (LLAMA | MOE, "native (Qwen3MoeForCausalLM, 2 layers, 8 experts, 2 for each token, up to 64 tokens)"),
    "quantised": (
        LLAMA | {"quantization_config": AWQ},
        "native (LlamaForCausalLM, 2 layers, awq (int4, groups of 32, zeros), up to 64 tokens)",
    ),
    "stacked experts": (
        LLAMA | GPT_OSS | {"quantization_config": AWQ},
        "not served: config.json: weights of the format 'awq' are not supported for experts in one tensor",
    ),
    "transformers": (GPT2, "through transformers, because GPT2LMHeadModel has no native code; native are Llama"),
    "encoder": (LLAMA | {"architectures": ["BertModel"]}, "not served: model architecture BertModel is not supported"),
    "state": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2},
        "not served: MambaForCausalLM is not supported: its layers keep state other than keys and",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_native_or_not_or_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = CASES[case]
    directory = str(bare_model(tmp_path / "model", config))
    ends = text.startswith("not served")
    for as_json in (False, True):
        if ends:
            with pytest.raises(typer.Exit) as end:
                models([directory], as_json=as_json)
            assert end.value.exit_code == 1
        else:
            models([directory], as_json=as_json)
        out = capsys.readouterr().out.strip()
        if not as_json:
            assert out.startswith(f"{directory}: {text}")
            assert "\n" not in out
            continue
        found = json.loads(out)
        assert found["model"] == directory
        assert found["served"] == ("no" if ends else "transformers" if case == "transformers" else "native")
        assert ("reason" in found) == (found["served"] != "native")
        if case == "experts":
            assert (found["experts"], found["experts_per_token"]) == (8, 2)
