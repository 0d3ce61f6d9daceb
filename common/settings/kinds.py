"""Kinds of setting values: how each is parsed, and how an error describes the expected value."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from common.redis.url import SCHEMES, RedisUrl
from common.settings.tiers import TIER_PATTERN
from common.tracing.tracer import parse_trace_target
from common.types import Role

# Names of gateway/text/tools/choose.py and of gateway/text/reasoning.py.
TOOL_PARSERS = (
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "functiongemma",
    "gemma4",
    "glm45",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "minimax",
    "minimax_m2",
    "mistral",
    "olmo3",
    "phi4_mini",
    "phi4_mini_tags",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
    "xlam",
)
#: Group of the entry points by which other packages register tool formats.
TOOL_FORMAT_GROUP = "baton.tool_formats"
REASONING_PARSERS = (
    "auto",
    "none",
    "think",
    "deepseek_r1",
    "mistral",
    "seed_oss",
    "kimi",
    "granite",
    "granite_3_2",
    "gemma4",
)

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_UNITS = {"": 1, "b": 1}  #: Bytes of each unit, in lower case: 1024**i for K and KiB, 1000**i for KB.
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {_prefix: 1024**_power, f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}


def as_text(value: object) -> str:
    """Returns the text from which a kind parses this value."""
    return "" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class SettingKind:
    """The values that a setting accepts."""

    expected: str  # Description of a valid value, for error messages: "expected ...".
    parse: Callable[[object], Any]  #: Turns text or a TOML value into the setting's value. Raises ValueError.
    secret: bool = False  # Values are not printed.
    shape: type = object  # bool for a switch, tuple for a list, object for a single value.
    metavar: str = ""  # Stands for a value in a help text; empty: see Setting.metavar.
    show: Callable[[Any], str] = as_text  # Writes a default in a help text.


def integer(low: int, high: int | None = None) -> SettingKind:
    """Returns the kind of a decimal integer, both limits included."""

    def parse(raw: object) -> int:
        value = int(raw, 10) if isinstance(raw, str) else raw
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            raise ValueError
        return value

    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    return SettingKind(expected, parse, metavar="N")


def size(low: int) -> SettingKind:
    """Returns the kind of a number of bytes, with or without a unit: K, KiB (1024), KB (1000) and so on."""

    def parse(raw: object) -> int:
        if isinstance(raw, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", raw)
            # Gb may mean gigabits or gigabytes, which differ by a factor of eight, so it is not guessed.
            if match is None or match[2].lower() not in _UNITS or re.fullmatch("[KMGT]b", match[2]):
                raise ValueError
            raw = int(float(match[1]) * _UNITS[match[2].lower()])
        if not isinstance(raw, int) or isinstance(raw, bool) or raw < low:
            raise ValueError
        return raw

    expected = f"a size of at least {low} bytes, like 512M or 1GiB (1024 each), or 1GB (1000 each)"
    return SettingKind(expected, parse, metavar="SIZE", show=_size_text)


def _size_text(value: int) -> str:
    return f"{value >> 20}MiB" if value % (1 << 30) else f"{value >> 30}GiB"


def number(expected: str, accepts: Callable[[float], bool]) -> SettingKind:
    """Returns the kind of a float. NaN must fail `accepts`."""

    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float) or not accepts(value := float(raw)):
            raise ValueError
        return value

    return SettingKind(expected, parse, metavar="X", show="{:g}".format)


def seconds(low: float, high: float) -> SettingKind:
    return replace(number(f"seconds from {low:g} to {high:g}", lambda value: low <= value <= high), metavar="N")


def parsed_text(expected: str, parse: Callable[[str], Any], metavar: str = "", *, secret: bool = False) -> SettingKind:
    """Returns the kind of text that `parse` accepts."""

    def check(raw: object) -> Any:
        if not isinstance(raw, str):
            raise ValueError
        return parse(raw)

    return SettingKind(expected, check, secret, metavar=metavar)


def text(expected: str, pattern: str, metavar: str = "", *, secret: bool = False) -> SettingKind:
    """Returns the kind of text that matches the whole pattern."""

    def match(raw: str) -> str:
        if re.fullmatch(pattern, raw, re.DOTALL) is None:
            raise ValueError
        return raw

    return parsed_text(expected, match, metavar, secret=secret)


def choice(*names: str) -> SettingKind:
    return parsed_text("one of " + ", ".join(names), lambda raw: names[names.index(raw)])  # index raises ValueError


def tool_parser() -> SettingKind:
    """Returns the kind of a tool format's name, also of one that another package registers."""

    def parse(raw: str) -> str:
        if raw not in TOOL_PARSERS and raw not in entry_points(group=TOOL_FORMAT_GROUP).names:
            raise ValueError(f"no tool format is named {raw}")
        return raw

    return parsed_text(f"one of {', '.join(TOOL_PARSERS)}, or a registered tool format", parse)


def optional(kind: SettingKind) -> SettingKind:
    """Returns a kind like `kind` that reads None and empty text as None."""

    def parse(raw: object) -> Any:
        return None if raw is None or raw == "" else kind.parse(raw)

    return replace(kind, expected=f"{kind.expected}, or nothing", parse=parse)


