"""Multi-head latent attention: variants against transformers, the KV layout, FP8 checkpoints, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.demo.adapter import write_random_adapter
from common.errors import ConfigError, LayoutMismatch
from common.kv_layout import KVLayout
from common.types import SamplingParams
from common.wire import layout_from_pb, layout_to_pb
from engine.llm import LLM
from engine.models.cpu_weights import can_pack
from engine.models.decoder import Decoder
from engine.models.eagle import parse_eagle_spec
from engine.models.layers import LatentAttention
from engine.models.loader import model_support, open_model
from engine.models.spec import LatentModelSpec, NotNative, Shard, parse_spec
from engine.quantization.at_load import quantize
from engine.quantization.scheme import Scheme
from engine.speculation.draft_source import open_draft
from tests.rigs.engine.draft_models import eagle_head
from tests.rigs.engine.tiny_models import (
    CPU,
    MOE_CASES,
    TINY_ENGINE,
    YARN,
    Rig,
    assert_greedy,
    save_reference,
    tiny_prompt,
)

torch.set_num_threads(1)
V2, V3 = MOE_CASES["deepseek-v2"], MOE_CASES["deepseek-v3"]
GREEDY = {"topk_method": "greedy", "n_group": None, "topk_group": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "v2-lite": V2 | GREEDY | {"attention_bias": False, "routed_scaling_factor": 1.0},
    "v2-query-latent": V2 | GREEDY | {"q_lora_rank": 20, "rope_parameters": None},
    "moonlight": V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": None},
    "v3-halves-rotate": V3 | {"rope_interleave": False, "attention_bias": True},
    "v3-dense": V3 | {"first_k_dense_replace": 3, "norm_topk_prob": False},
    "v3-yarn-without-mscale": V3 | {"rope_parameters": YARN},
}
LAYOUT: dict[str, Any] = {"num_layers": 27, "num_kv_heads": 1, "head_dim": 576, "block_size": 16, "dtype": "bfloat16"}
SCHEME = Scheme(layout="plain", kind="fp8", extent="block", activations="group", scale_name="weight_scale_inv")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """A prompt at once, and the same prompt in chunks and single tokens."""
    reference = save_reference(tmp_path, VARIANTS[name])
    rig, prompt, blocks = Rig(tmp_path), tiny_prompt(70, seed=5), [[63, 62, 61, 60, *range(44, 60)]]
    with torch.inference_mode():
        want = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(rig.logits([prompt], [0], blocks)[0], want, atol=1e-4, rtol=1e-4)
    again, start = Rig(tmp_path), 0
    for size in (33, 1, 5, 1, 30):
        got = again.logits([prompt[start : start + size]], [start], blocks)[0]
        torch.testing.assert_close(got, want[start : start + size], atol=1e-4, rtol=1e-4)
        start += size


def test_a_block_has_one_vector_for_each_token_and_layer() -> None:
    layout = KVLayout("m", "r", **LAYOUT, latent_dim=512)
    (segment,) = layout.segments
    assert segment.shape == (27, 1, 1, 16, 576)
    assert layout.block_bytes == 16 * 31_104, "bytes of DeepSeek-V2-Lite"
    assert layout_from_pb(layout_to_pb(layout)) == layout
    drafted = KVLayout("m", "r", **LAYOUT, latent_dim=512, draft_layers=1, draft_kv_heads=2, draft_head_dim=64)
    assert drafted.segments[1].shape == (1, 2, 2, 16, 64), "a draft model has keys and values"


def test_a_layout_without_latents_keeps_its_fingerprint() -> None:
    plain = KVLayout("m", "r", **LAYOUT)
    assert plain.fingerprint == "ef74a0a95d027d33f893af0f791786e9", "as computed before layouts had latents"
    latent = KVLayout("m", "r", **LAYOUT, latent_dim=512)
    assert len({plain.fingerprint, latent.fingerprint, KVLayout("m", "r", **LAYOUT, latent_dim=448).fingerprint}) == 3
    with pytest.raises(LayoutMismatch, match="latent_dim: 0 on this pod, 512 on the peer"):
        plain.require_equal(latent)


def test_a_rank_has_all_latents_and_its_heads(tmp_path: Path) -> None:
    save_reference(tmp_path, V3)
    spec = open_model(tmp_path).spec
    part = Shard(1, 4).shard_spec(spec)
    assert (part.num_heads, part.num_kv_heads, part.head_dim, part.latent_dim) == (1, 1, 40, 32)
    with pytest.raises(ConfigError, match="3 does not divide the model's num_attention_heads, 4"):
        Shard(1, 3).shard_spec(spec)


def test_samples_preemption_and_host_memory_give_exact_logprobs(tmp_path: Path) -> None:
    """Three samples share the prompt's blocks and copy the last one; a small pool moves blocks to host memory."""
    reference = save_reference(tmp_path, V3)
    block_bytes = KVLayout("m", "r", 3, 1, 40, 4, "float32", latent_dim=32).block_bytes
    llm = LLM(tmp_path, num_blocks=40, host_cache=200 * block_bytes, checksums=True, **TINY_ENGINE)
    assert llm.engine.layout.block_bytes == block_bytes
    params = SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=12, logprobs=0)
    prompts = [tiny_prompt(n, seed=n) for n in (37, 45, 30)]
    for prompt in [*prompts, prompts[0]]:
        done = llm.generate([prompt], params, ignore_eos=True)
        assert llm.engine.pool.host_tier is not None
        assert llm.engine.pool.host_tier.wait_idle(20.0)
        assert len({tuple(sample.ids) for sample in done}) == 3
        for sample in done:
            with torch.inference_mode():
                logits = reference(torch.tensor([[*prompt, *sample.ids]])).logits[0, len(prompt) - 1 : -1]
            want = logits.log_softmax(-1).gather(1, torch.tensor(sample.ids)[:, None])[:, 0].tolist()
            assert [token.logprob for token in sample.tokens] == pytest.approx(want, abs=1e-4)
    stats = llm.engine.pool.host_stats()
    assert stats is not None
    assert stats.loaded > 0
    assert stats.damaged == 0
    llm.engine.pool.check_integrity()


