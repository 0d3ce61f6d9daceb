"""Models and measuring points of the engine benchmarks, and the goals on one H100."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class BenchmarkShape:
    """A model and its measuring points."""

    #: config.json
    config: dict[str, Any]
    #: (rows, context) of the decode points.
    decode: tuple[tuple[int, int], ...]
    #: Prompt lengths for the time to first token.
    ttft: tuple[int, ...]
    #: Lengths of prompts that a prefill pod hands off.
    handed: tuple[int, ...]
    #: Requests, prompt length and output length of the offline throughput.
    offline: tuple[int, int, int]
    #: Tokens of a step that also decodes.
    chunk_tokens: int
    block_size: int
    #: Decode steps that are measured.
    steps: int
    #: Repeats of the other measurements.
    repeats: int
    #: Size of the copy that measures the bandwidth.
    copy_bytes: int


SHAPES = {
    "llama-3.1-8b": BenchmarkShape(
        config=LLAMA
        | {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "torch_dtype": "bfloat16",
        },
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
    "tiny": BenchmarkShape(
        config=LLAMA
        | {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "torch_dtype": "float32",
        },
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


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a metric on an H100 80GB HBM3."""

    #: Must hold.
    bar: float
    #: Is wanted.
    aim: float
    #: Result of vLLM 0.25.1 on the same card.
    vllm: float


GOALS = {
    "decode_ms_1x128": Goal(5.8, 5.3, 6.46),
    "decode_ms_16x1024": Goal(6.9, 6.3, 7.48),
    "decode_ms_64x1024": Goal(9.4, 8.8, 10.07),
    "decode_ms_64x2048": Goal(12.2, 11.8, 12.76),
    "decode_ms_128x1024": Goal(12.9, 12.2, 13.70),
    "ttft_ms_1024": Goal(27, 25, 30.8),
    "ttft_ms_2048": Goal(49, 46, 53.7),
    "ttft_ms_4096": Goal(98, 93, 105.8),
    "ttft_ms_8192": Goal(206, 198, 218.5),
    "ttft_ms_15000": Goal(416, 400, 426.9),
    "offline_out_tok_s": Goal(5800, 6200, 5580),
}
HOST_WAIT_BAR_MS, SAMPLING_BAR = 0.1, 1.03
