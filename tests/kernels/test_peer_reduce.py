"""The one-shot all-reduce: one rank at a time, with buffers and flags of the other ranks as these would leave them."""

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
    MAX_BYTES,
    MAX_PROGRAMS,
    MAX_RANKS,
    one_shot_all_reduce,
    supports,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/tp.py runs it between two GPUs")


class Ranks:
    """The buffers of a group in one process."""

    def __init__(self, size: int) -> None:
        self.buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(size)]
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])

    def half(self, rank: int, epoch: int, like: Tensor) -> Tensor:
        start = epoch % 2 * MAX_BYTES
        return self.buffers[rank][start : start + like.nbytes].view(like.dtype)

    def flags(self, rank: int) -> Tensor:
        return self.buffers[rank][FLAGS_OFFSET:EPOCHS_OFFSET].view(torch.int32).view(MAX_PROGRAMS, MAX_RANKS)

    def epochs(self, rank: int) -> Tensor:
        return self.buffers[rank][EPOCHS_OFFSET:].view(torch.int32)


@pytest.mark.parametrize(("size", "count", "dtype"), [(2, 4096, torch.float16), (4, 3 * CHUNK + 5, torch.float32)])
def test_a_rank_adds_the_parts_of_all_ranks(size: int, count: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(size)
    ranks, programs = Ranks(size), -(-count // CHUNK)
    last = 2**31 - 1
    ranks_at_wrap = [last, -last - 1, -last]
    for epoch in (1, 2, 3, *ranks_at_wrap):  # the halves alternate
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
                    ranks.half(other, epoch, part).copy_(part)
                    ranks.flags(me)[:programs, other] = epoch
                    ranks.flags(other)[:programs, me] = ranks.epochs(me)[0]
            mine = parts[me].clone()
            assert supports(mine)
            one_shot_all_reduce(mine, ranks.addresses, me, size)
            assert torch.equal(mine, expected.to(dtype))
            assert torch.equal(ranks.half(me, epoch, mine), parts[me])
            for other in range(size):
                assert (ranks.flags(other)[:programs, me] == epoch).all()
            assert ranks.epochs(me)[:programs].tolist() == [epoch] * programs
            assert not ranks.epochs(me)[programs:].any()


def test_long_and_strided_vectors_are_left_to_nccl() -> None:
    assert not supports(torch.empty(MAX_BYTES // 2 + 1, dtype=torch.bfloat16))
    assert supports(torch.empty(MAX_BYTES // 2, dtype=torch.bfloat16))
    assert not supports(torch.empty(8, 8)[:, :4])
