"""Files of a quantised model: its configuration and its tensors.

An input is a byte for the format, a byte for the file, and the content of that file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file

from benchmarks.support.quantized_files import LINEARS, write
from common.errors import ConfigError
from engine.models.loader import ModelSource
from engine.models.spec import parse_spec, read_config
from engine.quantization.formats import read_quantization
from tests.fuzz.mutators import bend, mutate, words
from tests.fuzz.target import FuzzTarget

_SIZE = 32
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": True,
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "num_hidden_layers": 1,
}
_FORMATS = ("awq", "gptq-order", "gptq-8", "ct-w4-zeros", "ct-fp8-tensor", "ct-int8", "fp8-block", "modelopt")
_FILES = ("config.json", "model.safetensors")


class QuantizedFiles(FuzzTarget):
    """The quantization config of a model directory, and the headers and numbers of its tensors."""

    words = words("json")

    def __enter__(self) -> QuantizedFiles:
        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()
        self._root = Path(self._folder.name)
        plain = self._root / "plain"
        plain.mkdir()
        names = [f"self_attn.{name}" for name in LINEARS[:4]] + [f"mlp.{name}" for name in LINEARS[4:]]
        tensors = {f"model.layers.0.{name}.weight": torch.randn(_SIZE, _SIZE) for name in names}
        tensors["model.embed_tokens.weight"] = torch.randn(_SIZE, _SIZE)
        for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
            tensors[f"model.{name}.weight"] = torch.ones(_SIZE)
        save_file(tensors, plain / "model.safetensors")
        (plain / "config.json").write_text(json.dumps(_CONFIG))
        for name in _FORMATS:
            write(plain, self._root / name, name, group_size=16)
        self._valid = {name: [(self._root / name / file).read_bytes() for file in _FILES] for name in _FORMATS}
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def seeds(self) -> Sequence[bytes]:
        return [
            bytes((number, file)) + content
            for number, name in enumerate(_FORMATS)
            for file, content in enumerate(self._valid[name])
        ]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = rng.choice(corpus)
        head, content = data[:2], data[2:]
        if len(data) > 10 and data[1] % 2:  # the header of the tensors is changed, and its length fits
            length = int.from_bytes(content[:8], "little")
            if rng.random() < 0.3:
                return head + content[: 8 + length] + mutate(content[8 + length :], rng, self.words)
            header = mutate(content[8 : 8 + length], rng, self.words)
            return head + len(header).to_bytes(8, "little") + header + content[8 + length :]
        try:
            config = json.loads(content)
            if isinstance(config, dict) and rng.random() < 0.9:
                config["quantization_config"] = bend(config.get("quantization_config"), rng)
                return head + json.dumps(config).encode()
            return head + json.dumps(bend(config, rng)).encode()
        except (ValueError, RecursionError):
            return head + mutate(content, rng, self.words)

    def run(self, data: bytes) -> str:
        name = _FORMATS[data[0] % len(_FORMATS)] if data else _FORMATS[0]
        number = data[1] % 2 if len(data) > 1 else 0
        directory, valid = self._root / name, self._valid[name][number]
        (directory / _FILES[number]).write_bytes(data[2:])
        try:
            config, generation = read_config(directory)
            quantization, spec = read_quantization(directory, config), parse_spec(config, generation)
            if (
                max(spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.max_position, spec.query_size)
                > 1024
            ):
                return f"{name} large"
            if spec.num_layers > 4:
                return f"{name} deep"
            source = ModelSource(spec, directory, None, quantization)
            source.revision(torch.device("cpu"))
            source.load(16, torch.device("cpu"), torch.float32)
        except ConfigError as error:
            return f"{name} {error.message[-30:]}"
        finally:
            (directory / _FILES[number]).write_bytes(valid)
        return f"{name} loaded"
