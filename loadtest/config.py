"""The configuration of a load test: fields, limits of the flags, and the errors that refuse them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from common.errors import ConfigError
from loadtest.slo import parse_slo
from loadtest.workload import arrivals
from loadtest.workload.lengths import LengthDistribution

OBJECTIVES = ("ttft", "itl", "gap", "e2e")
DEFAULT_SECONDS = 30.0

Protocol = Literal["rest", "grpc"]
Endpoint = Literal["chat", "completions"]
PromptForm = Literal["text", "ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The configuration of one run. Arrivals come from exactly one source: rate, users, or the times of the trace."""

    url: str = "http://127.0.0.1:8000"
    protocol: Protocol = "rest"
    endpoint: Endpoint = "chat"
    model: str = ""
    #: Sessions use the keys in turn.
    api_keys: tuple[str, ...] = ()
    stream: bool = True
    form: PromptForm = "text"
    #: Token ids of synthetic prompts: from the first to below the second.
    vocab: tuple[int, int] = (1_000, 30_000)
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
    turns: LengthDistribution = LengthDistribution(1, 1)  # noqa: RUF009
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
    #: Share of requests that the client aborts half-way.
    abort_share: float = 0.0
    deadline_s: float | None = None
    #: Requests before the run, which do not count.
    warmup: int = 0
    #: Seconds at the start of the run whose requests do not count.
    settle_s: float = 0.0
    seed: int = 0
    #: Seconds by objective, see OBJECTIVES.
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)
    attainment: float | None = None

    @property
    def closed_loop(self) -> bool:
        """Whether users wait for their answers before they send again."""
        return self.users is not None

    def described(self) -> dict[str, Any]:
        """Returns the configuration as JSON values for a report, without secrets."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "api_keys"}
        plain = {k: str(v) if isinstance(v, LengthDistribution | Path) else v for k, v in values.items()}
        return {**plain, "slo": dict(self.slo), "vocab": list(self.vocab), "api_keys": len(self.api_keys)}

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> LoadConfig:
        """Parses flags as typed; None means absent. Raises ConfigError."""
        return _checked(cls, {name: value for name, value in flags.items() if value is not None and value != []})


def _checked(cls: type[LoadConfig], typed: Mapping[str, Any]) -> LoadConfig:
    def number(name: str, low: float, high: float = 1e9, *, above: bool = False) -> None:
        if name in typed:
            fields[name] = _number(name, typed[name], low, high, above=above)

    def whole(name: str, low: int, high: int = 1_000_000_000) -> None:
        if name in typed:
            fields[name] = _whole(name, typed[name], low, high)

    fields: dict[str, Any] = {name: typed[name] for name in ("model", "stream", "ignore_eos") if name in typed}
    fields["protocol"] = protocol = cast(Protocol, _one_of("protocol", typed, ("rest", "grpc")))
    fields["endpoint"] = endpoint = cast(Endpoint, _one_of("endpoint", typed, ("chat", "completions")))
    fields["arrivals"] = _one_of("arrivals", typed, arrivals.KINDS)
    fields["form"] = _form(_one_of("prompts", typed, ("auto", "text", "ids")), endpoint)
    fields["url"] = _url(str(typed.get("url", cls.__dataclass_fields__["url"].default)), protocol)
    fields["api_keys"] = _keys(typed.get("api_key"))
    for name in ("input_tokens", "output_tokens", "turns"):
        if name in typed:
            fields[name] = LengthDistribution.parse(_flag(name), typed[name])
    if "trace" in typed:
        fields["trace"] = Path(typed["trace"])
    if "vocab" in typed:
        fields["vocab"] = _vocab(typed["vocab"])
    for name in ("speed", "length_scale", "rate", "on_s", "duration_s", "deadline_s"):
        number(name, 0, above=True)
    for name in ("think_s", "off_s", "ramp_s", "settle_s"):
        number(name, 0)
    number("burstiness", 0.05, 20)
    number("temperature", 0, 2)
    number("abort_share", 0, 1)
    number("attainment", 0, 1, above=True)
    whole("users", 1, 100_000)
    whole("seed", 0, 1 << 62)
    whole("warmup", 0)
    whole("prefix_tokens", 0)
    for name in ("prefixes", "requests", "max_concurrency", "max_input_tokens", "max_output_tokens"):
        whole(name, 1)
    if "slo" in typed:
        fields["slo"] = parse_slo(typed["slo"], OBJECTIVES)
    return _consistent(cls(**fields), typed)


def _consistent(config: LoadConfig, typed: Mapping[str, Any]) -> LoadConfig:
    """Checks flags against each other and sets the default duration."""

    def refuse(name: str, why: str) -> None:
        if name in typed:
            raise ConfigError(f"--{_flag(name)}: {why}", field=_flag(name))

    if config.rate is None and config.users is None and config.trace is None:
        raise ConfigError("--rate, --users or --trace is needed: one of them sets the request times", field="rate")
    if config.rate is not None and config.users is not None:
        raise ConfigError("--rate and --users exclude each other: an open loop or a closed one", field="users")
    timed = config.rate is None and config.users is None
    if not timed:
        refuse("speed", "replays a trace's own times, without --rate and --users")
    if config.rate is None:
        refuse("arrivals", "needs --rate")
    if config.arrivals != "gamma":
        refuse("burstiness", "needs --arrivals gamma")
    if config.arrivals != "onoff":
        refuse("on_s", "needs --arrivals onoff")
        refuse("off_s", "needs --arrivals onoff")
    if not config.closed_loop:
        refuse("ramp_s", "needs --users")
    if config.trace is None:
        for name in ("length_scale", "max_input_tokens", "max_output_tokens"):
            refuse(name, "needs --trace")
    else:
        for name in ("input_tokens", "output_tokens", "prefix_tokens", "prefixes", "turns"):
            refuse(name, "does not apply to a trace, which defines its prompts")
    if config.prefix_tokens == 0:
        refuse("prefixes", "needs --prefix-tokens")
    if not config.closed_loop and config.turns == LengthDistribution(1, 1):
        refuse("think_s", "needs --users, or --turns")
    if config.protocol == "grpc" and not config.stream:
        raise ConfigError("--no-stream: the gRPC API always streams", field="stream")
    if config.attainment is not None and not config.slo:
        raise ConfigError("--attainment needs --slo", field="attainment")
    if not config.stream and set(config.slo) & {"ttft", "itl", "gap"}:
        raise ConfigError("--slo: without streams only e2e is known", field="slo")
    if config.trace is None and config.requests is None and config.duration_s is None:
        return dataclasses.replace(config, duration_s=DEFAULT_SECONDS)
    return config


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _one_of(name: str, typed: Mapping[str, Any], known: Sequence[str]) -> str:
    value: str = typed.get(name, known[0])
    if value not in known:
        raise ConfigError(f"--{_flag(name)} must be one of {', '.join(known)}, not {value!r}", field=_flag(name))
    return value


def _form(prompts: str, endpoint: str) -> PromptForm:
    if prompts == "ids" and endpoint == "chat":
        raise ConfigError("--prompts: conversations are text; ids need --endpoint completions", field="prompts")
    if prompts == "auto":
        return "text" if endpoint == "chat" else "ids"
    return cast(PromptForm, prompts)


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
    if any(not key.isascii() or not key.isprintable() or not key for key in keys):
        raise ConfigError("--api-key: a key is printable ASCII", field="api-key")
    return keys


def _vocab(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon or not low.isdecimal() or not high.isdecimal() or not int(low) < int(high) < 1 << 32:
        raise ConfigError(f"--vocab: {text!r} is not a range of token ids like 1000:30000", field="vocab")
    return int(low), int(high)


def _number(name: str, text: str, low: float, high: float, *, above: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high or (above and value == low):
        limits = f"above {low:g}" if above else f"from {low:g}"
        raise ConfigError(f"--{_flag(name)} must be a number {limits} to {high:g}, not {text!r}", field=_flag(name))
    return value


def _whole(name: str, text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(f"--{_flag(name)} must be whole, {low} to {high}, not {text!r}", field=_flag(name))
    return value
