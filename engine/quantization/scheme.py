"""How one linear layer is quantised: the layout of its tensors in a checkpoint, and the meaning of its numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from engine.quantization.weight import BLOCK, Activations, Kind

#: Tensors of a layer in the checkpoint. awq: qweight, qzeros, scales. gptq: these and g_idx. packed: weight_packed,
#: weight_scale (compressed-tensors). plain: weight with one number per element, and its scale. load: an unquantised
#: weight, which is quantised while it loads.
Layout = Literal["awq", "gptq", "packed", "plain", "load"]
Extent = Literal["tensor", "channel", "group", "block"]

_INPUTS = {"token": " and inputs by token", "group": " and inputs by groups of 128", "static": " and inputs by a scale"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The quantisation of one linear layer."""

    layout: Layout
    kind: Kind
    extent: Extent  #: What one scale covers: the weight, an output, a group of an output's inputs, 128 x 128 numbers.
    group_size: int = 0  #: Inputs of a group, with extent `group`.
    symmetric: bool = True  #: The weight has no zeros of its own.
    ordered: bool = False  #: Groups may be sets of inputs, which the checkpoint lists (activation order).
    zero_shift: int = 0  #: Added to the stored zeros: 1 in the first format of GPTQ.
    scale_name: str = "weight_scale"  #: Name of the scales, with layout `plain`.
    activations: Activations = "none"  #: As in `QuantizedWeight`.

    @property
    def text(self) -> str:
        """The scheme in words, for logs and errors."""
        extents = {
            "tensor": "one scale",
            "channel": "one scale per output",
            "group": f"groups of {self.group_size}",
            "block": f"blocks of {BLOCK} x {BLOCK}",
        }
        parts = [f"{self.kind}, {extents[self.extent]}", "" if self.symmetric else ", zeros"]
        parts += [", activation order" if self.ordered else "", _INPUTS.get(self.activations, "")]
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of the layers whose names match a regular expression from their start. None: not quantised."""

    pattern: str
    scheme: Scheme | None


@cache  # of re itself, the cache holds 512 patterns: configs of mixtures of experts name more layers
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear layers of a model are quantised. The first rule that matches a layer's name decides."""

    method: str  #: The name of the format, as in `quant_method`, or the setting `weights`.
    file: str  #: The file that names the format, for errors.
    rules: tuple[Rule, ...]
    kv_scales: bool = False  #: The checkpoint may have scales of the KV cache. Baton's KV has scales of its own.

    def scheme_of(self, name: str) -> Scheme | None:
        """Returns the scheme of a linear layer, by its name in the checkpoint. None: it is not quantised."""
        return next((rule.scheme for rule in self.rules if _compiled(rule.pattern).match(name)), None)

    @property
    def text(self) -> str:
        """The format and the scheme of most layers, in words."""
        schemes = [rule.scheme for rule in self.rules if rule.scheme is not None]
        return f"{self.method} ({schemes[-1].text})" if schemes else f"{self.method} (experts)"


def at_load(form: str) -> Quantization | None:
    """Returns the quantisation of the setting `weights`: fp8 or int8 for the layers of a decoder. None: auto."""
    if form == "auto":
        return None
    if form == "fp8":
        scheme = Scheme(layout="load", kind="fp8", extent="channel", activations="token")
    else:
        scheme = Scheme(layout="load", kind="int8", extent="channel")
    return Quantization(form, "the setting weights", (Rule(r"model\.layers\.", scheme),))
