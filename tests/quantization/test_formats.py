"""Every format of quantised checkpoints against an oracle in float32: transformers with the weights that files mean.

The oracle rounds the inputs of layers as the checkpoint says, with code of its own. The files are written by
`benchmarks.support.quantized_files`, which shares no code with the reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.quantized_files import FORMATS, QuantizedFiles, write
from common.kv_layout import KVLayout
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.loader import ModelSource, open_model
from engine.models.spec import UNSHARDED, Shard

torch.set_num_threads(1)
CPU = torch.device("cpu")
#: Rows of q, k and v are not whole blocks of 128, neither are the inputs of down.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attention_bias": True,
}
QWEN = {
    **LLAMA,
    "model_type": "qwen3",
    "head_dim": 64,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
PROMPT = torch.randint(0, 160, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def save_model(directory: Path, config: dict[str, Any]) -> Path:
    """Saves a random model, sharper than the default initialisation."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        config["model_type"]: save_model(tmp_path_factory.mktemp(str(config["model_type"])), config)
        for config in (LLAMA, QWEN)
    }


def expected_logprobs(plain: Path, meaning: QuantizedFiles) -> torch.Tensor:
    """Returns the log-probabilities of the oracle."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for name, weight in meaning.weights.items():
        linear = model.get_submodule(name)
        linear.weight.data.copy_(weight)
        if meaning.activations != "none":
            scale = meaning.input_scales.get(name)
            linear.register_forward_pre_hook(lambda _, args, scale=scale: rounded(args[0], meaning, scale))
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def rounded(x: torch.Tensor, meaning: QuantizedFiles, static: float | None) -> torch.Tensor:
    """Rounds inputs [1, T, K], group by group and token by token."""
    size = 128 if meaning.activations == "group" else x.shape[-1]
    largest = 448 if meaning.kind == "fp8" else 127
    parts = []
    for part in x.split(size, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / largest if static is None else torch.tensor(static)
        if meaning.kind == "fp8":
            parts.append((part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        else:
            parts.append((part / scale).round().clamp(-128, 127) * scale)
    return torch.cat(parts, -1)


def load(source: ModelSource, dtype: torch.dtype = torch.float32, shard: Shard = UNSHARDED, **options: Any) -> Decoder:
    model = source.load(256, CPU, dtype, shard, **options)
    assert isinstance(model, Decoder)
    return model


def logprobs(model: Decoder, dtype: str = "float32") -> torch.Tensor:
    """Returns the log-probabilities of the prompt, computed in two chunks."""
    spec = model.spec
    kv = KVPool(KVLayout("tiny", "0", spec.num_layers, spec.num_kv_heads, spec.head_dim, 8, dtype), 16, CPU)
    assert kv.layers()[0].kv.dtype == TORCH_DTYPES[dtype]
    backend, results = TorchAttention(kv.layers(), spec.num_heads, spec.windows, kv.dummy_block), []
    with torch.inference_mode():
        for start, end in ((0, 33), (33, len(PROMPT))):
            metadata = backend.prepare(StepShape([start], [end - start], [list(range(8))]))
            context = ForwardContext(kv.layers(), backend, metadata)
            hidden = model.forward(torch.tensor(PROMPT[start:end]), torch.arange(start, end), context)
            results.append(model.logits(hidden))
    return torch.cat(results).log_softmax(-1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_format_is_computed_as_its_files_say(kind: str, name: str, plain: dict[str, Path], tmp_path: Path) -> None:
    size = 32 if kind == "llama" else 64
    meaning = write(plain[kind], tmp_path, name, group_size=size)
    source = open_model(tmp_path)
    model = load(source)
    model.pack(keep_head=False)
    error = (logprobs(model) - expected_logprobs(plain[kind], meaning)).abs().max()
    assert error <= 1e-3
    unquantised = (logprobs(model) - logprobs(load(open_model(plain[kind])))).abs().max()
    assert unquantised > 1e-2, "the weights are those of the unquantised model"


@pytest.mark.parametrize("name", FORMATS)
def test_two_ranks_have_the_parts_of_the_whole(name: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Each product of both ranks together is that of the whole layer. Inputs of down and out are split."""
    write(plain["llama"], tmp_path, name, group_size=64)
    source = open_model(tmp_path)
    whole = load(source)
    ranks = [load(source, shard=Shard(rank, 2), all_reduce=lambda x: None) for rank in range(2)]
    for index, layer in enumerate(whole.layer_list):
        parts = [rank.layer_list[index] for rank in ranks]
        for get in (lambda x: x.attention.out, lambda x: x.mlp.down):
            torch.testing.assert_close(torch.cat([get(part).weight for part in parts], 1), get(layer).weight)
        for get in (lambda x: x.attention.qkv, lambda x: x.mlp.gate_up):
            sizes = [size // 2 for size in get(layer).parts.values()]
            pieces = zip(*(get(part).weight.split(sizes) for part in parts), strict=True)
            torch.testing.assert_close(torch.cat([row for pair in pieces for row in pair]), get(layer).weight)


def test_groups_of_a_whole_row(plain: dict[str, Path], tmp_path: Path) -> None:
    for name in ("awq", "gptq", "gptq-8"):
        meaning = write(plain["llama"], tmp_path / name, name, group_size=-1)
        found = logprobs(load(open_model(tmp_path / name)))
        assert (found - expected_logprobs(plain["llama"], meaning)).abs().max() <= 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["awq", "ct-fp8-block", "ct-int8"])