def tuple_of(kind: SettingKind) -> SettingKind:
    """Returns the kind of a list, of text with commas, or of a JSON list; each entry is of `kind`."""

    def parse(raw: object) -> tuple[Any, ...]:
        if isinstance(raw, str):
            listed = _json_list(raw)
            raw = [part.strip() for part in raw.split(",") if part.strip()] if listed is None else listed
        if not isinstance(raw, Sequence):
            raise ValueError
        return tuple(kind.parse(item) for item in raw)

    expected = f"a comma-separated list, each {kind.expected}"
    return SettingKind(expected, parse, kind.secret, shape=tuple, metavar=f"{kind.metavar},..")


def _json_list(raw: str) -> list[Any] | None:
    """Returns the entries of a JSON list, the form that other servers take; None for other text, like [::1]:8000."""
    try:
        value = json.loads(raw) if raw.lstrip().startswith("[") else None
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def _parse_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw.lower() not in _BOOLS:
        raise ValueError
    return _BOOLS[raw.lower()]


def _parse_redis(raw: str) -> str:
    if not raw.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise ValueError
    RedisUrl.parse(raw)
    return raw


def _parse_json_object(raw: object) -> str:
    """Returns the object as JSON text; a TOML file may have a table."""
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except RecursionError as e:
        raise ValueError from e
    if not isinstance(value, dict):
        raise ValueError
    return raw if isinstance(raw, str) else json.dumps(value)


def _parse_directory(raw: object) -> str | Path:
    if not isinstance(raw, str | Path) or not str(raw):
        raise ValueError
    return raw


def _parse_host(raw: str) -> str:
    if re.fullmatch(r"\[[^\s/\[\]]+\]|[^\s/\[\]]+", raw) is None:
        raise ValueError
    return raw.strip("[]")


def _parse_address(raw: str) -> str:
    """Puts an IPv6 address into brackets: Kubernetes' $(POD_IP):PORT has none, and the port is always given."""
    host, _, port = raw.rpartition(":")
    if re.fullmatch(r"\d{1,5}", port) is None or re.fullmatch(r"\[[^\s/\[\]]+\]|[^\s/\[\]]+", host) is None:
        raise ValueError
    if ":" in host:
        ipaddress.IPv6Address(host.strip("[]"))
    return host_port(host, port)


def host_port(host: str, port: int | str) -> str:
    """Returns host:port as URLs and gRPC write it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


BOOL = SettingKind("true or false", _parse_bool, shape=bool, show=lambda _: "on")
ROLE = parsed_text("one of prefill, decode, both", Role)
PORT = integer(0, 65535)
HOST = parsed_text("a host name or IP address", _parse_host)
ADDRESS = parsed_text("host:port, or [host]:port for an IPv6 address", _parse_address, "HOST:PORT")
ORIGIN = text("an origin like https://app.example, or *", r"\*|null|[a-z][a-z0-9+.-]*://[^\s/,]+", "ORIGIN")
ROOT_PATH = text("a path like /llm", r"/?|(/[A-Za-z0-9._~-]+)+/?", "PATH")
REDIS = parsed_text(f"a URL that starts with {', '.join(f'{scheme}://' for scheme in SCHEMES)}", _parse_redis, "URL")
NAME = text("1 to 63 letters, digits, dots, dashes or underscores", r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MODEL = text("a model of the hub, a directory or a known model's name", r".+", "NAME|DIR")
MODEL_PATH = SettingKind(MODEL.expected, _parse_directory, metavar="DIR")  #: Python code may also give a Path.
NAMED_MODEL = text(f"NAME=MODEL, a served name and {MODEL.expected}", r"[^=,/\s][^=,]*=.+", "NAME=MODEL")
JSON_OBJECT = SettingKind("a JSON object", _parse_json_object, metavar="JSON")
ALIAS = text("NAME=MODEL, another name and that of a served model", r"[^=,\s][^=,]*=[^=,]+", "NAME=MODEL")
TIER = text("NAME:PRIORITY:SHARE or NAME:PRIORITY:SHARE:TOKENS", TIER_PATTERN, "NAME:PRIORITY:SHARE")
SERVICE = text("the name of a Kubernetes Service", r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "NAME")
SECRET = text("at least 8 characters", r".{8,}", secret=True)
DEVICE = text("auto, cpu, cuda or cuda:N", r"auto|cpu|cuda(:\d+)?")
LOCAL_PREFILL = text("off, auto or a number of tokens", r"off|auto|\d{1,8}", "N")
_TARGET = "otlp, http://HOST:PORT or grpc://HOST:PORT of a collector, or file:PATH"
TRACES = parsed_text(_TARGET, parse_trace_target, "TARGET")
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
GPU_SHARE = number("a number over 0 and at most 1", lambda value: 0 < value <= 1)
TOKEN_COUNT = integer(0, 1 << 20)
RANK_COUNT = integer(1, 1024)
NET_DEVICES = text("network devices as UCX names them, like mlx5_0:1", r"[^\s]+", "NAME:PORT")
CPUS = text("CPU numbers, like 0-15,32-47", r"\d+(-\d+)?(,\d+(-\d+)?)*", "N-M,..")
