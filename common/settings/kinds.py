"""Kinds of setting values: how each is parsed, and how an error describes the expected value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.redis.url import SCHEMES, RedisUrl
from common.tracing.tracer import parse_trace_target
from common.types import Role

#: Names of gateway/text/tools/choose.py.
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "pythonic")
#: Names of gateway/text/reasoning.py.
REASONING_PARSERS = ("auto", "none", "think", "deepseek_r1", "mistral", "seed_oss", "kimi")

_UNITS = {"": 1, "B": 1, **{f"{p}{s}": 1024**i for i, p in enumerate("KMGT", 1) for s in ("", "iB")}}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS_FOLDED = {unit.lower(): n for unit, n in _UNITS.items()}


@dataclass(frozen=True)
class SettingKind:
    """The values that a setting accepts."""

    #: Description of a valid value, for error messages: "expected ...".
    expected: str
    #: Turns text or a TOML value into the setting's value; a valid value stays as it is. Raises ValueError.
    parse: Callable[[object], Any]
    #: Values are not printed.
    secret: bool = False


def integer(low: int, high: int) -> SettingKind:
    """Returns the kind of a decimal integer, both limits included."""

    def parse(raw: object) -> int:
        value = int(raw, 10) if isinstance(raw, str) else raw
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError
        return value

    return SettingKind(f"an integer from {low} to {high}", parse)


def size(low: int) -> SettingKind:
    """Returns the kind of a number of bytes, with or without a unit: K, KiB (1024), KB (1000) and so on."""

    def parse(raw: object) -> int:
        if isinstance(raw, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", raw)
            if match is None or match[2].lower() not in _UNITS_FOLDED:
                raise ValueError
            raw = int(float(match[1]) * _UNITS_FOLDED[match[2].lower()])
        if not isinstance(raw, int) or isinstance(raw, bool) or raw < low:
            raise ValueError
        return raw

    return SettingKind(f"a size of at least {low} bytes, like 512M or 1GiB", parse)


def seconds(low: float, high: float) -> SettingKind:
    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        value = float(raw)
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError
        return value

    return SettingKind(f"seconds from {low:g} to {high:g}", parse)


def fraction(low: float, high: float) -> SettingKind:
    """Returns the kind of a number above `low`, up to and including `high`."""

    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        value = float(raw)
        if not low < value <= high:
            raise ValueError
        return value

    return SettingKind(f"a number over {low:g} and at most {high:g}", parse)


def _parse_share(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float) or not 0 <= float(raw) <= 1:
        raise ValueError
    return float(raw)


def text(expected: str, pattern: str, *, secret: bool = False) -> SettingKind:
    """Returns the kind of text that matches the whole pattern."""

    def parse(raw: object) -> str:
        if not isinstance(raw, str) or re.fullmatch(pattern, raw, re.DOTALL) is None:
            raise ValueError
        return raw

    return SettingKind(expected, parse, secret)


def optional(kind: SettingKind) -> SettingKind:
    """Returns a kind like `kind` that reads None and empty text as None."""

    def parse(raw: object) -> Any:
        return None if raw is None or raw == "" else kind.parse(raw)

    return SettingKind(f"{kind.expected}, or nothing", parse, kind.secret)


def tuple_of(kind: SettingKind) -> SettingKind:
    """Returns the kind of a list, or of text with commas; each entry is of `kind`."""

    def parse(raw: object) -> tuple[Any, ...]:
        if isinstance(raw, str):
            raw = [part.strip() for part in raw.split(",") if part.strip()]
        if not isinstance(raw, Sequence):
            raise ValueError
        return tuple(kind.parse(item) for item in raw)

    return SettingKind(f"a comma-separated list, each {kind.expected}", parse)


def choice(*names: str) -> SettingKind:
    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw not in names:
            raise ValueError
        return raw

    return SettingKind("one of " + ", ".join(names), parse)


def _parse_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw.lower() not in _BOOLS:
        raise ValueError
    return _BOOLS[raw.lower()]


def _parse_role(raw: object) -> Role:
    if not isinstance(raw, str):
        raise ValueError
    return Role(raw)


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
BOOL = SettingKind("true or false", _parse_bool)
ROLE = SettingKind("one of prefill, decode, both", _parse_role)
PORT = integer(0, 65535)
HOST = text("a host name or IP address", r"[^\s/]+")
ADDRESS = text("host:port", r"[^\s/]+:\d{1,5}")


def _parse_redis(raw: object) -> str:
    if not isinstance(raw, str) or not raw.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise ValueError
    RedisUrl.parse(raw)
    return raw


def _parse_traces(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    return parse_trace_target(raw)


REDIS = optional(SettingKind(f"a URL that starts with {', '.join(f'{scheme}://' for scheme in SCHEMES)}", _parse_redis))
NAME = text("1 to 63 letters, digits, dots, dashes or underscores", r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MODEL = text("a directory or a known model's name", r".+")
NAMED_MODEL = text("NAME=DIR, a served name and a directory or a known model's name", r"[^=,/\s][^=,]*=.+")
ALIAS = text("NAME=MODEL, another name and that of a served model", r"[^=,\s][^=,]*=[^=,]+")
API_KEYS = tuple_of(text("a file of API keys, or redis", r".+"))
SECRET = text("at least 8 characters", r".{8,}", secret=True)
DEVICE = text("auto, cpu, cuda or cuda:N", r"auto|cpu|cuda(:\d+)?")
DTYPE = choice("auto", "float32", "bfloat16")
KV_DTYPE = choice("auto", "fp8_e4m3")
SPECULATION = choice("none", "ngram", "suffix", "draft_model", "eagle")
DRAFT_TOKENS = integer(1, 7)
ACCEPTANCE = choice("coupled", "rejection")
LOAD_FORMAT = choice("auto", "dummy")
LOCAL_PREFILL = text("off, auto or a number of tokens", r"off|auto|\d{1,8}")
PULL = choice("off", "push")
SEED = integer(0, (1 << 31) - 1)
MODEL_LEN = integer(0, 1 << 24)
DISCOVERY = choice("index", "k8s")
SERVICES = tuple_of(text("the name of a Kubernetes Service", r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"))
TOOL_PARSER = choice(*TOOL_PARSERS)
REASONING_PARSER = choice(*REASONING_PARSERS)
LOG_LEVEL = choice("debug", "info", "warning", "error")
LOG_FORMAT = choice("auto", "json", "text")
TRACE_TARGET = optional(
    SettingKind("otlp, http://HOST:PORT or grpc://HOST:PORT of a collector, or file:PATH", _parse_traces)
)
RATIO = SettingKind("a number from 0 to 1", _parse_share)
DRAIN = seconds(0, 3600)
THREADS = integer(0, 1024)
BLOCK_SIZE = integer(1, 256)
GPU_SHARE = fraction(0, 1)
TOKEN_COUNT = integer(0, 1 << 20)
NET_DEVICES = text("network devices as UCX names them, like mlx5_0:1", r"[^\s]+")
RANK_COUNT = integer(1, 1024)
CPUS = text("CPU numbers, like 0-15,32-47", r"\d+(-\d+)?(,\d+(-\d+)?)*")
