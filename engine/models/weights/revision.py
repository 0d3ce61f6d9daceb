"""The revision of a model: a hash of its configuration and weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from engine.models.base import ModelShape
from engine.models.weights.files import read_pickled, weight_files

_SAMPLES, _SAMPLE_BYTES = 16, 256  # The revision hashes this many samples of each tensor, of this size.


def digest(text: str) -> str:
    """Hashes a text to 16 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def weights_revision(spec: ModelShape, model_dir: Path) -> str:
    """Returns 16 hex digits that identify the configuration and the weights of a checkpoint.

    Hashes the spec, the header of every file (names, shapes, dtypes) and samples of every tensor. A fine-tune changes
    the samples; a copy of the directory does not. Reads a few MB for a model of any size.
    """
    content = hashlib.blake2b(repr(spec).encode(), digest_size=8)
    for path in weight_files(model_dir):
        if path.suffix == ".bin":
            for name, tensor in sorted(read_pickled(path).items()):
                content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                numbers = tensor.contiguous().flatten().view(torch.uint8)
                for offset in range(0, len(numbers), max(len(numbers) // _SAMPLES, 1)):
                    content.update(numbers[offset : offset + _SAMPLE_BYTES].numpy().tobytes())
            continue
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > size:
                raise ConfigError(f"{path} is not a safetensors file", field="model")
            header_bytes = file.read(header_size)
            content.update(header_bytes)
            try:
                header: dict[str, Any] = json.loads(header_bytes)
                offsets = [header[name]["data_offsets"] for name in sorted(header.keys() - {"__metadata__"})]
                spans = [(int(begin), int(end)) for begin, end in offsets]
            except (ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise ConfigError(f"{path} is not a safetensors file", field="model") from error
            complete = 8 + header_size + max((end for _, end in spans), default=0)
            if complete > size:
                raise ConfigError(f"{path} has {size} of its {complete} bytes", field="model")
            for begin, end in spans:
                step = max((end - begin) // _SAMPLES, 1)
                for offset in range(begin, end, step):
                    file.seek(8 + header_size + offset)
                    content.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return content.hexdigest()
