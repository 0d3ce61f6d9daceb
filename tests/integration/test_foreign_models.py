"""Models that transformers computes over our KV: greedy tokens equal its own, with chunks, batches and preemptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from common.errors import ConfigError
from common.types import SamplingParams
from engine.llm import LLM
from engine.models.hf import spec as hf_spec
from engine.models.hf.model import HfModel
from engine.models.loader import open_model
from tests.rigs.engine.foreign_models import FOREIGN_CASES, FOREIGN_TINY, GROUPED, VOCAB, save_foreign

torch.set_num_threads(1)
CPU = torch.device("cpu")
BLOCK, CHUNK = 4, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, logprobs=0)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FOREIGN_CASES)
def test_tokens_and_logprobs_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save_foreign(tmp_path, family, **FOREIGN_CASES[family])
    # The three at once need more blocks than there are: one of them is preempted and computed again.
    options = {"device": "cpu", "threads": 1, "block_size": BLOCK, "chunk_tokens": CHUNK}
    llm = LLM(tmp_path, num_blocks=34, **options)
    prompts = [prompt(n, seed=n) for n in (37, 50, 23)]
    done = llm.generate(prompts, GREEDY, ignore_eos=True)
    assert llm.engine.scheduler.stats().preemptions > 0
    again = llm.generate([prompts[0], [*prompts[0][:20], 5, 6]], GREEDY, ignore_eos=True)
    assert again[0].ids == done[0].ids
    assert [c.cached_tokens for c in again] == [36, 20]
    llm.engine.pool.check_integrity()
    for completion in (*done, *again):
        text = [*completion.prompt_ids, *completion.ids]
        with torch.inference_mode():
            logprobs = reference(torch.tensor([text])).logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
        assert completion.ids == logprobs.argmax(-1).tolist()
        chosen = [float(row[token.id]) for row, token in zip(logprobs, completion.tokens, strict=True)]
        assert [token.logprob for token in completion.tokens] == pytest.approx(chosen, abs=1e-4)


def test_the_shape_is_read_from_the_model(tmp_path: Path) -> None:
    save_foreign(tmp_path, "gemma3_text", **FOREIGN_CASES["gemma3_text"])
    spec = open_model(tmp_path).spec
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        "Gemma3ForCausalLM",
        4,
        4,
        2,
        16,
    )
    assert spec.windows == (8, None, 8, None)
    assert spec.scale == pytest.approx(48**-0.5)
    assert (spec.vocab_size, spec.max_position, spec.eos_token_ids) == (VOCAB, 128, (2,))


@pytest.mark.parametrize(
    ("visible", "said", "window"),
    [
        (lambda q, k: k <= q, None, None),
        (lambda q, k: (k <= q) & (k > q - 8), None, 8),
        (lambda q, k: (k <= q) & (k > q - 8), 8, 8),
        (lambda q, k: (k <= q) & (k > q - 8), 9, "window of 8, but its layers pass 9"),
        (lambda q, k: (k <= q) & (q // 8 == k // 8), None, "neither causal nor a sliding window"),
        (lambda q, k: (k <= q) | (k < 5), None, "neither causal nor a sliding window"),
        (lambda q, k: (k <= q) & (k > q - 8) | (k < 2), None, "neither causal nor a sliding window"),
    ],
)
def test_a_window_is_read_from_the_mask_or_the_mask_is_refused(
    visible: Callable[[Any, Any], Any], said: int | None, window: int | str | None
) -> None:
    def mask(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return visible(query, key)

    call = hf_spec._Call(torch.nn.Identity(), 1, 1, 8, 1.0, None, said, mask)
    if isinstance(window, str):
        with pytest.raises(ConfigError, match=window):
            hf_spec._window(call, 100)
    else:
        assert hf_spec._window(call, 100) == window


def test_long_rope_ends_at_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    save_foreign(tmp_path, "phi3", **GROUPED, rope_parameters=rope, original_max_position_embeddings=48)
    assert open_model(tmp_path).spec.max_position == 48


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("bloom", {}, "0 of its 4 layers use the attention interface"),
        ("mamba", {}, "state other than keys and values"),
        ("rwkv", {}, "state other than keys and values"),
        ("falcon", {}, "does not use the attention interface"),
        ("minicpm3", {}, "keys and values of different shapes"),
        ("minimax", GROUPED, "linear_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic rope"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "the format 'hqq' are not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_from_its_config(
    model_type: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    quantised = {k: v for k, v in config.items() if k == "quantization_config"}
    made = AutoConfig.for_model(model_type, **(FOREIGN_TINY | {k: v for k, v in config.items() if k not in quantised}))
    names = {"rwkv": "RwkvForCausalLM", "minicpm3": "MiniCPM3ForCausalLM"}
    names |= {"minimax": "MiniMaxForCausalLM"}
    said = made.to_dict() | quantised | {"architectures": [names.get(model_type, f"{model_type.title()}ForCausalLM")]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=message) as caught:
        open_model(tmp_path)
    assert "\n" not in caught.value.message


def test_code_in_the_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask the user on the terminal, and a pod has no user."""
    monkeypatch.setattr("builtins.input", lambda _question: "y")
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass OwnConfig: pass\n")
    said = FOREIGN_TINY | {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig"},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="custom code") as caught:
        open_model(tmp_path)
    assert "\n" not in caught.value.message
    assert not ran.exists()


@pytest.mark.parametrize("breach", ["recurrent layer", "ignored positions"])
def test_a_model_that_pieces_change_does_not_load(breach: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after loading finds what the trace cannot see."""
    save_foreign(tmp_path, "gpt2")
    source = open_model(tmp_path)
    original = HfModel.__init__

    def broken(self: HfModel, *args: Any) -> None:
        original(self, *args)
        if breach == "recurrent layer":
            self._decoder.h[1].mlp.register_forward_hook(lambda _m, _i, out: out + out.cumsum(1))
        else:
            at_zero = torch.zeros((), dtype=torch.int64)
            self._decoder.wpe.register_forward_pre_hook(lambda _m, given: (torch.arange(given[0].shape[-1]) + at_zero,))

    monkeypatch.setattr(HfModel, "__init__", broken)
    with pytest.raises(ConfigError, match="a prompt gives different states in chunks"):
        source.load(64, CPU, torch.float32)


def test_a_forward_pass_that_needs_the_host_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_foreign(tmp_path, "gpt2")
    assert open_model(tmp_path).load(64, CPU, torch.float32).capturable
    build = hf_spec.build_model

    def with_a_copy(*args: Any) -> Any:
        model = build(*args)
        model.transformer.h[0].mlp.register_forward_hook(
            lambda _m, _i, out: out + torch.ones(8, device="cpu").to(out).sum()
        )
        return model

    monkeypatch.setattr(hf_spec, "build_model", with_a_copy)
    assert not open_model(tmp_path).load(64, CPU, torch.float32).capturable


def test_experts_are_captured_in_bf16_only(tmp_path: Path) -> None:
    save_foreign(tmp_path, "qwen2_moe", **FOREIGN_CASES["qwen2_moe"])
    source = open_model(tmp_path)
    assert [source.load(64, CPU, dtype).capturable for dtype in (torch.float32, torch.bfloat16)] == [False, True]


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_foreign(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, message in (({"n_layer": 5}, "missing_keys"), ({"n_layer": 3}, "unexpected_keys")):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=message):
            open_model(tmp_path).load(64, CPU, torch.float32)