def test_hits_at_every_boundary_are_exact(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, V2)
    llm = LLM(tmp_path, num_blocks=80, **TINY_ENGINE)
    first, params = tiny_prompt(37, seed=2), SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
    llm.generate([first], params, ignore_eos=True)
    for blocks in range(1, 10):
        prompt = [*first[: 4 * blocks], *tiny_prompt(3, seed=50 + blocks)]
        (done,) = llm.generate([prompt], params, ignore_eos=True)
        assert done.cached_tokens == 4 * blocks
        assert_greedy(reference, prompt, done.tokens)


def save_fp8(directory: Path) -> dict[str, torch.Tensor]:
    """Saves a checkpoint in FP8 blocks, as DeepSeek-V3. Returns the dequantised weights."""
    save_reference(directory, V3 | {"moe_intermediate_size": 128})
    path, dequantized = directory / "model.safetensors", {}
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj" in name]:
        weight = quantize(tensors.pop(name), SCHEME)
        tensors |= {name: weight.numbers, f"{name}_scale_inv": weight.scales}
        dequantized[name] = weight.dequantize(torch.float32, weight.shape[1])
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    form = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    return dequantized


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["whole", "part"])
def test_the_matrices_of_the_absorbed_form_are_dequantised(shard: Shard, tmp_path: Path) -> None:
    expected = save_fp8(tmp_path)
    model = open_model(tmp_path).load(64, CPU, torch.float32, shard, lambda _part: None)
    assert isinstance(model, Decoder)
    for index, layer in enumerate(model.layer_list):
        attention, prefix = layer.attention, f"model.layers.{index}.self_attn."
        assert isinstance(attention, LatentAttention)
        heads = slice(0, 4) if shard.size == 1 else slice(2, 4)
        whole = expected[f"{prefix}kv_b_proj.weight"].view(4, 32, 32)[heads]
        assert torch.equal(attention.key_up, whole[:, :16])
        assert torch.equal(attention.value_up, whole[:, 16:])


def test_an_fp8_checkpoint_is_served(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    llm = LLM(tmp_path, num_blocks=32, **TINY_ENGINE)
    (done,) = llm.generate([tiny_prompt(20, seed=1)], ignore_eos=True)
    assert len(done.ids) == 16


def test_weights_quantised_at_load_leave_the_absorbed_form_exact(tmp_path: Path) -> None:
    save_reference(tmp_path, V2)
    plain, int8 = (open_model(tmp_path, form=form).load(64, CPU, torch.float32) for form in ("auto", "int8"))
    for name, weight in plain.state_dict().items():  # type: ignore[attr-defined]
        if "kv_up" in name:
            assert torch.equal(weight, int8.state_dict()[name])  # type: ignore[attr-defined]


def test_layers_for_multi_token_prediction_are_skipped_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_reference(tmp_path, V3)
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(2), "model.layers.3.enorm.weight": torch.zeros(2)}
    save_file(load_file(path) | extra, path, {"format": "pt"})
    with caplog.at_level(logging.INFO):
        Rig(tmp_path)
    assert "2 tensors for multi-token prediction" in caplog.text


