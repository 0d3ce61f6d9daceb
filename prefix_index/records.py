"""Records of the prefix index: pods, their status, look-up results and bookings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple

from common.types import PodLoad, Role


class CacheTier(StrEnum):
    """The memory that a pod holds a block in."""

    DEVICE = "device"
    HOST = "host"


class PrefixHits(NamedTuple):
    """Number of leading blocks of a prompt that a pod holds."""

    device_blocks: int = 0  #: In device memory.
    total_blocks: int = 0  #: In any tier, at least device_blocks.


@dataclass(frozen=True, slots=True)
class PodRecord:
    """Identity of a pod; fixed for one generation."""

    pod: str
    generation: int
    address: str  #: host:port of the pod's gRPC server.
    role: Role
    model: str
    scope: str  #: First 8 hex digits of `fingerprint`: the key space in the index.
    fingerprint: str  #: Fingerprint of the pod's KV layout.
    block_size: int  #: Tokens.
    max_model_len: int
    num_blocks: int  #: Size of the KV pool.

    def to_fields(self) -> list[str]:
        """Returns the fields and values of a Redis hash: name, value, name, value, ..."""
        return [str(x) for item in asdict(self).items() for x in item]

    @classmethod
    def from_fields(cls, raw: Mapping[str, str]) -> PodRecord:
        """Parses the record of `to_fields`; ignores unknown fields (of a newer pod). Raises KeyError, ValueError."""
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
    """A live pod in the index."""

    record: PodRecord
    load: PodLoad

    @property
    def draining(self) -> bool:
        return self.load.draining


@dataclass(frozen=True, slots=True)
class BookingCandidate:
    """A pod that a request can be booked on, with its cost for the request.

    cost = cost_s + cost_per_unit_s * (units that all gateways booked on the pod in the last age_s seconds)
    """

    pod: str
    cost_s: float  #: Cost without those bookings.
    cost_per_unit_s: float
    units: int  #: Units that this request books: prompt tokens, or one sequence.
    age_s: float


@dataclass(frozen=True, slots=True)
class BookingResult:
    """Outcome of a booking."""

    chosen: int  #: Position of the booked candidate in its group.
    booked: tuple[int, ...]  #: Per candidate, the units that other requests booked in its last age_s seconds.
