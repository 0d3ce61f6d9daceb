"""Models and measuring points of the engine benchmarks."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def llama(
    vocab: int, hidden: int, inner: int, *, layers: int, heads: int, kv_heads: int, context: int, **more: object
) -> dict[str, Any]:
    """Returns the config.json of a Llama. inner: intermediate size. more: further keys."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        **more,
    }


@contextmanager
def config_directory(config: dict[str, Any]) -> Iterator[Path]:
    """Makes a model directory for the block. It has no weights: engines make random ones (load_format "dummy")."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        yield Path(directory)


@dataclass(frozen=True, slots=True)
class BenchmarkShape:
    config: dict[str, Any]  # config.json
    decode: tuple[tuple[int, int], ...]  # (rows, context) of the decode points.
    ttft: tuple[int, ...]  # Prompt lengths for the time to first token.
    handed: tuple[int, ...]  # Lengths of prompts that a prefill pod hands off.
    offline: tuple[int, int, int]  # Requests, prompt length and output length of the offline throughput.
    chunk_tokens: int  # Tokens of a step that also decodes.
    block_size: int
    steps: int  # Decode steps that are measured.
    repeats: int  # Repeats of the other measurements.
    copy_bytes: int  # Size of the copy that measures the bandwidth.


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_8B = llama(128256, 4096, 14336, layers=32, heads=32, kv_heads=8, context=131072, head_dim=128) | {
    "rope_theta": 500000.0,
    "rope_scaling": ROPE | {"original_max_position_embeddings": 8192},
    "torch_dtype": "bfloat16",
}
#: 24 layers, the last 12 with a window of 1,024 tokens.
WINDOWED: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "use_sliding_window": True,
    "sliding_window": 1024,
    "max_window_layers": 12,
}
QWEN3_30B_A3B: dict[str, Any] = llama(
    151936, 2048, 6144, layers=48, heads=32, kv_heads=4, context=40960, head_dim=128
) | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B: dict[str, Any] = llama(
    201088, 2880, 2880, layers=24, heads=64, kv_heads=8, context=131072, head_dim=64
) | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    | {"original_max_position_embeddings": 4096},
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | llama(128256, 8192, 28672, layers=80, heads=64, kv_heads=8, context=131072, head_dim=128)
#: quantization_config of formats that need no `--weights`; with load_format "dummy" the random weights are quantised.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
SHAPES = {
    "llama-3.1-8b": BenchmarkShape(
        config=LLAMA_8B,
        decode=((1, 128), (16, 1024), (64, 1024), (64, 2048), (128, 1024)),
        ttft=(128, 512, 1024, 2048, 4096, 8192, 15000),
        handed=(2048, 4096, 8192),
        offline=(256, 1024, 256),
        chunk_tokens=2048,
        block_size=16,
        steps=64,
        repeats=7,
        copy_bytes=4 << 30,
    ),
    "qwen3-30b-a3b": BenchmarkShape(
        config=QWEN3_30B_A3B,
        decode=((1, 128), (64, 1024)),
        ttft=(1024, 8192),
        handed=(2048,),
        offline=(256, 1024, 256),
        chunk_tokens=2048,
        block_size=16,
        steps=64,
        repeats=5,
        copy_bytes=4 << 30,
    ),
    "gpt-oss-20b": BenchmarkShape(
        config=GPT_OSS_20B,
        decode=((1, 128), (64, 1024)),
        ttft=(1000, 8192),
        handed=(2048,),
        offline=(640, 1000, 1000),
        chunk_tokens=2048,
        block_size=16,
        steps=64,
        repeats=5,
        copy_bytes=4 << 30,
    ),
    "llama-3.1-70b": BenchmarkShape(
        config=LLAMA_70B,
        decode=((1, 128), (16, 1024)),
        ttft=(2048,),
        handed=(2048,),
        offline=(64, 1024, 256),
        chunk_tokens=2048,
        block_size=16,
        steps=64,
        repeats=3,
        copy_bytes=4 << 30,
    ),
    "tiny": BenchmarkShape(
        config=llama(256, 64, 128, layers=2, heads=4, kv_heads=2, context=1024, torch_dtype="float32"),
        decode=((1, 64), (4, 96)),
        ttft=(20, 50),
        handed=(300,),
        offline=(6, 20, 8),
        chunk_tokens=64,
        block_size=4,
        steps=8,
        repeats=2,
        copy_bytes=16 << 20,
    ),
}

#: Layers to drop from SmolLM2. The draft is about as slow as the target, so it measures acceptance only.
SMOLLM2_LAYERS = (12, 18)


def without_layers(source: Path, directory: Path, dropped: tuple[int, ...]) -> Path:
    """Writes a draft model to `directory`: the model of `source` without the layers `dropped`.

    It agrees with the target on about two of three tokens. `source` must have one safetensors file with Llama's tensor
    names.
    """
    directory.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    layers = [i for i in range(config["num_hidden_layers"]) if i not in dropped]
    config["num_hidden_layers"] = len(layers)
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", directory)
    kept: dict[str, Tensor] = {}
    with safe_open(source / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            parts = name.split(".")
            if parts[1] == "layers":
                if int(parts[2]) in dropped:
                    continue
                parts[2] = str(layers.index(int(parts[2])))
            kept[".".join(parts)] = file.get_tensor(name)
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
