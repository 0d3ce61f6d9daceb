"""The thread that makes the copies of the host tier, with real memory on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from common.kv_layout import KVLayout
from engine.kv.blocks import BlockPool
from engine.kv.kv_pool import KVPool
from engine.kv.tiers.host_copier import HostCopier, HostKVPool

LAYOUT = KVLayout("m", "r", num_layers=1, num_kv_heads=1, head_dim=16, block_size=4, dtype="float32")
IDLE_S = 10.0


class LateStepMemory(HostKVPool):
    """A step that was launched before each save writes to the last slots of its blocks just before the copy."""

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self.pool.data[list(blocks), -16:] += 1
        super().save(blocks, host_blocks)


class Tiers:
    def __init__(self) -> None:
        self.kv = KVPool(LAYOUT, 8, torch.device("cpu"))
        self.kv.data.copy_(torch.randint(0, 255, self.kv.data.shape, dtype=torch.uint8))
        self.blocks = BlockPool(8, LAYOUT.block_size, host_blocks=4)
        assert self.blocks.host_tier is not None
        self.tier = self.blocks.host_tier
        self.memory = LateStepMemory(self.kv, 4)
        self.copier = HostCopier(self.tier, self.memory, checksums=True)


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    tiers = Tiers()
    yield tiers
    tiers.copier.stop()


def test_a_partial_block_that_a_step_in_flight_extends_is_not_damaged(tiers: Tiers) -> None:
    lease = tiers.blocks.lease([], 1)
    assert lease is not None
    saved = tiers.blocks.save_partial_block(lease, 2)
    assert saved is not None
    lease.finish("preempted")
    assert tiers.tier.wait_idle(IDLE_S)
    again = tiers.blocks.lease([], 1, host=True, saved_partial=saved)
    assert again is not None
    assert again.restored_partial
    assert tiers.tier.wait_idle(IDLE_S)
    assert again.host_error is None
    assert tiers.tier.stats().loaded == 1


def test_a_host_block_that_changes_is_damaged(tiers: Tiers) -> None:
    lease = tiers.blocks.lease([], 1)
    assert lease is not None
    saved = tiers.blocks.save_partial_block(lease, 2)
    assert saved is not None
    lease.finish("preempted")
    assert tiers.tier.wait_idle(IDLE_S)
    tiers.memory.data += 1
    again = tiers.blocks.lease([], 1, host=True, saved_partial=saved)
    assert again is not None
    assert tiers.tier.wait_idle(IDLE_S)
    assert again.host_error is not None
    assert again.host_error.kind == "BlockDamaged"
    assert tiers.tier.stats().damaged == 1
