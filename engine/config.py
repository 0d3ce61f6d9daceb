"""What an engine needs to know to start; checked when made, so that a bad value never reaches a tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from common.kv_layout import FP8_DTYPE

PROPOSERS = ("none", "ngram", "suffix", "draft_model", "eagle")
MODEL_PROPOSERS = ("draft_model", "eagle")  # of these, those that have a model
MAX_DRAFTS = 7  # with the token before them as many as a row of the decode kernel has
GPU_CHUNK_TOKENS = 2048  # rows that decode wait for 50 ms of an 8B model at most
GPU_PROMPT_STEP_TOKENS = 8192  # attention of long chunks is faster, and there are fewer steps
DEFAULT_KV_MEMORY = 512 << 20  # bytes; where neither num_blocks nor kv_memory is given and the device is a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine on one device.

    name: the model's name in the KV layout; empty for the directory's. dtype auto is float32 on a CPU and bfloat16 on
    CUDA. kv_dtype auto is dtype; fp8_e4m3 keeps keys and values in 8 bits, with scales. num_blocks and kv_memory
    (bytes) both 0: 512 MiB on a CPU; on CUDA what is left of gpu_memory_utilization, the share of the card that this
    process may take. host_cache: bytes of host memory for blocks that leave the pool; 0: they are lost. checksums: they
    are compared when they come back (slow). max_model_len 0: the model's own. chunk_tokens: tokens of a step, and the
    longest chunk; 0: 256 on a CPU, 2048 on CUDA. prompt_step_tokens: the same for a step in which nothing decodes, and twice
    that for a prompt that is alone; 0: 8192 on CUDA, and none of its own where chunk_tokens is given and on a CPU.
    local_chunk_tokens: most prompt tokens of a step in which something decodes; 0: what chunk_tokens leaves. max_seqs:
    sequences that run at once; 0: 64 on a CPU, 256 on CUDA. cuda_graphs: decode steps run as graphs, captured at the
    start (no meaning on a CPU), and so do steps with few prompt tokens; chunk_graphs: so do chunks of 1024 tokens, or
    of chunk_tokens, that are alone in their step and end within the first so many of a prompt; 0: none. overlap: a step
    is launched before the last one's result is known; None: on CUDA. speculation: who proposes drafts, see
    engine/speculation; speculation_model: the draft model, or the EAGLE head, of those that have one; its KV lies in
    the same blocks, so pods that hand over must agree. speculation_tokens: most drafts of a sequence in a step;
    speculation_accept coupled: the output is the same as without, rejection: its distribution is. load_format dummy:
    random weights of weights_seed instead of the directories'. threads 0: all cores. tensor_parallel_size: devices that
    compute this engine together (engine/parallel), in equal numbers on tensor_parallel_nodes machines; ranks of other
    machines come to tensor_parallel_master, HOST:PORT of this one. num_blocks, kv_memory and gpu_memory_utilization are
    of each.
    """

    model_dir: Path
    name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int = 0
    kv_memory: int = 0
    host_cache: int = 0
    checksums: bool = False
    max_model_len: int = 0
    gpu_memory_utilization: float = 0.9
    chunk_tokens: int = 0
    prompt_step_tokens: int = 0
    local_chunk_tokens: int = 0
    max_seqs: int = 0
    cuda_graphs: bool = True
    chunk_graphs: int = 0
    overlap: bool | None = None
    speculation: str = "none"
    speculation_model: Path | None = None
    speculation_tokens: int = 4
    speculation_accept: str = "coupled"
    load_format: str = "auto"
    weights_seed: int = 0
    threads: int = 0
    tensor_parallel_size: int = 1
    tensor_parallel_nodes: int = 1
    tensor_parallel_master: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype {self.dtype!r} is not served: auto, float32 or bfloat16", field="dtype")
        if self.kv_dtype not in ("auto", "fp8_e4m3"):
            raise ConfigError(f"kv_dtype {self.kv_dtype!r} is not served: auto or fp8_e4m3", field="kv_dtype")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format {self.load_format!r} is not served: auto or dummy", field="load_format")
        if self.speculation not in PROPOSERS:
            known = ", ".join(PROPOSERS)
            raise ConfigError(f"speculation {self.speculation!r} is not served: {known}", field="speculation")
        if (self.speculation in MODEL_PROPOSERS) != (self.speculation_model is not None):
            need = "needs" if self.speculation in MODEL_PROPOSERS else "has no use for"
            raise ConfigError(f"speculation {self.speculation} {need} a speculation_model", field="speculation_model")
        if self.speculation_accept not in ("coupled", "rejection"):
            raise ConfigError(
                f"speculation_accept {self.speculation_accept!r} is not served: coupled or rejection",
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
                f"tensor_parallel_master: {nodes} nodes need the address where they meet",
                field="tensor_parallel_master",
            )
        if size == 1:
            return
        for name, asked, why in (
            ("speculation", self.speculation in MODEL_PROPOSERS, "a draft model is computed by one device"),
            ("host_cache", self.host_cache > 0, "blocks are kept on their devices"),
            ("checksums", self.checksums, "one rank sees its own part of a block only"),
        ):
            if asked:
                raise ConfigError(
                    f"{name} {getattr(self, name)} does not go with tensor_parallel_size {size}: {why}", field=name
                )

    @property
    def local_ranks(self) -> int:
        """Ranks of this engine on each machine."""
        return self.tensor_parallel_size // self.tensor_parallel_nodes

    @property
    def threads_per_rank(self) -> int:
        """CPU threads: its share of the cores, unless `threads` says how many."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.local_ranks)

    def resolve_device(self) -> torch.device:
        """The torch device, a GPU with its index: `cuda` is the first visible one. ConfigError when there is none."""
        if self.device == "auto":
            return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"{self.device!r} is not a device", field="device") from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is not served: auto, cpu or cuda", field="device")
        if device.type == "cpu":
            return device
        index = device.index or 0  # none where only `cuda` was said
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device {self.device!r} does not exist here", field="device")
        return torch.device("cuda", index)

    def resolve_dtype(self, device: torch.device) -> str:
        """float32 or bfloat16."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device.type == "cuda" else "float32"

    def resolve_kv_dtype(self, device: torch.device) -> str:
        """dtype of the KV layout: the model's, or float8_e4m3. ConfigError when the device has no e4m3 conversion."""
        if self.kv_dtype == "auto":
            return self.resolve_dtype(device)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"kv_dtype fp8_e4m3 needs compute capability 8.9, {name} has less", field="kv_dtype")
        return FP8_DTYPE

    def resolve_limits(self, device: torch.device) -> tuple[int, int | None, int]:
        """chunk_tokens, prompt_step_tokens and max_seqs."""
        on_gpu = device.type == "cuda"
        default = GPU_PROMPT_STEP_TOKENS if on_gpu and not self.chunk_tokens else None
        budget = self.chunk_tokens or (GPU_CHUNK_TOKENS if on_gpu else 256)
        return budget, self.prompt_step_tokens or default, self.max_seqs or (256 if on_gpu else 64)

    @property
    def kv_pool_setting(self) -> str:
        """Which one says how much memory the KV pool takes."""
        if self.num_blocks:
            return "num_blocks"
        return "kv_memory" if self.kv_memory else "gpu_memory_utilization"

    def cuda_graph_advice(self, *beside: str) -> str:
        """What to change where CUDA graphs find no memory: these options, and those that bound the graphs."""
        bounds = {
            "max_seqs": True,
            "chunk_graphs": self.chunk_graphs > 0,
            "speculation_tokens": self.speculation != "none",
        }
        options = (*beside, *(name for name, counts in bounds.items() if counts))
        return f"lower {' or '.join(options)}, or do without cuda_graphs"

    def resolve_overlap(self, device: torch.device) -> bool:
        """A launch on a CPU returns when the step is over: to go ahead would only delay its result."""
        return device.type == "cuda" if self.overlap is None else self.overlap
