"""The configuration of an engine, checked when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from common.kv_layout import FP8_DTYPE

PROPOSERS = ("none", "ngram", "suffix", "draft_model", "eagle")
#: Proposers with a model of their own.
MODEL_PROPOSERS = ("draft_model", "eagle")
#: Drafts and the token before them are at most the eight tokens of a row in the decode kernel.
MAX_DRAFTS = 7
#: A decode waits for 50 ms at most, with an 8B model.
GPU_CHUNK_TOKENS = 2048
#: Larger steps are fewer, and attention of long chunks is faster.
GPU_PROMPT_STEP_TOKENS = 8192
#: Bytes on a CPU, if neither num_blocks nor kv_memory is given.
DEFAULT_KV_MEMORY = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes of 0 stand for a default that depends on the device."""

    #: A directory with config.json and safetensors.
    model_dir: Path
    #: Name of the model in the KV layout; empty for the directory's name.
    name: str = ""
    #: auto, cpu, cuda or cuda:N.
    device: str = "auto"
    #: auto is float32 on a CPU and bfloat16 on CUDA.
    dtype: str = "auto"
    #: auto is dtype; fp8_e4m3 stores keys and values in 8 bits with scales.
    kv_dtype: str = "auto"
    #: Tokens of a KV block.
    block_size: int = 16
    #: Blocks of the KV pool; 0 if kv_memory decides.
    num_blocks: int = 0
    #: Bytes of the KV pool. If both are 0: 512 MiB on a CPU, the rest of gpu_memory_utilization on CUDA.
    kv_memory: int = 0
    #: Bytes of host memory for evicted blocks; 0 for no host tier.
    host_cache: int = 0
    #: Compare a checksum of each block that comes back from host memory (slow).
    checksums: bool = False
    #: Tokens of a sequence; 0 for the model's limit.
    max_model_len: int = 0
    #: Share of the GPU's memory that this process may use.
    gpu_memory_utilization: float = 0.9
    #: Tokens of a step; 0: 256 on a CPU, 2048 on CUDA.
    chunk_tokens: int = 0
    #: Tokens of a step without decodes, twice that for a single prompt; 0: chunk_tokens, or 8192 on CUDA if
    #: chunk_tokens is 0 too.
    prompt_step_tokens: int = 0
    #: Most prompt tokens of a step with decodes; 0: all that chunk_tokens leaves.
    local_chunk_tokens: int = 0
    #: Sequences that run at once; 0: 64 on a CPU, 256 on CUDA.
    max_seqs: int = 0
    #: Decode steps, and steps with few prompt tokens, run as CUDA graphs.
    cuda_graphs: bool = True
    #: Chunks that also run as CUDA graphs: 1024 or chunk_tokens tokens, alone in their step, that end within the first
    #: `chunk_graphs` tokens of a prompt; 0 for none.
    chunk_graphs: int = 0
    #: Launch a step before the result of the last one is known; None: on CUDA.
    overlap: bool | None = None
    #: One of PROPOSERS.
    speculation: str = "none"
    #: Directory of the draft model or EAGLE head. Its KV is in the same blocks, so pods must agree on it.
    speculation_model: Path | None = None
    #: Most drafts of a sequence in a step.
    speculation_tokens: int = 4
    #: coupled: the output is token for token the output without drafts. rejection: only its distribution is equal.
    speculation_accept: str = "coupled"
    #: auto, or dummy: random weights from weights_seed instead of the directory's.
    load_format: str = "auto"
    #: Seed of the random weights.
    weights_seed: int = 0
    #: CPU threads of a rank; 0 for all cores.
    threads: int = 0
    #: Devices that compute the engine together, in equal numbers on tensor_parallel_nodes machines. num_blocks,
    #: kv_memory and gpu_memory_utilization are per device.
    tensor_parallel_size: int = 1
    tensor_parallel_nodes: int = 1
    #: HOST:PORT of rank 0, for the ranks on other machines.
    tensor_parallel_master: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype {self.dtype!r} is not supported: use auto, float32 or bfloat16", field="dtype")
        if self.kv_dtype not in ("auto", "fp8_e4m3"):
            raise ConfigError(f"kv_dtype {self.kv_dtype!r} is not supported: use auto or fp8_e4m3", field="kv_dtype")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(
                f"load_format {self.load_format!r} is not supported: use auto or dummy", field="load_format"
            )
        if self.speculation not in PROPOSERS:
            proposers = ", ".join(PROPOSERS)
            raise ConfigError(
                f"speculation {self.speculation!r} is not supported: use {proposers}", field="speculation"
            )
        if (self.speculation in MODEL_PROPOSERS) != (self.speculation_model is not None):
            need = "needs" if self.speculation in MODEL_PROPOSERS else "does not use"
            raise ConfigError(f"speculation {self.speculation} {need} a speculation_model", field="speculation_model")
        if self.speculation_accept not in ("coupled", "rejection"):
            raise ConfigError(
                f"speculation_accept {self.speculation_accept!r} is not supported: use coupled or rejection",
                field="speculation_accept",
            )
        if not 1 <= self.speculation_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"speculation_tokens must be from 1 to {MAX_DRAFTS}, is {self.speculation_tokens}",
                field="speculation_tokens",
            )
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, is {self.block_size}", field="block_size")
        for name in (
            "num_blocks",
            "kv_memory",
            "host_cache",
            "max_model_len",
            "chunk_tokens",
            "prompt_step_tokens",
            "local_chunk_tokens",
            "max_seqs",
            "chunk_graphs",
            "weights_seed",
            "threads",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, is {getattr(self, name)}", field=name)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be over 0 and at most 1, is {self.gpu_memory_utilization:g}",
                field="gpu_memory_utilization",
            )
        if self.num_blocks and self.kv_memory:
            raise ConfigError("num_blocks and kv_memory exclude each other", field="num_blocks")
        self._check_parallel()

    def _check_parallel(self) -> None:
        size, nodes = self.tensor_parallel_size, self.tensor_parallel_nodes
        if size < 1:
            raise ConfigError(f"tensor_parallel_size must be at least 1, is {size}", field="tensor_parallel_size")
        if nodes < 1 or size % nodes:
            raise ConfigError(
                f"tensor_parallel_nodes {nodes} does not divide tensor_parallel_size {size}",
                field="tensor_parallel_nodes",
            )
        if nodes > 1 and self.tensor_parallel_master is None:
            raise ConfigError(
                f"tensor_parallel_master: {nodes} nodes need the address of rank 0",
                field="tensor_parallel_master",
            )
        if size == 1:
            return
        for name, asked, why in (
            ("speculation", self.speculation in MODEL_PROPOSERS, "a draft model runs on one device"),
            ("host_cache", self.host_cache > 0, "each rank has its own part of a block"),
            ("checksums", self.checksums, "each rank sees only its own part of a block"),
        ):
            if asked:
                raise ConfigError(
                    f"{name} {getattr(self, name)} cannot be combined with tensor_parallel_size {size}: {why}",
                    field=name,
                )

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
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"{self.device!r} is not a device", field="device") from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is not supported: use auto, cpu or cuda", field="device")
        if device.type == "cpu":
            return device
        index = device.index or 0  # None for `cuda`
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device {self.device!r} does not exist on this machine", field="device")
        return torch.device("cuda", index)

    def resolve_dtype(self, device: torch.device) -> str:
        """Returns the dtype of the model: float32 or bfloat16."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device.type == "cuda" else "float32"

    def resolve_kv_dtype(self, device: torch.device) -> str:
        """Returns the dtype of the KV layout, the model's or float8_e4m3. ConfigError if the GPU cannot convert it."""
        if self.kv_dtype == "auto":
            return self.resolve_dtype(device)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"kv_dtype fp8_e4m3 needs compute capability 8.9, {name} has less", field="kv_dtype")
        return FP8_DTYPE

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
        bounds = {
            "max_seqs": True,
            "chunk_graphs": self.chunk_graphs > 0,
            "speculation_tokens": self.speculation != "none",
        }
        options = (*beside, *(name for name, counts in bounds.items() if counts))
        return f"lower {' or '.join(options)}, or do without cuda_graphs"

    def resolve_overlap(self, device: torch.device) -> bool:
        """Returns whether steps overlap.

        On a CPU a launch returns when the step has ended, so overlap only delays the result.
        """
        return device.type == "cuda" if self.overlap is None else self.overlap
