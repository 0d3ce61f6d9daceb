"""The decoder against transformers, on tiny random models of all supported architectures and RoPE scalings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigError
from engine.attention.base import StepShape
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.spec import Shard, eos_token_ids, parse_spec, read_config
from engine.models.weights.files import only_pickled
from engine.models.weights.load import load_weights
from engine.models.weights.revision import weights_revision
from tests.rigs.engine.tiny_models import CPU, TINY, YARN, Rig, assert_logits, save_reference

torch.set_num_threads(1)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-mha-head-dim": {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 24},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-rope-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "llama-rope-llama3": {
        "model_type": "llama",
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
    },
    "llama-rope-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama-rope-yarn-mscale": {
        "model_type": "llama",
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "truncate": False},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-rope-yarn": {"model_type": "qwen3", "head_dim": 32, "rope_parameters": YARN},
    "mistral-rope-llama3": {
        "model_type": "mistral",
        "sliding_window": 40,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
    },
    # Head dims of the supported models, with 1, 2, 3, 4 and 8 query heads per KV head.
    "llama-dim-64": {"model_type": "llama", "head_dim": 64, "num_attention_heads": 6, "hidden_size": 96},
    "llama-dim-80": {"model_type": "llama", "head_dim": 80, "num_attention_heads": 2},
    "mistral-dim-96": {"model_type": "mistral", "head_dim": 96, "sliding_window": 33},
    "qwen3-dim-128": {"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    "llama-dim-256": {"model_type": "llama", "head_dim": 256, "num_key_value_heads": 1},
    "qwen3-bias-tied": {"model_type": "qwen3", "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", ["mistral-dim-96", "qwen3-dim-128"])
def test_the_last_layer_computes_only_the_wanted_rows_of_a_long_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wanted states and the KV equal those of a step that returns all rows.

    The last layer computes queries for the wanted rows only.
    """
    save_reference(tmp_path, CASES[name])
    whole, few = Rig(tmp_path, num_blocks=128), Rig(tmp_path, num_blocks=128)
    generator = torch.Generator().manual_seed(3)
    blocks = [list(range(3, 65)), list(range(70, 110))]
    queried: list[int] = []
    attend = few.backend.attend

    def noted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        queried.append(len(query))
        return attend(query, *rest)

    def hidden(rig: Rig, tokens: list[torch.Tensor], starts: list[int], rows: torch.Tensor | None) -> torch.Tensor:
        counts = [len(t) for t in tokens]
        with torch.inference_mode():
            metadata = rig.backend.prepare(StepShape(starts, counts, blocks))
            positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
            context = ForwardContext(rig.cache, rig.backend, metadata)
            return rig.model.forward(torch.cat(tokens), positions, context, rows)

    monkeypatch.setattr(few.backend, "attend", noted)
    for starts, counts, last in (([0, 0], [200, 70], 2), ([200, 70], [30, 8], 38), ([230, 78], [1, 63], 64)):
        tokens = [torch.randint(0, 160, (n,), generator=generator) for n in counts]
        ends = torch.tensor(counts).cumsum(0) - 1
        want, got = hidden(whole, tokens, starts, None)[ends], hidden(few, tokens, starts, ends)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        for a, b in zip(whole.cache, few.cache, strict=True):
            torch.testing.assert_close(a.kv, b.kv, atol=1e-4, rtol=1e-4)
        assert queried[-1] == last


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    assert_logits(save_reference(tmp_path, CASES[name]), Rig(tmp_path))


def test_an_odd_block_stride_is_supported(tmp_path: Path) -> None:
    """A block stride that is no multiple of a head's rows (padding to 256 bytes) takes the general gather."""
    reference = save_reference(tmp_path, {"model_type": "llama", "num_key_value_heads": 1, "num_hidden_layers": 1})
    rig = Rig(tmp_path, block_size=3)
    assert rig.cache[0].kv.stride(0) % (3 * 16)
    prompt = list(range(1, 18))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    (got,) = rig.logits([prompt], [0], [[4, 2, 9, 1, 0, 7]])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, CASES["qwen2"], max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    prompt = [3, 1, 4, 1, 5]
    (got,) = Rig(tmp_path).logits([prompt], [0], [[0, 1]])
    with torch.inference_mode():
        torch.testing.assert_close(got, reference(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=1e-4)


def test_revision_follows_the_content(tmp_path: Path) -> None:
    model = save_reference(tmp_path / "a", CASES["llama"])
    model.save_pretrained(tmp_path / "b")
    spec = parse_spec(*read_config(tmp_path / "a"))
    assert weights_revision(spec, tmp_path / "a") == weights_revision(spec, tmp_path / "b")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.01)
    model.save_pretrained(tmp_path / "c")
    assert weights_revision(spec, tmp_path / "a") != weights_revision(spec, tmp_path / "c")


