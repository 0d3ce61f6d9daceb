"""The files of a checkpoint: safetensors (one file, or several with an index), else .bin files.

.bin files are read in the same way, by torch.load(weights_only=True), which runs no code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ConfigError, describe
from common.model.hub import WEIGHTS
from engine.models.spec.text_tower import TextTensors
from engine.progress import Progress

_log = logging.getLogger(__name__)


def weight_files(model_dir: Path) -> list[Path]:
    """Returns the checkpoint's files in a stable order: safetensors, or .bin files if there are none."""
    for single, index in ((model_dir / one, model_dir / several) for one, several in WEIGHTS):
        if single.is_file():
            return [single]
        if not index.is_file():
            continue
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [model_dir / name for name in names]
            missing = next((file for file in files if not file.is_file()), None)
        except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
            raise ConfigError(f"{index} is not an index of shards: {describe(error)}", field="model") from error
        if missing is not None:
            raise ConfigError(f"{missing}, named by the index, does not exist", field="model")
        if not files:
            raise ConfigError(f"{index} names no file", field="model")
        return files
    raise ConfigError(f"{model_dir} has neither model.safetensors nor an index of shards nor .bin files", field="model")


def only_pickled(model_dir: Path) -> bool:
    """Returns whether the weights are .bin files, and logs a notice if they are."""
    pickled = not (model_dir / "model.safetensors").is_file() and weight_files(model_dir)[0].suffix == ".bin"
    if pickled:
        text = "%s has no safetensors: its .bin files are read by torch.load(weights_only=True), which runs no code"
        _log.warning(text, model_dir)
    return pickled


def tensors(model_dir: Path, device: torch.device, *, text_part: bool) -> Iterator[tuple[Any, str]]:
    """Yields (open file, name) of every tensor. Tensors are read to the device. text_part: see `_open`."""
    for path in weight_files(model_dir):
        with _open(path, device, text_part=text_part) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield file, name


def _open(path: Path, device: torch.device, *, text_part: bool) -> Any:
    """Opens a file of a checkpoint; its tensors are read to the device. Raises ConfigError.

    text_part: the checkpoint may be that of a multimodal model (`TextTensors`).
    """
    try:
        file = _Pickled(path, device) if path.suffix == ".bin" else safe_open(path, "pt", device=str(device))
        return TextTensors(file) if text_part else file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {describe(error)}", field="model") from error


class OpenFiles:
    """All tensors of a checkpoint by name (`engine.quantization.checkpoint.TensorFiles`)."""

    def __init__(self, model_dir: Path, device: torch.device, loaded: Progress, *, text_part: bool) -> None:
        self.read_names: set[str] = set()
        self._text_part = text_part
        self._paths, self._device, self._loaded = weight_files(model_dir), device, loaded
        self._opened, self._files = ExitStack(), dict[str, list[Any]]()

    def __enter__(self) -> Self:
        for path in self._paths:
            file = self._opened.enter_context(_open(path, self._device, text_part=self._text_part))
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                self._files.setdefault(name, []).append(file)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name][0].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        if len(self._files[name]) > 1:
            raise ConfigError(f"the checkpoint has {name} in two files", field="model")
        tensor: Tensor = self._files[name][0].get_tensor(name)
        self._loaded.advance(tensor.nbytes / 1e9)
        self.read_names.add(name)
        return tensor


class _Pickled:
    """A .bin file with the methods of safe_open."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._tensors, self._device = read_pickled(path), device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device)

    def get_slice(self, name: str) -> _PickledSlice:
        return _PickledSlice(self._tensors[name], self._device)


class _PickledSlice:
    """A tensor of a .bin file; a caller reads a part of it."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor, self._device = tensor, device

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part].to(self._device)


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .bin file, by mapping it into memory if its format allows. Raises ConfigError."""
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            tensors = torch.load(path, mmap=True, **options)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            tensors = torch.load(path, **options)
    except Exception as error:  # a damaged archive or pickle raises anything
        problem = f"{path} cannot be read by torch.load(weights_only=True): {describe(error)}"
        raise ConfigError(problem, field="model") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} is not a dictionary of tensors", field="model")
    return tensors
