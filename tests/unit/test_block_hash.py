"""Block hashes: golden vectors, chaining, isolation by fingerprint and salt, equality across processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import BlockHasher, hash_blocks, matchable_blocks

FINGERPRINT = "00112233445566778899aabbccddeeff"
TOKENS = list(range(40))


def hexes(tokens: list[int], size: int = 16, fingerprint: str = FINGERPRINT, salt: str = "") -> list[str]:
    return [h.hex() for h in hash_blocks(tokens, fingerprint=fingerprint, block_size=size, salt=salt)]


@pytest.mark.parametrize(
    ("tokens", "size", "salt", "expected"),
    [
        (TOKENS, 16, "", ["78fe8c8f208d36511e640dec5491a31d", "540bd72db0e86bf8e5ac0a600def8e2a"]),
        (TOKENS, 16, "tenant-a", ["767062297b2045f2a6f18224f1d1a4de", "fdd1d96a0506508fbb40517f887f46e2"]),
        ([2**31, 0, 49151, 7], 2, "", ["fe38aa758c348d76d19ff888b3b4b727", "baac84b27089f2339392c4ed20c4d84e"]),
    ],
)
def test_golden_vectors(tokens: list[int], size: int, salt: str, expected: list[str]) -> None:
    assert hexes(tokens, size, salt=salt) == expected


def test_an_adapter_is_part_of_the_hash() -> None:
    def named(salt: str, adapter: str) -> list[str]:
        hashes = hash_blocks(TOKENS, fingerprint=FINGERPRINT, block_size=16, salt=salt, adapter=adapter)
        return [h.hex() for h in hashes]

    assert named("", "") == hexes(TOKENS)
    assert named("", "lora-7") == ["9353a979763bb8bad4c100cc27b0feb9", "bfe0a1e664a5cd993ee3053a7dba001e"]
    assert named("tenant-a", "lora-7") == ["c74c08a1284e97bc886fb3c0ecb43a76", "cdb61791e6c3964a4474720a654f75ba"]
    variants = [("", "ab"), ("ab", ""), ("a", "b"), ("b", "a"), ("a\x01\0\0\0b", ""), ("a", "\x01\0\0\0b")]
    assert len({named(*v)[1] for v in variants}) == len(variants)


def test_only_full_blocks_are_hashed() -> None:
    assert len(hexes(TOKENS[:15])) == 0
    assert len(hexes(TOKENS[:16])) == 1
    assert len(hexes(TOKENS[:33])) == 2


def test_a_hash_depends_on_all_tokens_before_the_block() -> None:
    other = [1, *TOKENS[1:]]
    assert hexes(TOKENS)[1] != hexes([99, *TOKENS[1:]])[1]
    assert hexes(TOKENS)[0] != hexes(other)[0]


def test_fingerprint_and_salt_isolate() -> None:
    variants = [hexes(TOKENS), hexes(TOKENS, fingerprint="ff" * 16), hexes(TOKENS, salt="a"), hexes(TOKENS, salt="b")]
    assert len({v[1] for v in variants}) == len(variants)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.lists(st.integers(0, 70), max_size=5))
def test_incremental_hashing_equals_hashing_at_once(tokens: list[int], cuts: list[int]) -> None:
    hasher = BlockHasher(FINGERPRINT, 4, "s")
    for cut in sorted(cuts):
        hasher.extend(tokens[:cut])
    assert hasher.extend(tokens) == hash_blocks(tokens, fingerprint=FINGERPRINT, block_size=4, salt="s")


def test_hashes_are_equal_in_all_processes() -> None:
    code = (
        "from common.block_hash import hash_blocks;"
        f"print([h.hex() for h in hash_blocks(range(40), fingerprint='{FINGERPRINT}', block_size=16)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert outputs == {f"{hexes(TOKENS)}\n"}


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_at_least_one_token_is_left_to_compute(tokens: int, blocks: int) -> None:
    assert matchable_blocks(tokens, 16) == blocks


def test_hashing_continues_from_known_hashes() -> None:
    tokens = list(range(100))
    whole = hash_blocks(tokens, fingerprint="ab" * 16, block_size=16, salt="s")
    for known in range(len(whole) + 1):
        hasher = BlockHasher("ab" * 16, 16, "s", known=whole[:known])
        assert hasher.extend(tokens) == whole
    assert len(whole) == 6, "the given hashes are not changed"
