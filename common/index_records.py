"""What the prefix index knows about a pod, and how it is written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from common.types import Role


class Tier(StrEnum):
    """Where a pod holds a block."""

    DEVICE = "device"
    HOST = "host"


class Held(NamedTuple):
    """Blocks of a chain that a pod holds, from its start: so many on the device, and `blocks` in any tier."""

    device_blocks: int = 0
    total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PodRecord:
    """Who a pod is; fixed for the life of a generation. address is host:port of its gRPC server."""

    pod: str
    generation: int
    address: str
    role: Role
    model: str
    scope: str
    fingerprint: str
    block_size: int
    max_model_len: int
    num_blocks: int

    def to_fields(self) -> list[str]:
        """Field, value, ... for a Redis hash."""
        return [str(x) for item in asdict(self).items() for x in item]

    @classmethod
    def from_fields(cls, raw: Mapping[str, str]) -> PodRecord:
        """Reads what to_fields wrote, and more that a newer pod may write. Raises KeyError, ValueError."""
        return cls(
            pod=raw["pod"],
            generation=int(raw["generation"]),
            address=raw["address"],
            role=Role(raw["role"]),
            model=raw["model"],
            scope=raw["scope"],
            fingerprint=raw["fingerprint"],
            block_size=int(raw["block_size"]),
            max_model_len=int(raw["max_model_len"]),
            num_blocks=int(raw["num_blocks"]),
        )


@dataclass(frozen=True, slots=True)
class PodLoad:
    """How busy a pod says it is, and how fast it measured itself to be; a rate or time of 0 is not known yet.

    queued_tokens: prompt tokens that wait for computing. running, waiting, reserved: sequences in the engine, and those
    whose KV is still to come. free_blocks: free or evictable.
    prefill_rate: prompt tokens per second of full steps; prefill_overhead_s: what a prompt takes beyond that.
    step_s + step_slope_s * sequences: a decode step. transfer_rate: prompt tokens per second whose KV moves;
    hand_off_s: what the end of a hand-off takes beyond that. pull_s: what pulling takes beyond moving bytes.
    """

    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0
    reserved: int = 0
    free_blocks: int = 0
    draining: bool = False
    prefill_rate: float = 0.0
    prefill_overhead_s: float = 0.0
    step_s: float = 0.0
    step_slope_s: float = 0.0
    transfer_rate: float = 0.0
    hand_off_s: float = 0.0
    pull_s: float = 0.0

    @property
    def has_decode_times(self) -> bool:
        """It has decoded."""
        return self.step_s > 0 or self.step_slope_s > 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str) -> PodLoad:
        """Reads what to_json wrote; fields of a newer pod are ignored. Raises ValueError, TypeError."""
        values = json.loads(raw)
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass(frozen=True, slots=True)
class PodStatus:
    """A live pod as the index shows it."""

    record: PodRecord
    load: PodLoad

    @property
    def draining(self) -> bool:
        return self.load.draining


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pod that a request could go to.

    cost_s: without what any gateway booked there in the last age_s seconds; unit_s: what each unit of that adds.
    units: what this request would book: tokens to compute, or one sequence.
    """

    pod: str
    cost_s: float
    cost_per_unit_s: float
    units: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """The index of the candidate that has the booking now, and the units that other requests booked on each lately."""

    chosen: int
    booked: tuple[int, ...]
