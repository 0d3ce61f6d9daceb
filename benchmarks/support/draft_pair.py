"""Makes a draft model from a target by dropping layers. It agrees with the target on about two of three tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

#: Layers to drop from SmolLM2. The draft is about as slow as the target, so it measures acceptance only.
SMOLLM2_LAYERS = (12, 18)


def without_layers(source: Path, directory: Path, dropped: tuple[int, ...]) -> Path:
    """Writes to `directory` the model of `source` without the layers `dropped`.

    `source` must have one safetensors file with Llama's tensor names.
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
