"""Settings of an engine: memory, batches, attention, and speculation. See table.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.errors import ConfigError
from common.settings import kinds
from common.settings.table import Settings, choice_setting, optional_setting, setting, setting_error

MODEL_PROPOSERS = ("draft_model", "eagle")  #: Proposers with a model of their own.
MAX_DRAFTS = 7  #: Drafts and the token before them are at most the eight tokens of a row in the decode kernel.


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings, section="Engine"):
    """Settings of an engine that `baton up` has too."""

    device: str = setting(kinds.DEVICE, "auto", "auto, cpu, cuda or cuda:N")
    dtype: str = choice_setting(
        ("auto", "float32", "bfloat16", "float16"),
        "float32, bfloat16, float16, or auto: float32 on a CPU, bfloat16 on a GPU (float16 before Ampere)",
    )
    kv_dtype: str = choice_setting(
        ("auto", "fp8_e4m3"), "KV in dtype (auto) or in 8 bits with scales (fp8_e4m3), the same on all pods"
    )
    weights: str = choice_setting(
        ("auto", "fp8", "int8"),
        "Weights of the layers as in the checkpoint (auto), or quantised while they load: fp8, or int8 (inputs stay)",
    )
    load_format: str = choice_setting(("auto", "dummy"), "auto, or dummy: random weights, needs only config.json")
    weights_seed: int = setting(kinds.integer(0, (1 << 31) - 1), 0, "Seed of --load-format dummy; default: 0")
    threads: int = setting(kinds.integer(0, 1024), 0, "CPU threads of a pod; default: automatic")
    block_size: int = setting(kinds.integer(1, 256), 16, "Tokens per KV block")
    kv_memory: int = setting(
        kinds.size(0),
        0,
        "KV pool of each device, like 2GiB; default: 512M on a CPU, the rest of --gpu-memory-utilization on a GPU",
        also=("kv_cache_memory_bytes",),
    )
    gpu_memory_utilization: float = setting(kinds.GPU_SHARE, 0.9, "Share of the GPU's memory for this pod")
    kv_order: str = choice_setting(
        ("auto", "layers", "heads"),
        "Order of a block's KV: heads lets pods with other numbers of ranks take part; auto: heads with several ranks",
    )
    prefix_cache: bool = setting(kinds.BOOL, True, "Keep the KV of prompts and answers for later requests")
    cache_policy: str = choice_setting(
        ("lru", "gdsf", "s3fifo"),
        "Which cached block is evicted first: the least recently used (lru), or by frequency too (gdsf, s3fifo)",
    )
    disk_cache: str | None = optional_setting(
        kinds.text("a directory", r".+", "DIR"),
        "Directory on a local NVMe disk for KV blocks that leave the host tier, kept over restarts; needs host_cache; "
        "default: none",
    )
    disk_cache_size: int = setting(kinds.size(0), 64 << 30, "Bytes of each pod in --disk-cache, like 500GiB")
    shared_cache: str | None = optional_setting(
        kinds.text("a directory", r".+", "DIR"),
        "Directory on a file system that all pods mount, for KV blocks that each of them may read; needs host_cache; "
        "default: none",
    )
    shared_cache_size: int = setting(
        kinds.size(0), 256 << 30, "Bytes of all pods in --shared-cache, the same on all pods"
    )
    disk_cache_codec: str = choice_setting(
        ("none", "int4"),
        "Blocks in --disk-cache and --shared-cache as they are (none), or in 4 bits (int4): answers after a read may "
        "differ; the same on all pods",
    )
    cache_pin: int = setting(kinds.size(0), 0, "KV bytes that requests may pin in each pool, like 4GiB; default: 0")
    cache_pin_tenant: int = setting(
        kinds.size(0), 0, "KV bytes of --cache-pin that the requests of one tenant may pin; default: all of them"
    )
    kv_groups: bool = setting(
        kinds.BOOL,
        False,
        "Free the KV of layers with a window when it leaves the window, if the model has other layers too, and serve "
        "models with recurrent states; the same on all pods",
    )
    num_states: int = setting(
        kinds.integer(0),
        0,
        "Slots for the recurrent states of a hybrid model: one for each running sequence, the others for snapshots; "
        "default: four for each sequence of max_seqs, within a third of the memory",
    )
    snapshot_blocks: int = setting(
        kinds.integer(1), 128, "Blocks of a prompt from one snapshot of a hybrid model's recurrent state to the next"
    )
    max_model_len: int = setting(
        kinds.integer(0, 1 << 24), 0, "Longest prompt plus output, in tokens; default: the model's"
    )
    chunk_tokens: int = setting(
        kinds.TOKEN_COUNT,
        0,
        "Max tokens of a step and of a prompt chunk; default: 256 on a CPU, 2048 on a GPU (8192 without decodes, 16384 "
        "for a lone prompt)",
        was=("token_budget",),
        also=("max_num_batched_tokens",),
    )
    max_seqs: int = setting(
        kinds.integer(0, 65536),
        0,
        "Max sequences of a pod at once; default: 64 on a CPU, 256 on a GPU",
        also=("max_num_seqs",),
    )
    pooling: str = choice_setting(
        ("auto", "last", "mean", "cls"),
        "Pooling of embeddings: last token, mean, first token (cls), or auto: as in the model's files, else last",
    )
    tensor_parallel_size: int = setting(
        kinds.RANK_COUNT, 1, "Ranks of a pod: GPUs, or processes on a CPU, that compute the model together"
    )
    expert_parallel: bool = setting(
        kinds.BOOL,
        False,
        "Give each rank whole experts of a mixture of experts; default: a part of each expert, if their size allows it",
        also=("enable_expert_parallel",),
    )
    max_adapters: int = setting(
        kinds.integer(0, 1024),
        0,
        "LoRA adapters on the device at once; default: 8 with --adapter-dir, else none",
        also=("max_loras",),
    )
    max_adapter_rank: int = setting(
        kinds.integer(1, 256), 16, "Largest rank of a LoRA adapter", also=("max_lora_rank",)
    )
    fuse_adapters: bool = setting(
        kinds.BOOL,
        False,
        "Let products of one row, and of gate and up of a prompt, add the change by a LoRA adapter themselves; on one "
        "GPU, not measured yet",
    )
    deterministic: bool = setting(
        kinds.BOOL,
        False,
        "Compute each token in one order of sums, so that its bits do not depend on batch, chunks, cache hits, "
        "preemption, hand-off or drafts; the same on all pods",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.chunk_tokens < self.block_size:
            problem = f"{self.chunk_tokens} is less than one block (block_size {self.block_size})"
            raise setting_error("chunk_tokens", problem)
        if not self.prefix_cache and getattr(self, "host_cache", None):
            raise setting_error("host_cache", "not used: it keeps blocks of the prefix cache, which is off")


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings(Settings, section="Speculation"):
    """Speculative decoding in engines, pods and stacks."""

    speculation: str = choice_setting(
        ("none", "ngram", "suffix", *MODEL_PROPOSERS), "Proposer of drafts: none, ngram, suffix, draft_model or eagle"
    )
    speculation_model: str | Path | None = optional_setting(  # noqa: RUF009
        kinds.MODEL_PATH, "Directory of the draft model or EAGLE head, the same on all pods; default: none"
    )
    speculation_tokens: int = setting(kinds.integer(1, MAX_DRAFTS), 4, "Max drafts per sequence and step")
    speculation_accept: str = choice_setting(
        ("coupled", "rejection"),
        "How drafts are accepted: coupled (the same answers as without) or rejection (the same distribution)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.speculation in MODEL_PROPOSERS) != (self.speculation_model is not None):
            problem = "missing: expected a directory, needed" if self.speculation_model is None else "not used"
            raise setting_error("speculation_model", f"{problem} by speculation {self.speculation}")


@dataclass(frozen=True, kw_only=True)
class PodEngineSettings(EngineSettings, SpeculationSettings):
    """Settings of an engine that only a single pod has."""

    removed: ClassVar = {"chunk_graphs": "steps of up to 1024 tokens are always CUDA graphs, longer ones never"}

    host_cache: int = setting(
        kinds.size(0), 0, "Host memory of each rank for KV blocks that the pool evicts, like 32GiB; default: 0"
    )
    cuda_graphs: bool = setting(
        kinds.BOOL, True, "Run decode steps, and steps of up to 1024 tokens, as CUDA graphs, captured at the start"
    )
    overlap: bool | None = optional_setting(kinds.BOOL, "Launch a step before the previous one ends; default: on a GPU")
    local_chunk_tokens: int = setting(
        kinds.TOKEN_COUNT,
        0,
        "Max tokens of a local prefill in one step that decodes; default: 64 on a CPU, 256 on a GPU",
        was=("mixed_tokens",),
    )
    checksums: bool = setting(
        kinds.BOOL, False, "Compare checksums of all blocks that move to a pod, or to host memory and back (slow)"
    )
    tensor_parallel_reduce: str = choice_setting(
        ("nccl", "one_shot"),
        "Sums of short vectors over the ranks' GPUs: by NCCL, or by a kernel over peer memory (one_shot, not measured)",
    )
    tensor_parallel_graphs: bool = setting(
        kinds.BOOL, False, "Run decode steps and short prompts of several GPUs from CUDA graphs (not measured)"
    )
    tensor_parallel_nodes: int = setting(
        kinds.RANK_COUNT, 1, "Machines of the pod, with equally many ranks", per_process=True
    )
    tensor_parallel_master: str | None = optional_setting(
        kinds.ADDRESS,
        "Address on this machine for `baton worker` of the other machines; default: none",
        per_process=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        size, nodes = self.tensor_parallel_size, self.tensor_parallel_nodes
        require_equal_ranks(size, nodes)
        if nodes > 1 and self.tensor_parallel_master is None:
            raise setting_error("tensor_parallel_master", f"{nodes} nodes need the address of rank 0")
        self._check_deterministic()
        for name, directory in (("disk_cache", self.disk_cache), ("shared_cache", self.shared_cache)):
            if directory is not None and size > 1:
                problem = f"{name} {directory} cannot be combined with tensor_parallel_size {size}"
                raise ConfigError(f"{problem}: each rank has its own part of a block", field=name)
            if directory is not None and not self.host_cache:
                raise setting_error(name, "needs host_cache: blocks go to files by way of host memory")
        if self.shared_cache is not None and self.shared_cache == self.disk_cache:
            raise setting_error("shared_cache", f"needs another directory than disk_cache {self.disk_cache}")

    def _check_deterministic(self) -> None:
        """Raises ConfigError for settings with which bits would depend on the batch, or are not proven."""
        rejects = self.speculation != "none" and self.speculation_accept == "rejection"
        for name, asked, why in (
            ("kv_dtype", self.kv_dtype != "auto", "its attention has no fixed order of sums"),
            ("disk_cache_codec", self.disk_cache_codec != "none", "a decoded block differs from the computed one"),
            ("weights", self.weights != "auto", "its product has no fixed order of sums"),
            ("tensor_parallel_size", self.tensor_parallel_size > 1, "an all-reduce has no fixed order of sums"),
            ("speculation_accept", rejects, "the accepted tokens depend on the drafts"),
        ):
            if self.deterministic and asked:
                problem = f"{name} {getattr(self, name)} cannot be combined with deterministic: {why}"
                raise ConfigError(problem, field=name)


def require_equal_ranks(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise setting_error("tensor_parallel_nodes", f"{nodes} does not divide tensor_parallel_size {ranks}")
