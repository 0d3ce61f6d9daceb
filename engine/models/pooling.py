"""Pooling: how the states of a prompt's tokens after the final norm become one vector.

The setting names the kind, or sentence-transformers' files in the model directory do: modules.json lists the modules,
and the directory of the Pooling module has a config.json
(https://sbert.net/docs/package_reference/sentence_transformer/models.html#sentence_transformers.models.Pooling).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from common.errors import ConfigError, describe


class PoolingKind(StrEnum):
    """The states from which a vector is made."""

    LAST = "last"  # The state of the last token
    MEAN = "mean"  # The mean of all states
    CLS = "cls"  # The state of the first token


@dataclass(frozen=True, slots=True)
class Pooling:
    """The pooling of one model."""

    kind: PoolingKind
    normalize: bool = True  # Scale vectors to length 1
    refusal: str = ""  # Why the model serves no embeddings; empty if it does

    def tokens(self, prompt_len: int) -> range:
        """Returns the positions of the tokens that are pooled."""
        match self.kind:
            case PoolingKind.LAST:
                return range(prompt_len - 1, prompt_len)
            case PoolingKind.MEAN:
                return range(prompt_len)
            case PoolingKind.CLS:
                return range(1)


#: The switches of a pooling config that Baton serves, with their kinds.
_SWITCHES = {
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_cls_token": PoolingKind.CLS,
}
_SERVED_MODULES = {"Transformer", "Pooling", "Normalize"}


def pooling_of(model_dir: Path, kind: str) -> Pooling:
    """Returns the pooling of a model directory; `kind` is the setting.

    `auto` takes the kind of sentence-transformers' files, or the last token without them. These files also decide
    whether vectors are scaled to length 1; without them they are. Raises ConfigError for a file that is not readable.
    """
    modules = _read(model_dir / "modules.json") or []
    named = {str(m.get("type", "")).rpartition(".")[2]: str(m.get("path", "")) for m in modules if isinstance(m, dict)}
    if "Pooling" not in named:
        return Pooling(PoolingKind.LAST if kind == "auto" else PoolingKind(kind))
    normalize = "Normalize" in named
    others = sorted(named.keys() - _SERVED_MODULES)
    refusal = f"modules.json has a module that is not served: {', '.join(others)}" if others else ""
    if kind != "auto":
        return Pooling(PoolingKind(kind), normalize, refusal)
    config = _read(model_dir / named["Pooling"] / "config.json") or {}
    if isinstance(mode := config.get("pooling_mode"), str | list):  # the newer form
        on = [mode] if isinstance(mode, str) else [str(name) for name in mode]
        found = [PoolingKind.LAST if name == "lasttoken" else name for name in on]
    else:
        on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
        found = [_SWITCHES.get(name, name) for name in on]
    if len(found) == 1 and found[0] in list(PoolingKind):
        return Pooling(PoolingKind(found[0]), normalize, refusal)
    shown = " and ".join(on) or "none"
    unknown = f"the pooling {shown} of the model's files is not served; choose one with --pooling last, mean or cls"
    return Pooling(PoolingKind.LAST, normalize, refusal or unknown)


def _read(path: Path) -> Any:
    """Returns the JSON of a file, None without the file. Raises ConfigError."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} is not readable: {describe(error)}", field="model") from error
