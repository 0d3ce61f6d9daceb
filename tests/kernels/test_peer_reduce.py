"""The one-shot kernel: one rank at a time, with buffers and flags of the other ranks as these would leave them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels.peer_reduce import (
    BUFFER_BYTES,
    CHUNK,
    EPOCHS_OFFSET,
    FLAGS_OFFSET,
    HALVES_OFFSET,
    MAX_BYTES,
    MAX_PROGRAMS,
    MAX_RANKS,
    SOURCE,
    one_shot_all_reduce,
    one_shot_broadcast,
    released_flags,
    supports,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/tp.py runs it between two GPUs")


class Ranks:
    """The buffers of a group in one process."""

    def __init__(self, size: int) -> None:
        self.buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(size)]
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])

    def half(self, rank: int, launch: int, like: Tensor) -> Tensor:
        """Returns the memory that launch 0, 1, ... of a group uses."""
        start = launch % 2 * MAX_BYTES
        return self.buffers[rank][start : start + like.nbytes].view(like.dtype)

    def flags(self, rank: int) -> Tensor:
        return self.buffers[rank][FLAGS_OFFSET:EPOCHS_OFFSET].view(torch.int32).view(MAX_PROGRAMS, MAX_RANKS)

    def epochs(self, rank: int) -> Tensor:
        return self.buffers[rank][EPOCHS_OFFSET:HALVES_OFFSET].view(torch.int32)

    def arrive(self, me: int, programs: int) -> None:
        """Lets the other ranks' programs arrive at the next launch of this rank."""
        for other in range(len(self.buffers)):
            self.flags(me)[:programs, other] = self.epochs(me)[:programs] + 1


@pytest.mark.parametrize(("size", "count", "dtype"), [(2, 4096, torch.float16), (4, 3 * CHUNK + 5, torch.float32)])
def test_a_rank_adds_the_parts_of_all_ranks(size: int, count: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(size)
    ranks, programs = Ranks(size), -(-count // CHUNK)
    last = 2**31 - 1
    ranks_at_wrap = [last, -last - 1, -last]
    for launch, epoch in enumerate((1, 2, 3, *ranks_at_wrap)):
        if epoch == last:
            for rank in range(size):
                ranks.epochs(rank)[:programs] = last - 1
                ranks.flags(rank)[:programs] = last - 1
        parts = [torch.randn(count, generator=random).to(dtype) for _ in range(size)]
        expected = torch.zeros(count)
        for part in parts:
            expected += part.float()
        for me in range(size):
            for other, part in enumerate(parts):
                if other != me:
                    ranks.half(other, launch, part).copy_(part)
                    ranks.flags(me)[:programs, other] = epoch
                    ranks.flags(other)[:programs, me] = ranks.epochs(me)[0]
            mine = parts[me].clone()
            assert supports(mine)
            one_shot_all_reduce(mine, ranks.addresses, me, size)
            assert torch.equal(mine, expected.to(dtype))
            assert torch.equal(ranks.half(me, launch, mine), parts[me])
            for other in range(size):
                assert (ranks.flags(other)[:programs, me] == epoch).all()
            assert ranks.epochs(me)[:programs].tolist() == [epoch] * programs
            assert not ranks.epochs(me)[programs:].any()


@pytest.mark.parametrize("count", [5, 3 * CHUNK + 1])
def test_a_rank_copies_the_vector_of_the_source(count: int) -> None:
    ranks, programs = Ranks(2), -(-count // CHUNK)
    for launch in range(3):
        numbers = torch.arange(count, dtype=torch.int32) * 7919 + 2**30 - launch  # float32 would round them
        for me in (SOURCE, 1 - SOURCE):
            mine = numbers.clone() if me == SOURCE else torch.full_like(numbers, -1)
            ranks.arrive(me, programs)
            one_shot_broadcast(mine, ranks.addresses, me, 2)
            assert torch.equal(mine, numbers)
        assert torch.equal(ranks.half(SOURCE, launch, numbers), numbers)
        assert not ranks.half(1 - SOURCE, launch, numbers).any()


def test_vectors_of_different_lengths_never_share_a_half_with_the_launch_before() -> None:
    """All programs write to one half, although the longer launches alone have the last programs."""
    ranks = Ranks(1)
    for launch, count in enumerate((3 * CHUNK, 7, 3 * CHUNK, 1, 2, 5 * CHUNK)):
        before = ranks.buffers[0][:FLAGS_OFFSET].view(2, MAX_BYTES).clone()
        one_shot_all_reduce(torch.full((count,), launch + 1.0), ranks.addresses, 0, 1)
        now = ranks.buffers[0][:FLAGS_OFFSET].view(2, MAX_BYTES)
        changed = [half for half in range(2) if not torch.equal(now[half], before[half])]
        assert changed == [launch % 2]
        assert (ranks.half(0, launch, torch.empty(count)) == launch + 1).all()


def test_a_released_rank_waits_for_no_other_rank() -> None:
    """Rank 1 is lost. The sums of rank 0 end."""
    ranks = Ranks(2)
    for before in (0, 2**31 - 2):
        ranks.epochs(0)[:] = before
        ranks.flags(0).copy_(torch.from_numpy(released_flags(ranks.epochs(0).numpy())))
        for _ in range(3):
            one_shot_all_reduce(torch.ones(2 * CHUNK), ranks.addresses, 0, 2)
        assert ranks.epochs(0)[0] == (before + 3 + 2**31) % 2**32 - 2**31


def test_long_and_strided_vectors_are_left_to_nccl() -> None:
    assert not supports(torch.empty(MAX_BYTES // 2 + 1, dtype=torch.bfloat16))
    assert supports(torch.empty(MAX_BYTES // 2, dtype=torch.bfloat16))
    assert not supports(torch.empty(8, 8)[:, :4])
