"""What an engine needs to know to start; checked when made, so that a bad value never reaches a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from common.kv_layout import FP8_DTYPE

DEFAULT_KV_MEMORY = 512 << 20  # bytes; where neither num_blocks nor kv_memory is given and the device is a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine on one device.

    name: the model's name in the KV layout; empty for the directory's. dtype auto is float32 on a CPU and bfloat16 on
    CUDA. kv_dtype auto is dtype; fp8_e4m3 keeps keys and values in 8 bits, with scales. num_blocks and kv_memory
    (bytes) both 0: 512 MiB on a CPU, 90% of what the weights leave on CUDA. max_model_len 0: the model's own.
    token_budget: tokens of a step, and the longest chunk. threads 0: all cores.
    """

    model_dir: Path
    name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int = 0
    kv_memory: int = 0
    max_model_len: int = 0
    token_budget: int = 256
    max_seqs: int = 64
    threads: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype {self.dtype!r} is not served: auto, float32 or bfloat16", field="dtype")
        if self.kv_dtype not in ("auto", "fp8_e4m3"):
            raise ConfigError(f"kv_dtype {self.kv_dtype!r} is not served: auto or fp8_e4m3", field="kv_dtype")
        for name, low in (("block_size", 1), ("token_budget", 1), ("max_seqs", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, is {getattr(self, name)}", field=name)
        for name in ("num_blocks", "kv_memory", "max_model_len", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, is {getattr(self, name)}", field=name)
        if self.num_blocks and self.kv_memory:
            raise ConfigError("num_blocks and kv_memory exclude each other", field="num_blocks")

    def resolve_device(self) -> torch.device:
        """The torch device; ConfigError when it is not there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"{self.device!r} is not a device", field="device") from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is not served: auto, cpu or cuda", field="device")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device {self.device!r} does not exist here", field="device")
        return device

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