def test_a_random_model_is_one_model_on_all_ranks(tmp_path: Path) -> None:
    save_reference(tmp_path, V3)
    source = open_model(tmp_path, "dummy", 3)
    whole, part = source.load(64, CPU, torch.float32), source.load(64, CPU, torch.float32, Shard(1, 2), lambda _p: None)
    first, second = (model.layer_list[1].attention for model in (whole, part))  # type: ignore[attr-defined]
    assert torch.equal(first.key_up[2:], second.key_up)
    assert torch.equal(first.kv_down.weight, second.kv_down.weight)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_the_decoder_does_not_compute_is_not_native(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_reference(tmp_path, V2)
    said = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(NotNative, match=message):
        parse_spec(said | config)


def test_an_odd_rotation_is_refused_by_its_field(tmp_path: Path) -> None:
    save_reference(tmp_path, V3)
    said = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match="qk_rope_head_dim is 7, an even number"):
        parse_spec(said | {"qk_rope_head_dim": 7})


def test_kv_in_8_bits_draft_models_and_fixed_order_are_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, V2)
    with pytest.raises(ConfigError, match=r"kv_dtype fp8_e4m3 is not supported for models with latent attention"):
        LLM(tmp_path, num_blocks=8, kv_dtype="fp8_e4m3", **TINY_ENGINE)
    with pytest.raises(ConfigError, match="products with latent attention have no fixed order of sums"):
        open_model(tmp_path, deterministic=True)
    target = open_model(tmp_path).spec
    options: dict[str, Any] = {"load_format": "auto", "seed": 0, "max_len": 64}
    with pytest.raises(ConfigError, match=r"DeepseekV2ForCausalLM has latent attention \(MLA\), use another"):
        open_draft("draft_model", tmp_path, target, tmp_path, **options)


def test_adapters_and_heads_with_latents_are_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, V2)
    with pytest.raises(ConfigError, match="a model with latent attention are not supported: leave it 0") as refused:
        LLM(tmp_path, num_blocks=8, max_adapters=1, **TINY_ENGINE)
    assert refused.value.field == "max_adapters"
    with pytest.raises(ConfigError, match="latent attention"):
        write_random_adapter(tmp_path, tmp_path / "adapter", rank=4, seed=0)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 1}
    with pytest.raises(ConfigError, match=r"EAGLE head: a layer with latent attention \(MLA\)") as refused:
        parse_eagle_spec(config)
    assert refused.value.field == "speculation_model"


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_drafts_of_other_models_and_heads_are_exact(kind: str, tmp_path: Path) -> None:
    """Blocks hold latents of the target, and keys and values of the draft."""
    reference, draft = save_reference(tmp_path / "model", V3), tmp_path / "draft"
    if kind == "eagle":
        eagle_head(draft, vocab=160, hidden=64)
    else:
        save_reference(draft, {"model_type": "llama"})
    options = {"speculation": kind, "speculation_model": draft, "num_blocks": 60}
    llm = LLM(tmp_path / "model", **options, **TINY_ENGINE)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    for completion in llm.generate([tiny_prompt(n, seed=n) for n in (37, 5, 1)], params, ignore_eos=True):
        assert_greedy(reference, completion.prompt_ids, completion.tokens)
    llm.engine.close()


@pytest.mark.skipif(not can_pack(torch.float32), reason="the weights of this torch are not packed")
def test_one_token_of_a_small_model_runs_on_one_thread(tmp_path: Path) -> None:
    save_reference(tmp_path, V3 | {"first_k_dense_replace": 3})
    model = open_model(tmp_path).load(64, CPU, torch.float32)
    assert isinstance(model, Decoder)
    model.pack(keep_head=False)
    assert model._row_ops is not None
    assert model._row_ops._is_small


def test_baton_models_names_the_kv_of_a_token(tmp_path: Path) -> None:
    save_reference(tmp_path, V2)
    support = model_support(tmp_path)
    assert support.how == "native"
    assert isinstance(open_model(tmp_path).spec, LatentModelSpec)
    assert "latents of 32 numbers" in support.text
    assert support.details["kv_numbers_per_token"] == 3 * 32
