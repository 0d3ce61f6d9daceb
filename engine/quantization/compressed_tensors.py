"""Reads the config of compressed-tensors: groups of layers, each with its own quantisation of weights and inputs."""

from __future__ import annotations

import re
from typing import Any

from engine.quantization.config_fields import Fields
from engine.quantization.scheme import Rule, Scheme
from engine.quantization.weight import BLOCK, Activations

_PLAIN_FORMATS = {"float": ("float-quantized", "naive-quantized"), "int": ("int-quantized", "naive-quantized")}
_PACKED = "pack-quantized"
_ORDERS = (None, False, True, "group", "dynamic", "weight", "static")


def rules(fields: Fields) -> tuple[Rule, ...]:
    """Returns the rules of a config: ignored layers, then targets that are names, patterns and classes of layers.

    Targets of one sort are in the order of the file.
    """
    if (sparsity := fields.raw.get("sparsity_config")) and Fields(sparsity, fields.file, fields.method).raw.get(
        "format"
    ) not in (None, "dense"):
        raise fields.refused("it has a sparsity_config")
    if fields.raw.get("transform_config"):
        raise fields.refused("it has a transform_config")
    found = [Rule(_pattern(fields, name, "ignore"), None) for name in fields.names("ignore")]
    targeted = list[tuple[int, Rule]]()
    groups = fields.inner("config_groups")
    if not groups.raw:
        raise fields.refused("config_groups is empty")
    for name in groups.raw:
        group = groups.inner(name)
        targets = group.names("targets")
        if not targets:
            raise fields.refused(f"the group {name!r} of config_groups has no targets")
        scheme = _scheme(group, group.raw.get("format") or fields.raw.get("format"))
        targeted += [(_sort(target), Rule(_pattern(fields, target, "targets"), scheme)) for target in targets]
    return (*found, *(rule for _, rule in sorted(targeted, key=lambda pair: pair[0])))


def _sort(target: str) -> int:
    """0: a name, 1: a regular expression, 2: the class of all layers. The smallest that matches a layer decides."""
    return 2 if target == "Linear" else int(target.startswith("re:"))


def _pattern(fields: Fields, name: str, key: str) -> str:
    """A target or an ignored layer: a regular expression, a class of layers, or a name."""
    if name.startswith("re:"):
        return fields.pattern(name.removeprefix("re:"), key)
    return "" if name == "Linear" else f"{re.escape(name)}$"


def _scheme(group: Fields, stored: Any) -> Scheme:
    if group.raw.get("output_activations"):
        raise group.refused("it quantises outputs of layers")
    weights = group.inner("weights")
    number = weights.require("type", ("int", "float"))
    bits = weights.require("num_bits", (4, 8) if number == "int" else (8,))
    weights.require("dynamic", (None, False))
    symmetric = weights.flag("symmetric", True)
    if number == "int" and stored == _PACKED:
        if group.raw.get("input_activations"):
            raise group.refused("it quantises the inputs of packed weights")
        order = weights.require("actorder", _ORDERS)
        return Scheme(
            layout="packed",
            kind="int4" if bits == 4 else "int8",
            **_extent(weights, ("channel", "group")),
            symmetric=symmetric,
            ordered=order in (True, "group", "dynamic"),
        )
    if bits == 4 or stored not in _PLAIN_FORMATS[number]:
        raise group.refused(f"format {stored!r} with {bits}-bit {number} weights")
    if not symmetric:
        raise group.refused("8-bit weights with zero points")
    weights.require("actorder", (None, False, "weight", "static"))
    extents = ("tensor", "channel", "block") if number == "float" else ("tensor", "channel")
    kind = "fp8" if number == "float" else "int8"
    activations = _activations(group, number)
    return Scheme(layout="plain", kind=kind, **_extent(weights, extents), activations=activations)  # type: ignore[arg-type]


def _extent(weights: Fields, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Returns extent and group_size of a scheme."""
    # Older files leave the strategy out: a group size says that it is `group`.
    given = weights.raw.get("strategy") or ("group" if weights.raw.get("group_size") else "tensor")
    if given not in allowed:
        raise weights.refused(f"strategy is {given!r}, {' or '.join(map(repr, allowed))} is supported")
    if given == "block":
        weights.require("block_structure", ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"))
    if given == "group":
        return {"extent": given, "group_size": weights.group("group_size")}
    return {"extent": given}


def _activations(group: Fields, number: str) -> Activations:
    if not group.raw.get("input_activations"):
        return "none"
    inputs = group.inner("input_activations")
    inputs.require("num_bits", (8,))
    inputs.require("type", (number,))
    if not inputs.flag("symmetric", True):
        raise group.refused("inputs with zero points")
    dynamic = inputs.require("dynamic", (None, False, True))
    strategy = inputs.raw.get("strategy") or ("group" if inputs.raw.get("group_size") else "tensor")
    if not dynamic and strategy == "tensor":
        return "static"
    if dynamic and strategy in ("token", "tensor"):
        return "token"  # a scale for each token is finer than one for all tokens of a step, and does not depend on it
    if dynamic and strategy == "group" and number == "float":
        inputs.require("group_size", (BLOCK,))
        return "group"
    raise group.refused(f"inputs are quantised with strategy {strategy!r} and dynamic {dynamic!r}")
