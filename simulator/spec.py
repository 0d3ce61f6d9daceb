"""A simulated cluster and its faults, as the user describes them."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from common.types import Role
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster to simulate."""

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