def test_compute_in_16_bits(name: str, dtype: str, plain: dict[str, Path], tmp_path: Path) -> None:
    meaning = write(plain["qwen3"], tmp_path, name)
    model = load(open_model(tmp_path), TORCH_DTYPES[dtype])
    model.pack(keep_head=False)
    error = (logprobs(model, dtype) - expected_logprobs(plain["qwen3"], meaning)).abs().mean()
    # A 16-bit rounding before the rounding of the inputs sometimes moves an input to the next number.
    assert error < {"bfloat16": 0.2, "float16": 0.12}[dtype]


@pytest.fixture
def sharded(plain: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint whose tensors are spread over three files, so that no layer is in one file."""
    from safetensors.torch import load_file, save_file

    write(plain["llama"], tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tmp_path


def test_the_tensors_of_a_layer_may_be_in_several_files(sharded: Path, plain: dict[str, Path], tmp_path: Path) -> None:
    meaning = write(plain["llama"], tmp_path / "one", "awq")
    found = logprobs(load(open_model(sharded)))
    assert (found - expected_logprobs(plain["llama"], meaning)).abs().max() <= 1e-3


def test_layers_that_the_config_leaves_out_keep_their_weights(plain: dict[str, Path], tmp_path: Path) -> None:
    def skip(layer: str) -> bool:
        return ".0.mlp." in layer or "o_proj" in layer

    changes: dict[str, dict[str, Any]] = {
        "awq": {"modules_to_not_convert": ["layers.0.mlp", "o_proj"]},
        "ct-w4": {"ignore": ["lm_head", r"re:.*\.0\.mlp\..*", "re:.*o_proj$"]},
        "gptq": {"dynamic": {r"-:.*\.0\.mlp": {}, "-:.*o_proj": {}}},
        "fp8-block": {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "o_proj"]},
        "modelopt": {"ignore": ["lm_head", "model.layers.0.mlp*", "*o_proj"]},
    }
    for name, change in changes.items():
        path = tmp_path / name
        meaning = write(plain["llama"], path, name, skip=skip)
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] |= change
        (path / "config.json").write_text(json.dumps(config))
        assert not any(skip(layer) for layer in meaning.weights)
        found = logprobs(load(open_model(path)))
        assert (found - expected_logprobs(plain["llama"], meaning)).abs().max() <= 1e-3, name
