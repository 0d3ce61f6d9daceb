"""The configuration of a load test, from flags as typed, and of a sweep over rising rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError
from loadtest.slo import parse_slo
from loadtest.workload import arrivals
from loadtest.workload.sessions import ONE, LengthDistribution

OBJECTIVES = ("ttft", "itl", "gap", "e2e")
DEFAULT_SECONDS = 30.0
CHOICES: dict[str, tuple[str, ...]] = {
    "protocol": ("rest", "grpc"),
    "endpoint": ("chat", "completions"),
    "arrivals": arrivals.KINDS,
    "prompts": ("auto", "text", "ids"),
}
#: Least and greatest value, and whether the least itself is refused.
NUMBERS = {
    **dict.fromkeys(("speed", "length_scale", "rate", "on_s", "duration_s", "deadline_s"), (0.0, 1e9, True)),
    **dict.fromkeys(("think_s", "off_s", "ramp_s", "settle_s"), (0.0, 1e9, False)),
    "burstiness": (0.05, 20.0, False),
    "temperature": (0.0, 2.0, False),
    "abort_share": (0.0, 1.0, False),
    "attainment": (0.0, 1.0, True),
}
WHOLE_NUMBERS = {
    **dict.fromkeys(("prefixes", "requests", "max_concurrency", "max_input_tokens", "max_output_tokens"), (1, 10**9)),
    **dict.fromkeys(("warmup", "prefix_tokens"), (0, 10**9)),
    "users": (1, 100_000),
    "seed": (0, 1 << 62),
}

SYNTHETIC = ("input_tokens", "output_tokens", "prefix_tokens", "prefixes", "turns")  # Flags of synthetic prompts.

PromptForm = Literal["text", "ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The configuration of one run. Arrivals come from exactly one source: rate, users, or the times of the trace."""

    url: str = "http://127.0.0.1:8000"
    protocol: Literal["rest", "grpc"] = "rest"
    endpoint: Literal["chat", "completions"] = "chat"
    model: str = ""
    api_keys: tuple[str, ...] = ()  # Sessions use the keys in turn.
    stream: bool = True
    form: PromptForm = "text"
    vocab: tuple[int, int] = (1_000, 30_000)  # Token ids of synthetic prompts: from the first to below the second.
    ignore_eos: bool = True
    temperature: float = 0.0
    trace: Path | None = None
    speed: float = 1.0
    length_scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    input_tokens: LengthDistribution = LengthDistribution(256, 256)  # noqa: RUF009
    output_tokens: LengthDistribution = LengthDistribution(64, 64)  # noqa: RUF009
    prefix_tokens: int = 0
    prefixes: int = 1
    turns: LengthDistribution = ONE
    think_s: float = 0.0
    rate: float | None = None
    arrivals: str = "poisson"
    burstiness: float = 2.0
    on_s: float = 5.0
    off_s: float = 5.0
    users: int | None = None
    ramp_s: float = 0.0
    requests: int | None = None
    duration_s: float | None = None
    max_concurrency: int | None = None
    abort_share: float = 0.0  # Share of requests that the client aborts half-way.
    deadline_s: float | None = None
    warmup: int = 0  # Requests before the run, which do not count.
    settle_s: float = 0.0  # Seconds at the start of the run; requests of this time do not count.
    seed: int = 0
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)  # Seconds by objective, see OBJECTIVES.
    attainment: float | None = None

    @property
    def closed_loop(self) -> bool:
        """Whether users wait for their answers before they send again."""
        return self.users is not None

    def key_of(self, session: int) -> str:
        """Returns the API key of a session, "" for none."""
        return self.api_keys[session % len(self.api_keys)] if self.api_keys else ""

    def described(self) -> dict[str, Any]:
        """Returns the configuration as JSON values for a report, without secrets."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "api_keys"}
        plain = {k: str(v) if isinstance(v, LengthDistribution | Path) else v for k, v in values.items()}
        return {**plain, "slo": dict(self.slo), "vocab": list(self.vocab), "api_keys": len(self.api_keys)}

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> LoadConfig:
        """Parses flags as typed; None means absent. Raises ConfigError."""
        typed = {name: value for name, value in flags.items() if value is not None and value != []}
        fields: dict[str, Any] = {name: typed[name] for name in ("model", "stream", "ignore_eos") if name in typed}
        for name, known in CHOICES.items():
            fields[name] = typed.get(name, known[0])
            if fields[name] not in known:
                raise _error(name, f" must be one of {', '.join(known)}, not {fields[name]!r}")
        fields["form"] = _form(fields.pop("prompts"), fields["endpoint"])
        fields["url"] = _url(str(typed.get("url", cls.__dataclass_fields__["url"].default)), fields["protocol"])
        fields["api_keys"] = _keys(typed.get("api_key"))
        parsers: dict[str, Callable[[str], Any]] = {
            **{n: partial(LengthDistribution.parse, _flag(n)) for n in ("input_tokens", "output_tokens", "turns")},
            **{name: partial(_number, name, *limits) for name, limits in NUMBERS.items()},
            **{name: partial(_whole, name, *limits) for name, limits in WHOLE_NUMBERS.items()},
            "trace": Path,
            "vocab": _vocab,
            "slo": lambda text: parse_slo(text, OBJECTIVES),
        }
        config = cls(**fields, **{name: parse(typed[name]) for name, parse in parsers.items() if name in typed})
        _check(config, typed)
        if config.trace is None and config.requests is None and config.duration_s is None:
            return dataclasses.replace(config, duration_s=DEFAULT_SECONDS)
        return config


def _check(config: LoadConfig, typed: Mapping[str, Any]) -> None:
    """Checks flags against each other."""
    if config.rate is None and config.users is None and config.trace is None:
        raise ConfigError("--rate, --users or --trace is needed: one of them sets the request times", field="rate")
    if config.rate is not None and config.users is not None:
        raise ConfigError("--rate and --users exclude each other: an open loop or a closed one", field="users")
    traced = config.trace is not None
    #: (flags, whether they have an effect, the reason if they have none)
    rules = (
        (("speed",), config.rate is config.users is None, "replays a trace's own times, without --rate and --users"),
        (("arrivals",), config.rate is not None, "needs --rate"),
        (("burstiness",), config.arrivals == "gamma", "needs --arrivals gamma"),
        (("on_s", "off_s"), config.arrivals == "onoff", "needs --arrivals onoff"),
        (("ramp_s",), config.closed_loop, "needs --users"),
        (("length_scale", "max_input_tokens", "max_output_tokens"), traced, "needs --trace"),
        (SYNTHETIC, not traced, "does not apply to a trace, which defines its prompts"),
        (("prefixes",), config.prefix_tokens > 0, "needs --prefix-tokens"),
        (("think_s",), config.closed_loop or config.turns != ONE, "needs --users, or --turns"),
    )
    for names, effective, why in rules:
        if not effective and (useless := [name for name in names if name in typed]):
            raise _error(useless[0], f": {why}")
    if config.protocol == "grpc" and not config.stream:
        raise ConfigError("--no-stream: the gRPC API always streams", field="stream")
    if config.attainment is not None and not config.slo:
        raise ConfigError("--attainment needs --slo", field="attainment")
    if not config.stream and set(config.slo) & {"ttft", "itl", "gap"}:
        raise ConfigError("--slo: without streams only e2e is known", field="slo")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _error(name: str, fault: str) -> ConfigError:
    return ConfigError(f"--{_flag(name)}{fault}", field=_flag(name))


def _form(prompts: str, endpoint: str) -> PromptForm:
    if prompts == "ids" and endpoint == "chat":
        raise _error("prompts", ": conversations are text; ids need --endpoint completions")
    return "ids" if prompts == "ids" or (prompts == "auto" and endpoint == "completions") else "text"


def _url(text: str, protocol: str) -> str:
    """Normalises a URL: without /v1 for REST, HOST:PORT for gRPC."""
    scheme, found, rest = text.rpartition("://")
    rest = rest.rstrip("/").removesuffix("/v1").rstrip("/")
    if protocol == "grpc":
        if (found and scheme != "grpc") or ":" not in rest or "/" in rest:
            raise ConfigError(f"--url: gRPC needs HOST:PORT without TLS, not {text!r}", field="url")
        return rest
    if (found and scheme not in ("http", "https")) or not rest:
        raise ConfigError(f"--url: {text!r} is not an http or https URL", field="url")
    return f"{scheme or 'http'}://{rest}"


def _keys(typed: Sequence[str] | None) -> tuple[str, ...]:
    keys = tuple(typed or ())
    if not all(key and key.isascii() and key.isprintable() for key in keys):
        raise ConfigError("--api-key: a key is printable ASCII", field="api-key")
    return keys


def _vocab(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon or not low.isdecimal() or not high.isdecimal() or not int(low) < int(high) < 1 << 32:
        raise ConfigError(f"--vocab: {text!r} is not a range of token ids like 1000:30000", field="vocab")
    return int(low), int(high)


def _number(name: str, low: float, high: float, above: bool, text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if low <= value <= high and not (above and value == low):
            return value
    raise _error(name, f" must be a number {'above' if above else 'from'} {low:g} to {high:g}, not {text!r}")


def _whole(name: str, low: int, high: int, text: str) -> int:
    with suppress(ValueError):
        if low <= int(text) <= high:
            return int(text)
    raise _error(name, f" must be whole, {low} to {high}, not {text!r}")


def parse_rates(text: str) -> tuple[float, ...]:
    """Parses rising rates like `1,2,4`. Raises ConfigError."""
    with suppress(ValueError):
        rates = tuple(float(part) for part in text.split(","))
        if all(0 < rate < 1e6 for rate in rates) and sorted(set(rates)) == list(rates):
            return rates
    raise ConfigError(f"--rates: {text!r} is not a rising list of rates like 1,2,4", field="rates")


def sweep(
    config: LoadConfig, rates: tuple[float, ...], measure: Callable[[LoadConfig], Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yields the result of `measure` for each rate, including the first that fails. config.slo must be set.

    Every rate has its own seed. Equal prompts would be in the server's prefix cache.
    """
    for number, rate in enumerate(rates):
        document = measure(dataclasses.replace(config, rate=rate, seed=config.seed + number))
        yield document
        if document["stopped"] or not slo_kept(document, config):
            return


def slo_kept(document: Mapping[str, Any], config: LoadConfig) -> bool:
    """Returns whether the share of good requests reaches the attainment, 0.9 if it is not set."""
    return bool(document["goodput"]["share"] >= (config.attainment or 0.9))
