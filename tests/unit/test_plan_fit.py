"""`baton plan fit`: its bytes are those of loaded models, its times are near the measured ones, its advice holds."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.support.shapes import SHAPES
from cli.app import app
from cli.fit.cards import CARDS, Card, load_card, parse_card, write_card
from cli.fit.estimate import Fit, PlannedLoad, best_of, candidates, decode_s, prompt_s, sizes_of
from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.adapters.packed import pack_adapter
from engine.adapters.peft import AdapterFile, LoraPair
from engine.adapters.slots import sites_of
from engine.card_rates import measure
from engine.kv.groups.state_blocks import StateBlockPool
from engine.llm import LLM
from engine.model_size import ModelSize, model_size
from engine.models.decoder import Decoder
from engine.models.loader import open_model
from engine.models.spec import Shard
from tests.rigs.engine.hybrid_models import save_hybrid
from tests.rigs.engine.tiny_models import MOE_CASES, TINY

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TOLERANCE = 0.08  # Of the times of a dense model of 8B
MOE_TOLERANCE = 0.10
SHORT_PROMPT = 512  # Shorter prompts wait for launches, which the estimate leaves out


def directory(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def shape_size(path: Path, shape: str, **options: Any) -> ModelSize:
    return model_size(directory(path, SHAPES[shape].config), dtype="bfloat16", **options)


# -- times, against benchmarks/results


@pytest.mark.parametrize(
    ("file", "card"), [("engine-h200.json", "h200"), ("engine-h200-after.json", "h200"), ("engine-h100.json", "h100")]
)
def test_times_are_near_the_measured_ones(file: str, card: str, tmp_path: Path) -> None:
    size = shape_size(tmp_path, "llama-3.1-8b")
    metrics = json.loads((RESULTS / file).read_text())["metrics"]
    off, compared = {}, 0
    for name, value in metrics.items():
        what, _, numbers = name.partition("_ms_")
        if what == "decode":
            rows, context = map(int, numbers.split("x"))
            expected = decode_s(size, CARDS[card], rows, context)
        elif what == "ttft" and int(numbers) >= SHORT_PROMPT:
            expected = prompt_s(size, CARDS[card], int(numbers))
        else:
            continue
        compared += 1
        if abs(expected * 1e3 / value - 1) > TOLERANCE:
            off[name] = (value, expected * 1e3)
    assert (compared, off) == (11, {})


def test_times_of_a_mixture_of_experts_are_near_the_measured_ones(tmp_path: Path) -> None:
    size = shape_size(tmp_path, "qwen3-30b-a3b")
    metrics = json.loads((RESULTS / "moe-h200.json").read_text())["metrics"]
    for rows, context in ((1, 128), (64, 1024)):
        expected = decode_s(size, CARDS["h200"], rows, context) * 1e3
        assert expected == pytest.approx(metrics[f"qwen3_30b_a3b_{rows}x{context}_ms"], rel=MOE_TOLERANCE)


# -- bytes


def loaded_bytes(path: Path, form: str) -> int:
    """Bytes of all weights of a model that is loaded with random ones."""
    source = open_model(path, load_format="dummy", form=form)
    model: Any = source.load(64, torch.device("cpu"), torch.float32)
    if not isinstance(model, Decoder):
        return sum(p.nbytes for part in (model._causal, model._decoder) for p in part.parameters())
    # A CPU also holds quantised weights in another form, which is not counted.
    other = {id(linear.weight) for _, linear in model.linears() if linear.scheme is not None}
    return sum(p.nbytes for p in model.parameters() if id(p) not in other) + model.quantized_bytes


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tied": ({"tie_word_embeddings": True}, "auto"),
    "untied": ({"attention_bias": True}, "auto"),
    "fp8 at load": ({}, "fp8"),
    "int8 at load": ({}, "int8"),
    "gptq": ({"quantization_config": GPTQ}, "auto"),
    "awq": ({"quantization_config": AWQ}, "auto"),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_loaded_model(case: str, tmp_path: Path) -> None:
    config, form = CASES[case]
    base = {**TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    path = directory(tmp_path, {**base, **config})
    assert model_size(path, dtype="float32", weights=form).weight_bytes == loaded_bytes(path, form)


LATENT = {**TINY, **MOE_CASES["deepseek-v3"], "architectures": ["DeepseekV3ForCausalLM"]}


def test_latents_take_the_bytes_of_one_vector(tmp_path: Path) -> None:
    path, block = directory(tmp_path, LATENT), 64
    layout = KVLayout("m", "r", 3, 1, 40, block, "float32", latent_dim=32)
    assert model_size(path, dtype="float32", block_size=block).kv_bytes == layout.block_bytes / block
    with pytest.raises(ConfigError, match="latent attention") as refused:
        model_size(path, dtype="float32", kv_dtype="float8_e4m3")
    assert refused.value.field == "kv_dtype"


def test_the_matrices_of_the_absorbed_form_are_not_quantised(tmp_path: Path) -> None:
    path = directory(tmp_path, LATENT | {"first_k_dense_replace": 3})
    assert model_size(path, dtype="float32", weights="fp8").weight_bytes == loaded_bytes(path, "fp8")


ARCHITECTURES = {
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4-moe": "Glm4MoeForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_bytes_of_experts_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    path = directory(tmp_path, {**TINY, **MOE_CASES[family], "architectures": [ARCHITECTURES[family]]})
    size = model_size(path, dtype="float32")
    assert size.weight_bytes == loaded_bytes(path, "auto")
    assert size.read_bytes(1) < size.read_bytes(64) <= size.dense_bytes + size.expert_bytes


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
def test_a_model_with_latent_attention_keeps_one_vector_a_token(family: str, tmp_path: Path) -> None:
    case = MOE_CASES[family]
    config = {**TINY, **case, "architectures": [f"DeepseekV{family[-1]}ForCausalLM"]}
    path = directory(tmp_path, {key: value for key, value in config.items() if key != "head_dim"})
    size = model_size(path, dtype="float32")
    numbers = case["kv_lora_rank"] + case["qk_rope_head_dim"]
    assert size.kv_bytes == TINY["num_hidden_layers"] * numbers * 4
    assert size.weight_bytes == loaded_bytes(path, "auto")
    with pytest.raises(ConfigError, match="latent"):
        model_size(path, dtype="float32", kv_dtype="float8_e4m3")


def test_experts_of_gptq_are_counted_in_4_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "quantization_config": GPTQ}
    path = directory(tmp_path, {**TINY, **MOE_CASES["qwen3-moe"], **sizes, "architectures": ["Qwen3MoeForCausalLM"]})
    size = model_size(path, dtype="bfloat16")
    numbers = size.num_experts * size.moe_layers * 3 * 64 * 64
    assert size.expert_bytes == numbers * (0.5 + 5 / 32)  # 4 bits, and a float32 scale and a zero for 32 numbers


def test_a_model_of_transformers(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        **{key: TINY[key] for key in TINY if key != "num_key_value_heads"},
    }
    path = directory(tmp_path, config)
    assert model_size(path, dtype="float32").weight_bytes == loaded_bytes(path, "auto")


def test_layers_with_a_window_read_less(tmp_path: Path) -> None:
    size = shape_size(tmp_path, "gpt-oss-20b")
    window = next(w for w in size.shape.windows if w is not None)
    assert size.kv_read_bytes(window) == size.kv_bytes * window
    assert size.kv_read_bytes(100 * window) == pytest.approx(size.kv_bytes * 50.5 * window)
    assert size.attended_pairs(window) == size.shape.num_layers * window**2 / 2


# -- advice


def found_for(path: Path, shape: str, card: Card, load: PlannedLoad, ranks: int | None = None) -> list[Fit]:
    sizes = sizes_of(model_size, directory(path, SHAPES[shape].config), card.dtype)
    return candidates(sizes, card, load, 0.9, ranks)


def test_the_least_change_that_holds_all_users_is_chosen(tmp_path: Path) -> None:
    def flags(users: int) -> tuple[str, ...]:
        load = PlannedLoad(context=32768, prompt=4096, users=users)
        return best_of(found_for(tmp_path, "llama-3.1-8b", CARDS["h200"], load)).flags

    assert flags(16) == ("--max-model-len 32768",)
    assert flags(40) == ("--max-model-len 32768", "--kv-dtype fp8_e4m3")
    assert flags(100) == ("--max-model-len 32768", "--tensor-parallel-size 2", "--kv-dtype fp8_e4m3")
    assert "--max-seqs 300" in flags(300)


def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    load = PlannedLoad(context=4096, prompt=4096, users=1)
    (setup,) = [s for s in found_for(tmp_path, "llama-3.1-70b", CARDS["a100-40gb"], load, 2) if not s.fits][:1]
    assert setup.pool_bytes < 0
    assert setup.pool_tokens == setup.largest_batch == setup.batch == 0
    # A card without 8-bit floats is offered none.
    assert not any(
        "fp8" in flag for s in found_for(tmp_path, "llama-3.1-70b", CARDS["a100-40gb"], load) for flag in s.flags
    )


def test_a_split_that_the_model_refuses_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot share"):
        found_for(tmp_path, "llama-3.1-8b", CARDS["h200"], PlannedLoad(context=4096, prompt=4096, users=1), 3)


@pytest.mark.parametrize("case", [{"model_type": "llama"}, MOE_CASES["glm4-moe"]], ids=["dense", "experts"])
def test_adapters_take_the_bytes_of_full_slots_on_each_rank(case: dict[str, Any], tmp_path: Path) -> None:
    """A file that changes all modules at the largest rank fills a slot, on one rank and on each of two."""
    name = "LlamaForCausalLM" if case["model_type"] == "llama" else "Glm4MoeForCausalLM"
    path = directory(tmp_path, {**TINY, **case, "architectures": [name]})
    for ranks in (1, 2):
        size = model_size(path, dtype="float32", ranks=ranks, max_adapters=3, max_adapter_rank=20)
        assert size.weight_bytes == model_size(path, dtype="float32", ranks=ranks).weight_bytes
        shard, spec = Shard(0, ranks), open_model(path).spec
        model = Decoder(shard.shard_spec(spec), 1, torch.device("cpu"), torch.float32, fused=False)  # type: ignore[arg-type]
        sites = sites_of(model, shard)
        pairs = {
            module: LoraPair(torch.ones(20, inputs), torch.ones(outputs, 20), 1.0)
            for module, (inputs, outputs) in sites.shapes.items()
        }
        packed = pack_adapter(AdapterFile("", pairs), sites, torch.float32, pin=False, shard=shard)
        assert size.adapter_bytes == 3 * packed.numbers.nbytes


def test_the_pool_gets_what_adapters_leave(tmp_path: Path) -> None:
    path, load = directory(tmp_path, SHAPES["llama-3.1-8b"].config), PlannedLoad(context=4096, prompt=4096, users=4)
    with_adapters, without = (
        candidates(sizes_of(model_size, path, "bfloat16", max_adapters=count), CARDS["h200"], load, 0.9, 2)[0]
        for count in (16, 0)
    )
    assert without.pool_bytes - with_adapters.pool_bytes == with_adapters.adapter_bytes > 0
    assert with_adapters.flags[-2:] == ("--max-adapters 16", "--max-adapter-rank 16")
    latent = tmp_path / "latent"
    latent.mkdir()
    with pytest.raises(ConfigError, match="latent attention") as refused:
        model_size(directory(latent, LATENT), dtype="float32", max_adapters=1)
    assert refused.value.field == "max_adapters"


# -- the command


def run(*argv: str) -> Any:
    return CliRunner().invoke(app, ["plan", "fit", *argv])


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    path = directory(tmp_path, SHAPES["llama-3.1-8b"].config)
    argv = ("--model", str(path), "--gpu", "H200", "--context", "32k", "--users", "16")
    shown = run(*argv)
    assert (shown.exit_code, "Use --max-model-len 32768." in shown.output) == (0, True)
    assert "fp8_e4m3" in shown.output, "80 columns show each setting"
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.output
    answer = json.loads(run(*argv, "--json").output)
    assert answer["best"]["fits"]
    assert answer["load"] == {"context": 32768, "prompt": 32768, "users": 16}
    assert run(*argv[:-1], "5000").exit_code == 1
    adapted = run(*argv, "--gpus", "1", "--max-adapters", "16").output
    assert "16 adapters of rank 16" in adapted
    assert "beside 1.4 GiB for adapters" in adapted


def test_recurrent_states_take_memory_and_limit_the_answers(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3.5")
    size = model_size(tmp_path, dtype="float32")
    llm = LLM(str(tmp_path), dtype="float32", kv_memory=8 << 20, max_seqs=2)
    layout, slots = llm.engine.layout, size.num_states(8 << 20, 2)
    assert size.state_bytes == layout.state_pages * layout.block_bytes
    pool = llm.engine.pool
    assert isinstance(pool, StateBlockPool)
    assert pool.slots.num_slots == slots == 8
    assert llm.engine.kv.data.nbytes <= 8 << 20, "kv_memory is for blocks and states"
    result = run("--model", str(tmp_path), "--gpu", "h200", "--context", "512", "--users", "2000", "--json")
    best = json.loads(result.output)["best"]
    assert "--kv-groups" in best["flags"]
    assert best["largest_batch"] <= best["num_states"]
    assert best["state_bytes"] >= best["num_states"] * layout.state_bytes // 2, "the card has 16-bit numbers"
    for options in ({"ranks": 2}, {"max_adapters": 1}):
        with pytest.raises(ConfigError, match="recurrent state"):
            model_size(tmp_path, dtype="bfloat16", **options)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("--gpu", "h200"), "model"),
        (("--model", "{path}"), "gpu"),
        (("--model", "{path}", "--gpu", "h300"), "gpu"),
        (("--model", "{path}", "--gpu", "h200", "--context", "32q"), "context"),
        (("--model", "{path}", "--gpu", "h200", "--context", "999999k"), "context"),
        (("--model", "{path}", "--gpu", "h200", "--context", "512", "--prompt", "513"), "prompt"),
        (("--model", "{path}", "--gpu", "h200", "--users", "0"), "users"),
        (("--model", "{path}", "--gpu", "h200", "--share", "1.5"), "share"),
        (("--model", "{path}", "--gpu", "h200", "--share", "nan"), "share"),
        (("--model", "{path}", "--gpu", "h200", "--max-adapter-rank", "257"), "max-adapter-rank"),
    ],
)
def test_wrong_options_are_named(argv: tuple[str, ...], field: str, tmp_path: Path) -> None:
    path = directory(tmp_path, SHAPES["tiny"].config)
    result = run(*(part.format(path=path) for part in argv))
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == field


def test_an_option_of_the_simulation_is_refused_before_fit() -> None:
    result = CliRunner().invoke(app, ["plan", "--trace", "x", "fit"])
    assert isinstance(result.exception, ConfigError)


def test_flags_give_the_pod_the_pool_of_the_estimate(tmp_path: Path) -> None:
    path = directory(tmp_path, SHAPES["llama-3.1-8b"].config)
    argv = ("--model", str(path), "--context", "4k", "--users", "4", "--json", "--gpu")
    assert "--gpu-memory-utilization 0.8" in json.loads(run(*argv, "h200", "--share", "0.8").output)["best"]["flags"]
    cpu = replace(CARDS["h200"], name="machine", device="cpu", memory_bytes=48 << 30, fp8_flop_s=0.0)
    write_card(cpu, tmp_path / "card.json")
    best = json.loads(run(*argv, str(tmp_path / "card.json")).output)["best"]
    assert best["fits"]
    assert f"--kv-memory {int(best['pool_bytes']) >> 20}MiB" in best["flags"]  # the default is 512M on a CPU


def test_ranks_on_cpus_share_one_memory(tmp_path: Path) -> None:
    cpu = replace(CARDS["h200"], device="cpu", memory_bytes=16 << 30, fp8_flop_s=0.0)
    found = found_for(tmp_path, "llama-3.1-8b", cpu, PlannedLoad(context=4096, prompt=4096, users=4))
    assert {setup.ranks for setup in found} == {1}
    assert not best_of(found).fits


# -- measured cards


def test_a_measured_card_is_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.card_rates.CPU_SIZES", (1 << 20, (16, 32, 64), (2, 32, 16)))
    card = parse_card(measure(torch.device("cpu")), "measured")
    assert (card.device, card.dtype, card.fp8_flop_s) == ("cpu", "float32", 0.0)
    write_card(card, tmp_path / "card.json")
    assert load_card(str(tmp_path / "card.json")) == card
    load = PlannedLoad(context=64, prompt=64, users=2)
    assert best_of(found_for(tmp_path, "tiny", card, load)).fits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"copy_byte_s": 0}, "copy_byte_s"),
        ({"memory_bytes": True}, "memory_bytes"),
        ({"device": "tpu"}, "device"),
        ({"speed": 1}, "unknown field 'speed'"),
    ],
)
def test_a_wrong_card_file_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_card({**asdict(CARDS["h200"]), **change}, "card.json")
