"""Files of a model directory: configuration, weights, tokenizer, chat template.

An input is a byte that chooses the file, and its content.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.errors import ConfigError, InvalidRequest
from common.grammar.compiler import GrammarTokenizer
from common.model.chat_template import ChatTemplate
from common.model.directory import check_model_dir
from engine.models.decoder import Decoder
from engine.models.loader import ModelSource
from engine.models.spec import parse_spec, read_config
from engine.models.weights.load import _decoder_targets
from gateway.text.output import make_detokenizer
from gateway.text.tokenizer import TextTokenizer
from tests.fuzz.mutators import bend, mutate, words
from tests.fuzz.target import FuzzTarget

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "eos_token_id"), 2),
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_EXPERTS_CONFIG = _CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"],
    "rope_scaling": None,
    **dict.fromkeys(("num_experts", "moe_intermediate_size"), 8),
    **dict.fromkeys(("num_experts_per_tok", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"), 1),
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_MAX_ELEMENTS = 1 << 20  #: A changed configuration of a larger model is read, but its weights are not.
_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def _size(spec: Any) -> int:
    moe = spec.moe
    inner = spec.intermediate_size if moe is None else moe.num_experts * (1 + moe.expert_size) + moe.shared_size
    inner = max(inner, spec.intermediate_size)
    layer = spec.hidden_size * (4 * spec.num_heads * spec.head_dim + 3 * inner)
    return int(spec.num_layers * layer + spec.vocab_size * spec.hidden_size * 2 + spec.max_position * spec.head_dim)


class ModelFiles(FuzzTarget):
    """The configuration and weights of a model directory: JSON and safetensors headers."""

    words = words("json")
    config = _CONFIG

    def __enter__(self) -> ModelFiles:
        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()
        self._dir = Path(self._folder.name)
        targets = _targets(parse_spec(self.config))
        names = {name: target.tensor.shape for name, target in targets.items() if not target.replaces}
        tensors = {name: torch.ones(shape) for name, shape in names.items()}
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "part.safetensors")}
        contents = (
            json.dumps(self.config).encode(),
            b'{"eos_token_id": [2, 3]}',
            save(tensors),
            json.dumps(index).encode(),
        )
        self._valid = dict(zip(_FILES, contents, strict=True))
        for name in (*_FILES[:2], "tokenizer.json", "part.safetensors"):
            self._write(name, self._valid.get(name, contents[2] if "part" in name else b"{}"))
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def _write(self, name: str, content: bytes | None) -> None:
        path = self._dir / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)

    def seeds(self) -> Sequence[bytes]:
        return [bytes([i]) + self._valid[name] for i, name in enumerate(_FILES)]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = rng.choice(corpus)
        number = data[0] % len(_FILES) if data else 0
        if number == 2 and len(data) > 9 and rng.random() < 0.8:  # the header is changed, and mostly its length fits
            length = int.from_bytes(data[1:9], "little")
            header = mutate(data[9 : 9 + length], rng, self.words)
            size = len(header) if rng.random() < 0.9 else rng.choice((0, 1, 2**63, 2**64 - 1, len(header) + 1))
            return data[:1] + size.to_bytes(8, "little") + header + data[9 + length :]
        try:
            return bytes([number]) + json.dumps(bend(json.loads(data[1:]), rng)).encode()
        except (ValueError, RecursionError):
            return bytes([number]) + mutate(data[1:], rng, self.words)

    def run(self, data: bytes) -> str:
        name = _FILES[data[0] % len(_FILES) if data else 0]
        self._write("model.safetensors", None if name == _FILES[3] else self._valid["model.safetensors"])
        self._write(name, data[1:])
        try:
            check_model_dir(self._dir)
            spec = parse_spec(*read_config(self._dir))
            if _size(spec) > _MAX_ELEMENTS:
                return f"{name} large"
            source, device = ModelSource(spec, self._dir, None), torch.device("cpu")
            source.revision(device)
            source.load(16, device, torch.float32)
        except ConfigError as error:
            return f"{name} {error.message[-30:]}"
        finally:
            self._write(name, self._valid[name])
        return f"{name} loaded"


class ExpertFiles(ModelFiles):
    """The same of a model with experts."""

    config = _EXPERTS_CONFIG


def _targets(spec: Any) -> dict[str, Any]:
    return _decoder_targets(Decoder(spec, 16, torch.device("cpu"), torch.float32))


def _tokenizers() -> list[bytes]:
    """Returns two small tokenizer.json: byte-level, and with spaces as in SentencePiece and byte tokens."""
    texts = []
    for byte_level in (True, False):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else [f"<0x{i:02X}>" for i in range(256)]
        pieces = [*alphabet, *("▁", "H", "i", "e") * (not byte_level), "Hi"]
        vocab = {word: i for i, word in enumerate(dict.fromkeys(pieces))}
        tokenizer = Tokenizer(models.BPE(vocab, [("H", "i")], byte_fallback=not byte_level))
        if byte_level:
            tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        else:
            tokenizer.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
        tokenizer.add_special_tokens(["<|im_end|>", "<s>"])
        texts.append(tokenizer.to_str().encode())
    return texts


class TokenizerFiles(FuzzTarget):
    """The tokenizer and chat template of a model directory, loaded and used once."""

    words = words("json")

    def __enter__(self) -> TokenizerFiles:
        self._folder = tempfile.TemporaryDirectory()
        self._dir = Path(self._folder.name)
        byte_level, spaces = _tokenizers()
        config = {
            "eos_token": {"content": "<|im_end|>"},
            "bos_token": "<s>",
            "chat_template": "{{ messages[0].content }}",
        }
        contents = (byte_level, json.dumps(config).encode(), b'{"eos_token_id": [256]}', b"{{ messages[0].content }}")
        self._valid = dict(zip(_TOKENIZER_FILES, contents, strict=True))
        self._spaces = spaces
        for name in _TOKENIZER_FILES[:2]:
            (self._dir / name).write_bytes(self._valid[name])
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def seeds(self) -> Sequence[bytes]:
        return [*(bytes([i]) + self._valid[name] for i, name in enumerate(_TOKENIZER_FILES)), b"\0" + self._spaces]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = rng.choice(corpus)
        try:
            value = json.loads(data[1:])
        except (ValueError, RecursionError):
            return data[:1] + mutate(data[1:], rng, self.words)
        if rng.random() < 0.2:
            return data[:1] + mutate(data[1:], rng, self.words)
        return data[:1] + json.dumps(bend(value, rng)).encode()

    def run(self, data: bytes) -> str:
        name = _TOKENIZER_FILES[data[0] % len(_TOKENIZER_FILES) if data else 0]
        path = self._dir / name
        path.write_bytes(data[1:])
        try:
            tokenizer = TextTokenizer(self._dir)
            ChatTemplate(self._dir, tokenizer.config)
        except ConfigError as error:
            return f"{name} {error.message[-30:]}"
        finally:
            if name in _TOKENIZER_FILES[:2]:
                path.write_bytes(self._valid[name])
            else:
                path.unlink()
        with suppress(InvalidRequest):
            GrammarTokenizer(self._dir, eos_ids=tokenizer.eos_ids, vocab_size=tokenizer.vocab_size).get()
        ids = tokenizer.encode("Hi é\n<|im_end|>", add_special_tokens=True)
        detokenizer = make_detokenizer(tokenizer)
        text = "".join(map(detokenizer.feed, [*ids, *range(0, tokenizer.vocab_size, 7)])) + detokenizer.flush()
        return f"{name} {len(ids)} {bool(text)} {tokenizer.eos_ids[:1]}"
