"""The cluster to simulate and its faults, the outcome of each request, the summary of a run, and the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.types import Role
from loadtest.slo import parse_slo, percentile
from simulator.hardware_rates import HardwareRates
from simulator.pod import PodShape
from simulator.policies import POLICIES

MAX_PODS = 1024


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """An outage from `at_s` for `for_s` seconds."""

    at_s: float
    for_s: float
    pod: str = ""  # Name of a pod that dies and restarts with an empty cache; "" is an outage of the index.
    slower: float = 0.0  # The pod does not die; its steps take so many times as long.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    rates: HardwareRates
    prefill: int  # Number of prefill pods.
    decode: int = 0  # Number of decode pods. With 0 a request ends with its first token.
    gateways: int = 1
    policy: str = "cost"
    pull: bool = False  # Prefill pods pull prefixes from other pods.
    block_size: int = 512
    chunk_tokens: int = 2048
    prefill_blocks: int = 0  # KV blocks of a pod; 0 takes as many as the KV memory of `rates` holds.
    decode_blocks: int = 0
    prefill_seqs: int = 64  # Sequences that a pod runs at once.
    decode_seqs: int = 256
    lag_s: float = 0.0  # Delay of a change on its way to the index, on top of the publisher's batching.
    report_s: float = 0.5  # Period in which a gateway polls the pods.
    overhead_s: float = 0.001  # Time that the gateway adds to a request.
    warm_s: float = 0.0  # Requests that arrive earlier do not count in the summary's times and rates.
    seed: int = 0
    faults: tuple[SimulatedFault, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy}", field="policy")
        for name in ("prefill", "gateways", "block_size", "chunk_tokens", "prefill_seqs", "decode_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        if self.decode < 0 or self.prefill + self.decode > MAX_PODS:
            raise ConfigError(f"at most {MAX_PODS} pods can be simulated", field="prefill")

    def shape(self, role: Role) -> PodShape:
        prefill, decode = (self.prefill_blocks, self.prefill_seqs), (self.decode_blocks, self.decode_seqs)
        own, seqs = prefill if role is Role.PREFILL else decode
        blocks = own or self.rates.pool_blocks(self.block_size)
        return PodShape(block_size=self.block_size, num_blocks=blocks, chunk_tokens=self.chunk_tokens, max_seqs=seqs)


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request. After a run either `done` or `refused` is true."""

    arrival_s: float
    prompt_len: int
    output_len: int
    ttft_s: float | None = None  # Time to the first token; None if there was none.
    mean_itl_s: float | None = None  # Mean time between tokens; None with fewer than two.
    hit_tokens: int = 0  # Prompt tokens that the prefill pod had in its cache.
    expected_hit_tokens: int = 0  # Prompt tokens that the gateway expected in the cache.
    attempts: int = 0
    done: bool = False  # The last token came.
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in figures. Percentiles are of the requests that got a token."""

    requests: int
    refused: int
    retried: int
    hit_rate: float  # Share of prompt tokens that were cached.
    promised_rate: float  # Share of prompt tokens that gateways expected to be cached.
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    gap_p50_s: float
    gap_p99_s: float
    computed_tokens: int
    imbalance: float  # Prompts of the pod with the most, over the mean.
    cpu_s: float  # CPU seconds of the simulation itself.


def summarise(outcomes: Sequence[RequestOutcome], prompts_per_pod: Sequence[int], **more: Any) -> RunSummary:
    """Returns the summary of the requests. more: fields that come from the run."""
    times = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    gaps = [o.mean_itl_s for o in outcomes if o.mean_itl_s is not None]
    tokens = sum(o.prompt_len for o in outcomes if o.ttft_s is not None)
    mean = sum(prompts_per_pod) / max(1, len(prompts_per_pod))
    return RunSummary(
        requests=len(outcomes),
        refused=sum(o.refused for o in outcomes),
        retried=sum(o.attempts > 1 for o in outcomes),
        hit_rate=sum(o.hit_tokens for o in outcomes) / max(1, tokens),
        promised_rate=sum(o.expected_hit_tokens for o in outcomes) / max(1, tokens),
        ttft_p50_s=percentile(times, 0.5),
        ttft_p90_s=percentile(times, 0.9),
        ttft_p99_s=percentile(times, 0.99),
        ttft_mean_s=sum(times) / max(1, len(times)),
        gap_p50_s=percentile(gaps, 0.5),
        gap_p99_s=percentile(gaps, 0.99),
        imbalance=max(prompts_per_pod, default=0) / mean if mean else 1.0,
        **more,
    )


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: most requests get their tokens in time."""

    ttft_s: float  # Longest time to the first token.
    itl_s: float  # Longest mean time between tokens.
    attainment: float = 0.9  # Share of all requests that must be within both.

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"--attainment must be above 0 and at most 1, not {self.attainment}", field="attainment")

    def is_met_by(self, outcome: RequestOutcome) -> bool:
        """Returns whether a request was served in time; a refused one was not."""
        in_time = outcome.done and outcome.ttft_s is not None and outcome.ttft_s <= self.ttft_s
        return in_time and (outcome.mean_itl_s is None or outcome.mean_itl_s <= self.itl_s)

    @classmethod
    def parse(cls, text: str, attainment: float = 0.9) -> Slo:
        """Parses "ttft=2s,itl=50ms". Raises ConfigError."""
        objectives = parse_slo(text, ("ttft", "itl"))
        if missing := [name for name in ("ttft", "itl") if name not in objectives]:
            raise ConfigError(f"--slo: {missing[0]} is missing; expected both, as in ttft=2s,itl=50ms", field="slo")
        return cls(objectives["ttft"], objectives["itl"], attainment)
