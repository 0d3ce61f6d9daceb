"""What the prefix index knows about a pod, and how it is written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple

from common.types import PodLoad, Role


class CacheTier(StrEnum):
    """Where a pod holds a block."""

    DEVICE = "device"
    HOST = "host"


class PrefixHits(NamedTuple):
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
class PodStatus:
    """A live pod as the index shows it."""

    record: PodRecord
    load: PodLoad

    @property
    def draining(self) -> bool:
        return self.load.draining


@dataclass(frozen=True, slots=True)
class BookingCandidate:
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
class BookingResult:
    """The index of the candidate that has the booking now, and the units that other requests booked on each lately."""

    chosen: int
    booked: tuple[int, ...]
