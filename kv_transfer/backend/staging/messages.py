"""Messages between the two ends of staged writes, and the description of a staging area.

A message is big endian: a tag of four bytes, the session, and the fields of its kind. Slots and blocks are lists of
32-bit numbers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass

from common.errors import TransferFailed, describe

_HELLO, _GRANT, _LAND, _LANDED = b"BTH1", b"BTH2", b"BTH3", b"BTH4"
_SESSION = struct.Struct(">4sQ")
_WINDOW = struct.Struct(">4sQII")
_PIECE = struct.Struct(">4sQQHHI")  #: Tag, session, write, piece, number of pieces, number of blocks.
_RESULT = struct.Struct(">4sQQHB")


@dataclass(frozen=True, slots=True)
class Hello:
    """The writer begins a session and asks for a window."""

    session: int

    def pack(self) -> bytes:
        return _SESSION.pack(_HELLO, self.session)


@dataclass(frozen=True, slots=True)
class Grant:
    """The receiver gives the writer a window of its area: `count` slots from `first` on. Without slots it refuses."""

    session: int
    first: int
    count: int

    def pack(self) -> bytes:
        return _WINDOW.pack(_GRANT, self.session, self.first, self.count)


@dataclass(frozen=True, slots=True)
class Land:
    """The bytes of a piece are in the window: the receiver copies slots[i] to blocks[i] of its pool for every i."""

    session: int
    write: int
    piece: int
    num_pieces: int  #: Number of pieces of the write.
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    notification: bytes  #: The notification of the write.

    def pack(self) -> bytes:
        count = len(self.slots)
        head = _PIECE.pack(_LAND, self.session, self.write, self.piece, self.num_pieces, count)
        return head + struct.pack(f">{2 * count}I", *self.slots, *self.blocks) + self.notification


@dataclass(frozen=True, slots=True)
class Landed:
    """The receiver has copied a piece into its pool, or could not (not ok)."""

    session: int
    write: int
    piece: int
    ok: bool

    def pack(self) -> bytes:
        return _RESULT.pack(_LANDED, self.session, self.write, self.piece, self.ok)


StagingMessage = Hello | Grant | Land | Landed


def unpack_message(payload: bytes) -> StagingMessage:
    """Raises ValueError for a malformed message."""
    try:
        match payload[:4]:
            case b"BTH1":
                return Hello(*_SESSION.unpack(payload)[1:])
            case b"BTH2":
                return Grant(*_WINDOW.unpack(payload)[1:])
            case b"BTH3":
                return _unpack_land(payload)
            case b"BTH4":
                _, session, write, piece, ok = _RESULT.unpack(payload)
                return Landed(session, write, piece, bool(ok))
    except struct.error as e:
        raise ValueError(str(e)) from e
    raise ValueError(f"unknown message {payload[:4]!r}")


def _unpack_land(payload: bytes) -> Land:
    _, session, write, piece, num_pieces, count = _PIECE.unpack_from(payload)
    places = struct.unpack_from(f">{2 * count}I", payload, _PIECE.size)
    notification = payload[_PIECE.size + 8 * count :]
    return Land(session, write, piece, num_pieces, places[:count], places[count:], notification)


@dataclass(frozen=True, slots=True)
class AreaDescription:
    """The facts about a pod's staging area that a writer needs."""

    base: int  #: Address of slot 0.
    slots: int
    slot_bytes: int
    window: int  #: Slots of a window.
    file: str  #: Name of the shared file; "" if the area is not shared.
    token: str  #: Proof that two pods have the same file, in hex.

    def pack(self, agent: bytes) -> bytes:
        """Packs the description and the metadata of the agent that moves the area's bytes."""
        packed = json.dumps(asdict(self)).encode()
        return len(packed).to_bytes(4, "little") + packed + agent


def unpack_description(metadata: bytes) -> tuple[AreaDescription, bytes]:
    """Unpacks the bytes of `pack`: the description of an area and the metadata of its agent. Raises TransferFailed."""
    try:
        end = 4 + int.from_bytes(metadata[:4], "little")
        head = json.loads(metadata[4:end])
        if not isinstance(head, dict):
            raise ValueError("it is not an object")
        base, slots, slot_bytes, window = (int(head[name]) for name in ("base", "slots", "slot_bytes", "window"))
        token = bytes.fromhex(str(head["token"])).hex()
        return AreaDescription(base, slots, slot_bytes, window, str(head["file"]), token), metadata[end:]
    except KeyError as e:
        raise TransferFailed(f"the description of the staging area is malformed: {describe(e)}") from e
    except (ValueError, TypeError) as e:
        raise TransferFailed(f"the description of the staging area is malformed: {e}") from e
