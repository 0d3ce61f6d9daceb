"""Records, keys and binary formats of the prefix index, shared by publisher and reader.

All keys of a scope carry the hash tag {scope}, so that every script runs on one slot of a Redis Cluster. The only other
key is `kv:scopes`; no script uses it. Required: Redis or Valkey 7.2.

    block of a prompt --hash--> 16 bytes --first 8--> sets own:, host: and disk:POD:GEN (blocks of a pod by tier)
                                 one hash in `sampling_interval` --> posting in `where`: slots of the pods that hold it
    slot (2 bytes) --slots--> POD:GEN
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from common.types import PodLoad, Role

LUA_DIR = Path(__file__).parent / "lua"  #: The folder of the index's Lua scripts.
SCOPES_KEY = "kv:scopes"  #: HASH scope -> model. Gateways find the scopes in it.
STORED_HASH_BYTES = 8  #: Leading bytes of each 16-byte block hash that sets and packed chains contain.
SAMPLED_TOKENS = 128  #: Tokens per sampled block, on average.

LEASE_MS = 10_000
HELD_TTL_S = 60
HOT_TTL_S = 90
INFO_TTL_S = 3_600
PODS_TTL_S = 86_400


class CacheTier(StrEnum):
    """The memory that a pod holds a block in."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class PrefixHits(NamedTuple):
    """Number of leading blocks of a prompt that a pod holds."""

    device_blocks: int = 0  #: In device memory.
    total_blocks: int = 0  #: In any tier, at least device_blocks.
    disk_blocks: int = 0  #: Those of total_blocks, at its end, that only the disk has.


@dataclass(frozen=True, slots=True)
class PodRecord:
    """Identity of a pod; fixed for one generation, but for the role."""

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
        numbers = {name: int(raw[name]) for name in ("generation", "block_size", "max_model_len", "num_blocks")}
        if min(numbers.values()) < 0 or not numbers["block_size"]:
            raise ValueError(f"a number is too small: {numbers}")
        texts = {name: raw[name] for name in ("pod", "address", "model", "scope", "fingerprint")}
        fields: dict[str, Any] = {**texts, **numbers, "role": Role(raw["role"])}
        return cls(**fields)


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
    chosen: int  #: Position of the booked candidate in its group.
    booked: tuple[int, ...]  #: Per candidate, the units that other requests booked in its last age_s seconds.


class IndexKeys:
    """The Redis keys of one scope."""

    __slots__ = ("gateways", "pods", "postings", "prefix", "slots", "sweep")

    def __init__(self, scope: str) -> None:
        self.prefix = prefix = f"kv:{{{scope}}}:"
        self.pods, self.gateways = f"{prefix}pods", f"{prefix}gateways"
        self.postings, self.slots, self.sweep = f"{prefix}where", f"{prefix}slots", f"{prefix}sweep"

    def generation(self, pod: str) -> str:
        return f"{self.prefix}gen:{pod}"

    def info(self, pod: str) -> str:
        return f"{self.prefix}info:{pod}"

    def lease(self, pod: str) -> str:
        return f"{self.prefix}lease:{pod}"

    def load(self, pod: str) -> str:
        return f"{self.prefix}load:{pod}"

    def held_blocks(self, pod: str, generation: int, tier: CacheTier = CacheTier.DEVICE) -> str:
        return f"{self.prefix}{'own' if tier is CacheTier.DEVICE else tier}:{pod}:{generation}"

    def shadow(self, pod: str, generation: int, number: int, tier: CacheTier = CacheTier.DEVICE) -> str:
        return f"{self.held_blocks(pod, generation, tier)}:{number}"

    def batch_number(self, pod: str, generation: int) -> str:
        return f"{self.prefix}seq:{pod}:{generation}"

    def hot_prefixes(self, pod: str) -> str:
        return f"{self.prefix}hot:{pod}"

    def bookings(self, pod: str) -> str:
        return f"{self.prefix}resv:{pod}"

    def booking_units(self, pod: str) -> str:
        return f"{self.prefix}resv_tokens:{pod}"


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Returns the first 8 bytes of each 16-byte block hash, concatenated: the format of the scripts."""
    return memoryview(b"".join(hashes)).cast("Q")[::2].tobytes()


def sampling_interval(block_size: int) -> int:
    """Returns n, where one block in n has a posting, chosen by its hash: about one per SAMPLED_TOKENS prompt tokens."""
    return max(1, SAMPLED_TOKENS // block_size)


def pack_sampled_positions(packed: bytes, every: int) -> bytes:
    """Returns the positions (from 1) of the sampled blocks of a packed chain: uint32, little-endian."""
    chosen = packed[::STORED_HASH_BYTES].translate(_chooser(every))
    numbers = array("I", compress(range(1, len(chosen) + 1), chosen))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


@cache
def _chooser(every: int) -> bytes:
    """Returns a translation table from the first byte of a hash to 1 (the block is sampled) or 0."""
    return bytes(value % every == 0 for value in range(256))


def unpack_slots(posting: bytes) -> Sequence[int]:
    """Returns the slots in a posting: uint16, little-endian."""
    slots = array("H", posting)
    if sys.byteorder == "big":
        slots.byteswap()
    return slots