def test_old_and_new_rope_fields_are_equivalent(tmp_path: Path) -> None:
    save_reference(tmp_path, CASES["llama-rope-llama3"])
    config = json.loads((tmp_path / "config.json").read_text())
    new = parse_spec(config)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    assert parse_spec(config) == new


def test_rope_in_both_fields_is_merged() -> None:
    """A rope_scaling that a user adds to a checkpoint of transformers 5, as older instructions say, has effect."""
    config = TINY | {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    both = config | {"rope_scaling": scaling, "rope_parameters": YARN | {"rope_theta": 1e6}}
    assert parse_spec(both) == parse_spec(config | {"rope_scaling": scaling})
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling differ"):
        parse_spec(both | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})


def test_whole_floats_count_as_integers() -> None:
    """transformers warns and serves: {"original_max_position_embeddings": 2048.0}."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = TINY | {"architectures": ["MistralForCausalLM"], "rope_theta": 1e6, "sliding_window": 9}
    floats = {name: float(value) for name, value in config.items() if type(value) is int}
    assert {"hidden_size", "max_position_embeddings", "sliding_window"} <= floats.keys()
    as_floats = {**config, **floats, "rope_scaling": {**scaling, "original_max_position_embeddings": 64.0}}
    spec = parse_spec(config | {"rope_scaling": scaling})
    assert repr(parse_spec(as_floats)) == repr(spec)  # it is a part of the revision
    for wrong in (64.5, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="original_max_position_embeddings is"):
            parse_spec(config | {"rope_scaling": {**scaling, "original_max_position_embeddings": wrong}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM has no native code"),
        ({"architectures": ["BertForMaskedLM"]}, "only text decoders"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_theta": 0}, "rope_theta is 0, a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": "x"}}, "mscale is 'x', a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', true or false"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": "all"}, "max_window_layers is 'all'"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": 2}, "layer_types is 2, a list"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": [None, []]}, "layer_types has None"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": [[]]}, r"layer_types has \[\]"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": []}, "layer_types has 0 layers"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta is 1.0, yarn needs"),
    ],
)
def test_unsupported_configurations_are_named(change: dict[str, Any], message: str) -> None:
    config = TINY | {"architectures": ["LlamaForCausalLM"]} | change
    with pytest.raises(ConfigError, match=message):
        parse_spec(config)


def test_a_negative_end_is_none() -> None:
    assert eos_token_ids({"eos_token_id": [7, -1]}, {"eos_token_id": -1}) == (7,)


def test_sizes_without_measure_are_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, CASES["llama"])
    config, _ = read_config(tmp_path)
    with pytest.raises(ConfigError, match="intermediate_size is 2147483648, an integer from 1 to 2147483647 is needed"):
        parse_spec(config | {"intermediate_size": 2**31})
    with pytest.raises(ConfigError, match="num_hidden_layers is 20000, at most 16384 are supported"):
        parse_spec(config | {"num_hidden_layers": 20_000})


@pytest.mark.parametrize("mapped", [True, False])
def test_bin_files_are_read_like_safetensors(tmp_path: Path, mapped: bool) -> None:
    """`mapped`: the format since torch 1.6, which can be mapped into memory."""
    directory, pickled = tmp_path / "safe", tmp_path / "bin"
    save_reference(directory, CASES["llama"])
    pickled.mkdir()
    (pickled / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=mapped)
    spec = parse_spec(*read_config(directory))
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        models = []
        for path in (directory, pickled):
            models.append(Decoder(shard.shard_spec(spec), 256, CPU, torch.float32, all_reduce=lambda x: x))
            load_weights(models[-1], path, spec, shard)
        for expected, got in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(expected, got)
    before = weights_revision(spec, pickled)
    assert weights_revision(spec, pickled) == before
    tensors["model.norm.weight"] += 1
    torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=mapped)
    assert weights_revision(spec, pickled) != before
    (pickled / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert weights_revision(spec, pickled) == weights_revision(spec, directory)  # it has precedence


def test_a_bin_file_runs_no_code(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "harm",)

    save_reference(tmp_path, CASES["llama"])
    (tmp_path / "model.safetensors").unlink()
    spec = parse_spec(*read_config(tmp_path))
    for content in ({"a": Harm()}, {"a": 1}, [torch.zeros(1)]):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin (cannot be read by|is not a dictionary of tensors)"):
            load_weights(Decoder(spec, 256, CPU, torch.float32), tmp_path, spec)
    assert not (tmp_path / "harm").exists()


def test_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, CASES["llama"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"num_hidden_layers": 4}, "lacks"),
        ({"num_hidden_layers": 2}, "does not use"),
        ({"intermediate_size": 95}, "has shape"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=message):
            Rig(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="neither"):
        weights_revision(parse_spec(*read_config(tmp_path)), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ConfigError, match=r"index\.json names no file"):
        only_pickled(tmp_path)
