"""The bytes of a segment, a file of a file tier: its header, and the header before the content of each block.

    segment  | header: magic, version, block bytes, fingerprint, codec, CRC | record | record | ...      append-only
    record   | magic, length, hash, parent's hash, CRC of the content, CRC of this | content |

Headers are little-endian, and padded with zeros. Each ends with a CRC-32 of the fields before it. A file of the shared
tier is a segment with one record.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from common.block_hash import HASH_BYTES
from engine.kv.tiers.cold_codec import BlockCodec

VERSION = 1
SEGMENT_SUFFIX = ".kv"
SEGMENT_HEADER_BYTES, RECORD_HEADER_BYTES = 128, 64
_SEGMENT = struct.Struct("<8sIQ48s16s")  # Magic, version, block bytes, fingerprint, codec (zeros: none)
_RECORD = struct.Struct("<4sI16s16sI")  # Magic, and the fields of RecordHeader
_CRC = struct.Struct("<I")
_SEGMENT_MAGIC, _RECORD_MAGIC = b"BATONKV\n", b"KVB\n"
_NO_PARENT = bytes(HASH_BYTES)


def segment_name(number: int) -> str:
    """Returns the name of the file of a segment."""
    return f"{number:012d}{SEGMENT_SUFFIX}"


def segment_header(block_bytes: int, fingerprint: str, codec: str) -> bytes:
    """Returns the header of a segment. `codec` is empty if the content of a record is the block itself."""
    head = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, block_bytes, fingerprint.encode()[:48], codec.encode())
    return _with_crc(head, SEGMENT_HEADER_BYTES)


def why_not_used(header: bytes, own: bytes) -> str:
    """Says why a segment with `header`, which is not the pod's `own`, is not used."""
    if len(header) == SEGMENT_HEADER_BYTES and _has_crc(header, _SEGMENT.size):
        theirs, ours = _SEGMENT.unpack_from(header), _SEGMENT.unpack_from(own)
        if theirs[:-1] == ours[:-1]:
            names = [name.rstrip(b"\0").decode(errors="replace") or "none" for name in (theirs[-1], ours[-1])]
            return "its blocks have the codec {}, those of this pod {}".format(*names)
    return "made for another model, setting or version, or damaged"


class RecordHeader(NamedTuple):
    """What stands before the content of a block."""

    content_bytes: int
    key: bytes  # Hash of the block
    parent: bytes  # Hash of the block before it; empty for the first block of a prompt
    content_crc: int

    @classmethod
    def of(cls, key: bytes, parent: bytes, content: memoryview) -> RecordHeader:
        """Returns the header of a block."""
        return cls(len(content), key, parent, zlib.crc32(content))

    @classmethod
    def parse(cls, raw: bytes | bytearray) -> RecordHeader | None:
        """Returns the header in these bytes; None if they are cut or damaged."""
        if len(raw) != RECORD_HEADER_BYTES or not _has_crc(raw, _RECORD.size):
            return None
        magic, content_bytes, key, parent, content_crc = _RECORD.unpack_from(raw)
        if magic != _RECORD_MAGIC:
            return None
        return cls(content_bytes, key, b"" if parent == _NO_PARENT else parent, content_crc)

    def encode(self) -> bytes:
        """Returns the bytes."""
        parent = self.parent or _NO_PARENT
        head = _RECORD.pack(_RECORD_MAGIC, self.content_bytes, self.key, parent, self.content_crc)
        return _with_crc(head, RECORD_HEADER_BYTES)


class RecordCoder:
    """Makes the record of a block and takes it apart: the one place that encodes, decodes and checks a block."""

    def __init__(self, block_bytes: int, codec: BlockCodec | None) -> None:
        self.block_bytes, self.codec = block_bytes, codec
        self.content_bytes = block_bytes if codec is None else codec.encoded_bytes  # Of a block in a file
        self.record_bytes = RECORD_HEADER_BYTES + self.content_bytes

    def encode(self, key: bytes, parent: bytes, block: memoryview) -> tuple[bytes, memoryview] | None:
        """Returns the header and the content of a block's record; None if the codec cannot encode the block."""
        content = block if self.codec is None else self.codec.encode(block)
        return None if content is None else (RecordHeader.of(key, parent, content).encode(), content)

    def content_target(self, block: memoryview) -> memoryview:
        """Returns the memory into which the content of a record is read: `block` itself without a codec."""
        return block if self.codec is None else memoryview(bytearray(self.content_bytes))

    def decode(self, key: bytes, header: bytes | bytearray, content: memoryview, block: memoryview) -> bool:
        """Fills `block`, unless it is `content`. Returns False if the record is damaged or of another block."""
        record = RecordHeader.parse(header)
        if record is None or record.key != key or record.content_crc != zlib.crc32(content):
            return False
        if self.codec is not None:
            self.codec.decode(content, block)
        return True


def _with_crc(head: bytes, size: int) -> bytes:
    return (head + _CRC.pack(zlib.crc32(head))).ljust(size, b"\0")


def _has_crc(raw: bytes | bytearray, size: int) -> bool:
    """Returns whether the CRC after the first `size` bytes is theirs."""
    return bool(_CRC.unpack_from(raw, size)[0] == zlib.crc32(raw[:size]))
