"""Rotary position embeddings of a config.json.

Rope is read in both formats: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (older versions).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from engine.models.spec.fields import NotNative, flag, integer, number

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `kind`, one of ROPE_KINDS, decides which fields are used."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial: float = 1.0  # Part of a head's dimensions that rotates: the first ones.

    def rotated(self, head_dim: int) -> int:
        """Returns the number of dimensions of a head that rotate."""
        return int(head_dim * self.partial)

    def max_position(self, max_position: int) -> int:
        """Returns the context length after scaling. llama3 configs already state the extended length."""
        if self.kind == "yarn":
            return max(max_position, int(self.original_max_position * self.factor))
        if self.kind == "linear":
            return int(max_position * self.factor)
        return max_position


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """The rope parameters that a family has if its config.json does not name them."""

    theta: float = 10000.0
    #: Part of a head that rotates. None: the family rotates whole heads, and a config with another part is not native.
    partial: float | None = None
    scaling: Mapping[str, Any] | None = None  # Scaling of a config.json without rope parameters.


def parse_rope(config: Mapping[str, Any], max_position: int, defaults: RopeDefaults) -> RopeSpec:
    """Reads rope in either format. Raises ConfigError if the config has both formats and they differ."""
    present = [raw for key in ("rope_parameters", "rope_scaling") if (raw := config.get(key))]
    first, *others = [_rope_of(raw, config, max_position, defaults) for raw in present or [defaults.scaling or {}]]
    if any(other != first for other in others):
        raise ConfigError("config.json: rope_parameters and rope_scaling differ, keep one of them", field="model")
    return first


def _rope_of(raw: Any, config: Mapping[str, Any], max_position: int, defaults: RopeDefaults) -> RopeSpec:
    if not isinstance(raw, Mapping) or any(isinstance(v, Mapping) for v in raw.values()):
        raise NotNative("rope parameters that differ by layer are not supported")
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise NotNative(f"rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    usual = 1.0 if defaults.partial is None else defaults.partial
    partial = number(raw, "partial_rotary_factor", number(config, "partial_rotary_factor", usual))
    if partial > 1.0 or (defaults.partial is None and partial != 1.0):
        raise NotNative(f"partial rotary embeddings ({partial} of a head) are not supported for this architecture")
    theta = number(raw, "rope_theta", number(config, "rope_theta", defaults.theta))
    if kind == "default":
        return RopeSpec(kind, theta, partial=partial)
    if kind == "yarn" and theta <= 1.0:
        raise ConfigError(f"config.json: rope_theta is {theta}, yarn needs a number above 1", field="model")
    required = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}[kind]
    missing = [key for key in required if raw.get(key) is None]
    if missing:
        raise ConfigError(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    key = "original_max_position_embeddings"
    original = integer(config, key, integer(raw, key, max_position))
    lowest = dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), 0.0)
    lowest |= dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), -math.inf)
    numbers = {name: number(raw, name, 0.0, above=low) for name, low in lowest.items() if raw.get(name) is not None}
    factor, truncate = number(raw, "factor", max_position / original), flag(raw, "truncate", True)
    return RopeSpec(kind, theta, factor, original, truncate=truncate, partial=partial, **numbers)


def yarn_scale(spec: RopeSpec, mscale: float) -> float:
    """Returns the factor that yarn gives an attention score for its longer context, with the weight `mscale`."""
    return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0


def yarn_magnitude(spec: RopeSpec) -> float:
    """Returns the factor of latent attention on queries and keys. It comes on top of the factor of the rope tables."""
    return yarn_scale(spec, spec.mscale_all_dim) if spec.kind == "yarn" and spec.mscale_all_dim else 1.0
