"""Parses the tools of a request, from `tools` or from OpenAI's older `functions`."""

from __future__ import annotations

import re
from typing import Any

from common.errors import InvalidRequest
from gateway.api.http.json_fields import JsonFields, unsupported_value, wrong_type
from gateway.text.tools.format import Function, RequestTools

MAX_TOOLS = 512

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def parse_tools(fields: JsonFields) -> RequestTools | None:
    """Returns the tools of a request, None if no tool may be called. Raises InvalidRequest, which names the place."""
    parallel = fields.boolean("parallel_tool_calls") is not False
    new, old = parse_functions(fields, "tools"), parse_functions(fields, "functions")
    if new and old:
        raise InvalidRequest("tools and functions exclude each other", field="functions")
    legacy = bool(old)
    name, inner = ("functions", "") if legacy else ("tools", ".function")
    declared = new or old
    functions = tuple(_declared(t["function"], f"{name}[{i}]{inner}.parameters") for i, t in enumerate(declared))
    by_name = {f.name: f for f in functions}
    if len(by_name) < len(functions):
        raise InvalidRequest(f"{name} has two functions of the same name", field=name)
    mode, names = _parse_tool_choice(fields.raw("tool_choice"), by_name)
    old_mode, old_names = _parse_function_call(fields.raw("function_call"), by_name)
    if legacy:
        mode, names = old_mode, old_names
    if not functions or mode == "none":
        return None
    return RequestTools(
        tuple(f for f in functions if names is None or f.name in names),
        declared,
        required=mode == "required",
        parallel=parallel and not legacy,
        legacy=legacy,
        field=name,
    )


def parse_functions(fields: JsonFields, name: str) -> tuple[dict[str, Any], ...]:
    """Returns `tools`, or `functions` in the form of tools, as chat templates take them. Raises InvalidRequest."""
    values = fields.raw(name)
    if values is None:
        return ()
    if not isinstance(values, list):
        raise wrong_type(name, "an array", values)
    if len(values) > MAX_TOOLS:
        raise InvalidRequest(f"{name} may have at most {MAX_TOOLS} entries", field=name)
    return tuple(_tool(value, f"{name}[{i}]", legacy=name == "functions") for i, value in enumerate(values))


def _tool(value: object, name: str, *, legacy: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    if legacy:
        value, inner = {"type": "function", "function": value}, f"{name}."
    else:
        inner = f"{name}.function."
        kind = value.get("type")
        if kind != "function":
            raise unsupported_value(f"{name}.type", kind, "function")
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{name}.function", "an object", function)
    fields = JsonFields(function, inner)
    called = fields.string("name", 128)
    if called is None or _NAME.fullmatch(called) is None:
        text = f"{inner}name must be 1 to 128 letters, digits, underscores, dots or dashes"
        raise InvalidRequest(text, field=f"{inner}name")
    fields.string("description", 1 << 16)
    fields.boolean("strict")
    schema = fields.mapping("parameters")
    if schema is not None and schema.get("type", "object") != "object":
        raise InvalidRequest(f"{inner}parameters must describe an object", field=f"{inner}parameters")
    properties = None if schema is None else schema.get("properties")
    if properties is not None and not isinstance(properties, dict):
        raise wrong_type(f"{inner}parameters.properties", "an object", properties)
    return value


def _declared(function: dict[str, Any], field: str) -> Function:
    return Function(
        function["name"], function.get("parameters") or {}, strict=function.get("strict") or False, field=field
    )


def _parse_tool_choice(value: object, by_name: dict[str, Function]) -> tuple[str, set[str] | None]:
    """Returns the mode and the names of the functions that may be called (None: all)."""
    if value is None:
        return "auto", None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise InvalidRequest("tool_choice must be none, auto, required or a function", field="tool_choice")
        if value == "required" and not by_name:
            raise InvalidRequest("tool_choice is required, and there are no tools", field="tool_choice")
        return value, None
    if not isinstance(value, dict):
        raise wrong_type("tool_choice", "a string or an object", value)
    if value.get("type") == "allowed_tools":
        return _parse_allowed_tools(value.get("allowed_tools"), by_name)
    return "required", {_parse_function_name(value, "tool_choice", by_name)}


def _parse_allowed_tools(value: object, by_name: dict[str, Function]) -> tuple[str, set[str]]:
    name = "tool_choice.allowed_tools"
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{name}.mode must be auto or required", field=f"{name}.mode")
    if not isinstance(tools, list) or not tools:
        raise wrong_type(f"{name}.tools", "an array of functions", tools)
    return mode, {_parse_function_name(tool, f"{name}.tools[{i}]", by_name) for i, tool in enumerate(tools)}


def _parse_function_name(value: object, name: str, by_name: dict[str, Function]) -> str:
    """Returns the name in {"type": "function", "function": {"name": ...}}."""
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(value.get("function"), dict):
        raise InvalidRequest(f'{name} must be {{"type": "function", "function": {{"name": ...}}}}', field=name)
    return _require_declared(value["function"].get("name"), f"{name}.function.name", by_name)


def _require_declared(called: object, name: str, by_name: dict[str, Function]) -> str:
    """Returns the name if it is one of the declared functions."""
    if not isinstance(called, str):
        raise wrong_type(name, "a string", called)
    if called not in by_name:
        raise InvalidRequest(f"{name} {called[:128]!r} is not one of the functions that the request has", field=name)
    return called


def _parse_function_call(value: object, by_name: dict[str, Function]) -> tuple[str, set[str] | None]:
    """Returns the same as `_parse_tool_choice`, for OpenAI's older function_call."""
    if value is None:
        return "auto", None
    if isinstance(value, dict):
        return "required", {_require_declared(value.get("name"), "function_call.name", by_name)}
    if value not in ("none", "auto"):
        raise InvalidRequest("function_call must be none, auto or a function", field="function_call")
    assert isinstance(value, str)
    return value, None
