"""The text part of multimodal checkpoints: its configuration, and the names of its tensors.

config.json    text_config, beside vision_config           ->  the config.json of a text model
tensors        model.language_model.layers.0.x             ->  model.layers.0.x
               model.visual.x, mtp.x (another decoder)     ->  not read
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from common.errors import ConfigError
from common.model.directory import TEXT_TOWERS

_TEXT = "model.language_model."
UNUSED_TENSORS = ("model.visual.", "mtp.")  # Names of tensors of the image encoder and of multi-token prediction.
#: Fields beside text_config that belong to the whole model.
_SHARED = ("quantization_config", "tie_word_embeddings")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the decoder: `config`, or of a multimodal model its text part."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name not in TEXT_TOWERS:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config of {name} is {text!r}, an object is needed", field="model")
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    if "quantization_config" in shared:  # it names layers as the checkpoint does
        shared["quantization_config"] = json.loads(json.dumps(shared["quantization_config"]).replace(_TEXT, "model."))
    return {"eos_token_id": config.get("eos_token_id")} | text | shared | {"architectures": [TEXT_TOWERS[name]]}


class TextTensors:
    """An open file of a checkpoint: the tensors of the text part under the names of a text model."""

    def __init__(self, file: Any) -> None:
        """`file` has the methods of safe_open; this object opens and closes it as a context."""
        self._file = file
        self._names: dict[str, str] = {}

    def __enter__(self) -> TextTensors:
        self._file.__enter__()
        for name in self._file.keys():  # noqa: SIM118 - safe_open is not a mapping
            self._names[f"model.{name.removeprefix(_TEXT)}" if name.startswith(_TEXT) else name] = name
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._names)

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._names[name])
        return tensor

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._names[name])
