"""Staging areas: shared files, proof by token, files of killed pods, and copies between pool and slots."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.errors import TransferFailed
from kv_transfer.backend.staging.area import StagingArea, remove_stale
from kv_transfer.backend.staging.copiers import BlockCopier, MemoryCopier, TorchCopier, contiguous_ranges
from kv_transfer.memory import PoolMemory, host_pool

SLOTS, SLOT_BYTES = 8, 4096


def attached(area: StagingArea, directory: Path | None, **other: object) -> StagingArea | None:
    """Maps an area from its description, with changed fields."""
    told = {"file": area.file, "token": area.token, "slots": area.slots, "slot_bytes": area.slot_bytes, **other}
    return StagingArea.attach(None if directory is None else str(directory), **told)  # type: ignore[arg-type]


def test_two_pods_of_a_machine_share_the_bytes_of_an_area(tmp_path: Path) -> None:
    area = StagingArea.create(str(tmp_path), SLOTS, SLOT_BYTES)
    other = attached(area, tmp_path)
    assert other is not None
    other.memory().write_block(3, b"x" * SLOT_BYTES)
    assert area.memory().read_block(3) == b"x" * SLOT_BYTES
    other.close()
    assert area.memory().read_block(3) == b"x" * SLOT_BYTES
    area.close()
    assert not list(tmp_path.iterdir())


def test_another_file_is_not_the_area(tmp_path: Path) -> None:
    """A pod on another machine may have a file of the same name, and a peer may name any file."""
    area = StagingArea.create(str(tmp_path), SLOTS, SLOT_BYTES)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * (4096 + SLOTS * SLOT_BYTES))
    (tmp_path / "baton-kv-link").symlink_to(secret)
    assert attached(area, elsewhere) is None
    assert attached(area, None) is None
    assert attached(area, tmp_path, token=b"y" * 16) is None
    assert attached(area, tmp_path, slots=SLOTS + 1) is None
    assert attached(area, tmp_path, file="secret", token=b"s" * 16) is None
    assert attached(area, elsewhere, file=f"../{area.file}") is None
    assert attached(area, tmp_path, file="baton-kv-link", token=b"s" * 16) is None
    area.close()


def test_an_area_is_not_readable_for_other_users(tmp_path: Path) -> None:
    area = StagingArea.create(str(tmp_path), SLOTS, SLOT_BYTES)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    area.close()


def test_without_room_in_the_directory_the_memory_is_not_shared(tmp_path: Path) -> None:
    area = StagingArea.create(str(tmp_path / "missing"), SLOTS, SLOT_BYTES)
    assert area.file == ""
    area.memory().write_block(0, b"z" * SLOT_BYTES)
    assert area.memory().read_block(0) == b"z" * SLOT_BYTES
    area.close()
    with pytest.raises(TransferFailed, match=r"no \d+ MiB of host memory"):
        StagingArea.create(None, 1 << 40, 1 << 20)


def test_the_file_of_a_killed_pod_is_removed_and_that_of_a_living_one_kept(tmp_path: Path) -> None:
    make = f"""
import os
from kv_transfer.backend.staging.area import StagingArea
area = StagingArea.create({str(tmp_path)!r}, {SLOTS}, {SLOT_BYTES})
print(area.file, flush=True)
os.read(0, 1)
os.kill(os.getpid(), 9)
"""
    child = subprocess.Popen([sys.executable, "-c", make], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    file = tmp_path / child.stdout.readline().strip()
    remove_stale(str(tmp_path))
    assert file.exists()
    child.communicate("\n")
    assert file.exists()
    area = StagingArea.create(str(tmp_path), SLOTS, SLOT_BYTES)
    assert os.listdir(tmp_path) == [area.file]
    area.close()


def test_ranges_are_contiguous_on_both_sides() -> None:
    assert list(contiguous_ranges([], [])) == []
    assert list(contiguous_ranges([3, 4, 5, 9], [0, 1, 3, 4])) == [(3, 0, 2), (5, 3, 1), (9, 4, 1)]
    assert list(contiguous_ranges([5, 4], [1, 0])) == [(5, 1, 1), (4, 0, 1)]


def copiers() -> list[tuple[BlockCopier, PoolMemory]]:
    tensor = torch.zeros((17, SLOT_BYTES), dtype=torch.uint8)
    pool = host_pool(16, SLOT_BYTES)

    def read(block: int) -> bytes:
        return tensor[block].numpy().tobytes()

    def write(block: int, content: bytes) -> None:
        tensor[block].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    of_tensor = PoolMemory(tensor.data_ptr(), SLOT_BYTES, 17, 0, "DRAM", 16, read, write, tensor)
    return [(MemoryCopier(pool), pool), (TorchCopier(tensor), of_tensor)]


@pytest.mark.parametrize("which", [0, 1], ids=["memory", "torch"])
def test_blocks_go_to_slots_and_back(which: int, tmp_path: Path) -> None:
    copier, pool = copiers()[which]
    rng = random.Random(which)
    area = StagingArea.create(str(tmp_path), SLOTS, SLOT_BYTES)
    copier.attach(area)
    content = {block: rng.randbytes(SLOT_BYTES) for block in range(16)}
    for block, data in content.items():
        pool.write_block(block, data)
    blocks, slots = [2, 3, 4, 11, 7], [5, 6, 7, 0, 3]
    assert copier.save(blocks, area, slots)()
    assert [area.memory().read_block(slot) for slot in slots] == [content[block] for block in blocks]
    targets = [8, 9, 15, 1, 0]
    assert copier.load(area, slots, targets)()
    assert [pool.read_block(block) for block in targets] == [content[block] for block in blocks]
    copier.detach(area)
    area.close()
