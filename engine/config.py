"""The configuration of an engine, checked when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from common.kv_layout import FP8_DTYPE
from common.settings import kinds
from common.settings.engine import PodEngineSettings
from common.settings.table import setting

GPU_CHUNK_TOKENS = 2048  # A decode waits for 50 ms at most, with an 8B model.
GPU_PROMPT_STEP_TOKENS = 8192  # Larger steps are fewer, and attention of long chunks is faster.
LATENT_FP8 = "kv_dtype fp8_e4m3 is not supported for models with latent attention (MLA): use auto"
DEFAULT_KV_MEMORY = 512 << 20  # Bytes on a CPU, if neither num_blocks nor kv_memory is given.


@dataclass(frozen=True, kw_only=True)
class EngineConfig(PodEngineSettings):
    """A pod's settings of its engine, and some more. Sizes of 0 stand for a default that depends on the device.

    num_blocks, kv_memory and gpu_memory_utilization are per device.
    """

    model_dir: Path  # A directory with config.json and safetensors.
    name: str = ""  # Name of the model in the KV layout; empty for the directory's name.
    num_blocks: int = setting(kinds.integer(0), 0, "Blocks of the KV pool; 0 if kv_memory decides")
    prompt_step_tokens: int = setting(
        kinds.TOKEN_COUNT,
        0,
        "Tokens of a step without decodes, twice that for a single prompt; 0: chunk_tokens, or 8192 on CUDA if "
        "chunk_tokens is 0 too",
        was=("prompt_budget",),
    )
    recurrent_states: bool = True  # Models with recurrent states may run.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks and self.kv_memory:
            raise ConfigError("num_blocks and kv_memory exclude each other", field="num_blocks")
        if self.max_adapters and self.deterministic:
            problem = "products with adapters have no fixed order of sums: leave it off"
            raise ConfigError(f"deterministic: {problem}", field="deterministic")

    @property
    def local_ranks(self) -> int:
        """Ranks on each machine."""
        return self.tensor_parallel_size // self.tensor_parallel_nodes

    @property
    def threads_per_rank(self) -> int:
        """CPU threads of a rank: `threads`, or its share of the cores."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.local_ranks)

    def resolve_device(self) -> torch.device:
        """Returns the torch device; `cuda` is GPU 0. ConfigError if the device does not exist."""
        if self.device == "auto":
            return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        device = torch.device(self.device)
        if device.type == "cpu":
            return device
        index = device.index or 0  # None for `cuda`
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device {self.device!r} does not exist on this machine", field="device")
        return torch.device("cuda", index)

    def resolve_dtype(self, device: torch.device) -> str:
        """Returns the dtype of the model: float32, bfloat16 or float16."""
        if self.dtype != "auto":
            return self.dtype
        if device.type != "cuda":
            return "float32"
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"

    def resolve_kv_dtype(self, device: torch.device, *, latent: bool) -> str:
        """Returns the dtype of the KV layout, the model's or float8_e4m3.

        ConfigError if the GPU cannot convert float8_e4m3, or if the model has latent attention (`latent`).
        """
        if self.kv_dtype == "auto":
            return self.resolve_dtype(device)
        if latent:
            raise ConfigError(LATENT_FP8, field="kv_dtype")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"kv_dtype fp8_e4m3 needs compute capability 8.9, {name} has less", field="kv_dtype")
        return FP8_DTYPE

    def resolve_kv_order(self, num_kv_heads: int) -> str:
        """Returns the order of the KV layout. A single head, which latents are too, has one order only."""
        wanted = "heads" if self.tensor_parallel_size > 1 else "layers"
        return "layers" if num_kv_heads == 1 else wanted if self.kv_order == "auto" else self.kv_order

    def resolve_limits(self, device: torch.device) -> tuple[int, int | None, int]:
        """Returns chunk_tokens, prompt_step_tokens and max_seqs, with the defaults of the device."""
        on_gpu = device.type == "cuda"
        default = GPU_PROMPT_STEP_TOKENS if on_gpu and not self.chunk_tokens else None
        budget = self.chunk_tokens or (GPU_CHUNK_TOKENS if on_gpu else 256)
        return budget, self.prompt_step_tokens or default, self.max_seqs or (256 if on_gpu else 64)

    @property
    def kv_pool_setting(self) -> str:
        """The setting that decides the size of the KV pool."""
        if self.num_blocks:
            return "num_blocks"
        return "kv_memory" if self.kv_memory else "gpu_memory_utilization"

    def cuda_graph_advice(self, *beside: str) -> str:
        """Returns a remedy for CUDA graphs without memory: it names `beside` and the settings that bound the graphs."""
        options = (*beside, "max_seqs", *(["speculation_tokens"] if self.speculation != "none" else []))
        return f"lower {' or '.join(options)}, or do without cuda_graphs"

    def resolve_overlap(self, device: torch.device) -> bool:
        """Returns whether steps overlap. On a CPU, where a launch waits for its step, overlap only delays."""
        return device.type == "cuda" if self.overlap is None else self.overlap
