"""Which experts compute a token, and the order in which the grouped products read the tokens.

A copy is a (token, slot) pair: copy c = token * top_k + slot. `sort_copies` orders the copies by expert and lists
blocks of up to BLOCK_M copies of one expert. All sizes on the host are upper bounds, so a CUDA graph can capture it.
The order is that of a stable sort: it does not depend on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import pdl_args, wait_for_previous

CHUNK = 128  # Copies of a program of the sort.
COUNT_MIN = 1024  # With more copies, a kernel before the sort counts the experts of each chunk.
MAX_ROUTED = 16  # Largest number of rows of `norm_and_route`.
ROUTER_ROWS = 2  # Logits of a program of `norm_and_route`.
PAIRWISE = tl.constexpr(128)  # Up to this many experts are ranked by comparing all pairs.


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a token's experts and their weights follow from the router's logits."""

    top_k: int
    sigmoid: bool = False  # Scores are sigmoids of the logits, not a softmax over all experts.
    normalize: bool = True  # The weights are divided by their sum.
    scale: float = 1.0  # Factor on the weights.
    groups: int = 1  # Experts are chosen from the `top_groups` best of this many groups, by the sum of best scores.
    top_groups: int = 1
    group_best: int = 2  # How many scores of a group are summed.
    first: int = 0  # The first expert of this rank. Other ranks compute experts outside first .. first + local.

    def constants(self, experts: int, corrected: bool) -> dict[str, int | float | bool]:
        """Returns the constants of `select_experts`."""
        return {
            "E": experts,
            "EP": max(16, int(triton.next_power_of_2(experts))),
            "TOPK": self.top_k,
            "SIGMOID": self.sigmoid,
            "NORMALIZE": self.normalize,
            "SCALE": self.scale,
            "GROUPS": self.groups,
            "TOP_GROUPS": self.top_groups,
            "GROUP_BEST": self.group_best,
            "CORRECTED": corrected,
        }


@triton.jit
def _better(c, i):
    """Returns [EP, EP]: whether expert j (second axis) comes before expert i (first axis)."""
    return (c[None, :] > c[:, None]) | ((c[None, :] == c[:, None]) & (i[None, :] < i[:, None]))


@triton.jit
def _without_lesser_groups(
    c, i, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr
):
    """Returns the scores c with -inf for experts outside the TOP_GROUPS best groups."""
    group = i // (E // GROUPS)
    same = group[None, :] == group[:, None]
    place = tl.sum((same & _better(c, i)).to(tl.int32), 1)
    best = tl.sum(tl.where(same & (place[None, :] < GROUP_BEST), c[None, :], 0.0), 1)
    leader = (place == 0) & (i < E)
    ahead = (best[None, :] > best[:, None]) | ((best[None, :] == best[:, None]) & (group[None, :] < group[:, None]))
    return tl.where(tl.sum((ahead & leader[None, :]).to(tl.int32), 1) < TOP_GROUPS, c, -float("inf"))


@triton.jit
def select_experts(
    logits,
    correction,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOPK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    """Returns the rank (int32 [EP], below TOPK: chosen) and the weight (fp32 [EP], 0: not chosen) of each expert.

    The lower index wins between equal scores. NaN ranks last, so ranks are a permutation for any logits.
    """
    i = tl.arange(0, EP)
    ok = i < E
    x = tl.load(logits + i, mask=ok, other=-float("inf"), cache_modifier=".cg")
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, 0))
        if CORRECTED or GROUPS > 1 or not NORMALIZE:
            score = score / tl.sum(score, 0)
    choice = x
    if CORRECTED:
        choice = score + tl.load(correction + i, mask=ok, other=0.0).to(tl.float32)
    elif GROUPS > 1:
        choice = score
    choice = tl.where(ok & (choice > -float("inf")), choice, -float("inf"))  # NaN, too
    if GROUPS > 1:
        choice = _without_lesser_groups(choice, i, E, GROUPS, TOP_GROUPS, GROUP_BEST)
    if EP <= PAIRWISE:
        rank = tl.sum(_better(choice, i).to(tl.int32), 1)
    else:
        rank = tl.full([EP], EP, tl.int32)
        for place in tl.static_range(TOPK):
            left = tl.where(rank == EP, choice, -float("inf"))
            first = tl.min(tl.where((left == tl.max(left, 0)) & (rank == EP), i, EP), 0)
            rank = tl.where(i == first, place, rank)
    weight = tl.where(rank < TOPK, score, 0.0)
    if NORMALIZE:
        weight = weight / tl.sum(weight, 0)
    return rank, weight * SCALE


@triton.jit
def _route_kernel(
    logits, correction, weights, experts,
    E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    CORRECTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    rank, weight = select_experts(
        logits + token * E,
        correction,
        E,
        EP,
        TOPK,
        SIGMOID,
        NORMALIZE,
        SCALE,
        GROUPS,
        TOP_GROUPS,
        GROUP_BEST,
        CORRECTED,
    )
    tl.store(weights + token * TOPK + rank, weight, mask=rank < TOPK)
    tl.store(experts + token * TOPK + rank, tl.arange(0, EP), mask=rank < TOPK)


def route(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the weights, float32 [T, top_k], and experts, int32 [T, top_k], of each token, the best first.

    Args:
        logits: float32 [T, E], contiguous, bias included.
        correction: [E], added to the scores for the choice only.
    """
    tokens, experts = logits.shape
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    weights = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, rule.top_k, dtype=torch.int32, device=logits.device)
    _route_kernel[(tokens,)](
        logits, logits if correction is None else correction, weights, chosen,
        **rule.constants(experts, correction is not None), **pdl_args(logits.device),
        num_warps=4 if experts <= 128 else 8,
    )  # fmt: skip
    return weights, chosen


@triton.jit
def _router_kernel(
    x, norm, w, bias, correction, logits, normed, weights, experts, arrived, x_row, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    CORRECTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes ROWS logits of a token. The program that finishes last selects the token's experts."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BH)
    tile = tl.load(w + row[:, None] * H + k[None, :], mask=(row < E)[:, None] & (k < H)[None, :], other=0.0)
    scale = tl.load(norm + k, mask=k < H, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    v = tl.load(x + token * x_row + k, mask=k < H, other=0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / H + eps) * scale
    y = tl.sum(tile.to(tl.float32) * v[None, :], 1)
    if BIAS:
        y += tl.load(bias + row, mask=row < E, other=0.0).to(tl.float32)
    tl.store(logits + token * E + row, y, mask=row < E)
    if tl.program_id(0) == 0:
        tl.store(normed + token * H + k, v.to(normed.dtype.element_ty), mask=k < H)
    tl.debug_barrier()  # all threads have stored before one of them counts the program
    before = tl.atomic_add(arrived + token, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        rank, weight = select_experts(
            logits + token * E,
            correction,
            E,
            EP,
            TOPK,
            SIGMOID,
            NORMALIZE,
            SCALE,
            GROUPS,
            TOP_GROUPS,
            GROUP_BEST,
            CORRECTED,
        )
        tl.store(weights + token * TOPK + rank, weight, mask=rank < TOPK)
        tl.store(experts + token * TOPK + rank, tl.arange(0, EP), mask=rank < TOPK)
        tl.store(arrived + token, 0)  # for the next launch


@cache
def _arrived(device: torch.device) -> Tensor:
    """Returns the counters of `norm_and_route`. Launches of one device follow each other, so they share them."""
    return torch.zeros(MAX_ROUTED, dtype=torch.int32, device=device)


def norm_and_route(
    x: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    rule: RoutingRule,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    shape: tuple[int, int] = (ROUTER_ROWS, 4),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the RMSNorm of x [T, hidden], and weights and experts as `route`, in one launch.

    Args:
        x: up to MAX_ROUTED rows.
        norm: [hidden], weight of the norm.
        router: [E, hidden]; bias: [E].
        shape: logits and warps of a program.
    """
    (tokens, hidden), experts, device = x.shape, len(router), x.device
    assert tokens <= MAX_ROUTED
    assert router.is_contiguous()
    assert x.stride(1) == 1
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=device)
    normed = torch.empty(tokens, hidden, dtype=x.dtype, device=device)
    weights = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=device)
    chosen = torch.empty(tokens, rule.top_k, dtype=torch.int32, device=device)
    rows, warps = shape
    _router_kernel[(triton.cdiv(experts, rows), tokens)](
        x, norm, router, router if bias is None else bias, logits if correction is None else correction,
        logits, normed, weights, chosen, _arrived(device), x.stride(0), eps,
        H=hidden, BH=int(triton.next_power_of_2(hidden)), ROWS=rows, BIAS=bias is not None,
        **rule.constants(experts, correction is not None), **pdl_args(device), num_warps=warps,
    )  # fmt: skip
    return normed, weights, chosen


class SortedCopies(NamedTuple):
    """The copies by expert, in blocks."""

    order: Tensor  # int32 [copies], the copies of local experts by expert; later entries are not defined.
    #: int32 [1 + 3 * max_blocks]: number of blocks, then expert, first entry of `order`, and number of copies of each.
    blocks: Tensor
    max_blocks: int
    block_m: int


@triton.jit
def _count(experts, begin, end, i, first, TILE: tl.constexpr, EP: tl.constexpr):
    """Returns how many of the copies begin..end each expert has, int32 [EP]."""
    total = tl.zeros([EP], tl.int32)
    for at in range(begin, end, TILE):
        c = at + tl.arange(0, TILE)
        e = tl.load(experts + c, mask=c < end, other=first - 1) - first
        total += tl.sum((e[:, None] == i[None, :]).to(tl.int32), 0)
    return total


@triton.jit(do_not_specialize=["copies", "first"])
def _count_kernel(experts, counts, copies, first, CHUNK: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, EP)
    begin = tl.program_id(0) * CHUNK
    wait_for_previous(PDL)
    total = _count(experts, begin, tl.minimum(begin + CHUNK, copies), i, first, CHUNK, EP)
    tl.store(counts + tl.program_id(0) * EP + i, total)


@triton.jit(do_not_specialize=["copies", "first", "local", "max_blocks"])
def _sort_kernel(
    experts, counts, order, blocks, copies, first, local, max_blocks,
    CHUNK: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i = tl.arange(0, EP)
    begin = pid * CHUNK
    wait_for_previous(PDL)
    if COUNTED:
        before = tl.zeros([EP], tl.int32)
        total = tl.zeros([EP], tl.int32)
        for chunk in range(0, tl.num_programs(0), 16):
            row = chunk + tl.arange(0, 16)
            part = tl.load(counts + row[:, None] * EP + i[None, :], mask=(row < tl.num_programs(0))[:, None], other=0)
            total += tl.sum(part, 0)
            before += tl.sum(tl.where((row < pid)[:, None], part, 0), 0)
    else:
        before = _count(experts, 0, begin, i, first, CHUNK, EP)
        total = before + _count(experts, begin, copies, i, first, CHUNK, EP)
    total = tl.where(i < local, total, 0)
    starts = tl.cumsum(total, 0) - total

    c = begin + tl.arange(0, CHUNK)
    e = tl.load(experts + c, mask=c < copies, other=first - 1) - first
    same = (e[None, :] == e[:, None]) & (c[None, :] < c[:, None])
    base = tl.sum(tl.where(e[:, None] == i[None, :], (starts + before)[None, :], 0), 1)
    tl.store(order + base + tl.sum(same.to(tl.int32), 1), c, mask=(c < copies) & (e >= 0) & (e < local))

    needed = (total + BM - 1) // BM
    ends = tl.cumsum(needed, 0)
    if pid == 0:
        tl.store(blocks, tl.sum(needed, 0))
    for at in range(pid * 32, max_blocks, tl.num_programs(0) * 32):
        b = at + tl.arange(0, 32)
        owner = tl.sum((ends[None, :] <= b[:, None]).to(tl.int32), 1)
        mine = owner[:, None] == i[None, :]
        done = (b - tl.sum(tl.where(mine, (ends - needed)[None, :], 0), 1)) * BM
        entry = blocks + 1 + 3 * b
        tl.store(entry, owner, mask=b < max_blocks)
        tl.store(entry + 1, tl.sum(tl.where(mine, starts[None, :], 0), 1) + done, mask=b < max_blocks)
        left = tl.sum(tl.where(mine, total[None, :], 0), 1) - done
        tl.store(entry + 2, tl.minimum(left, BM), mask=b < max_blocks)


def max_block_count(copies: int, experts: int, block_m: int) -> int:
    """Returns the largest number of blocks of `copies` copies: each expert may have one that is not full."""
    partial = min(copies, experts)
    return partial + (copies - partial) // block_m


def sort_copies(chosen: Tensor, local: int, block_m: int, first: int = 0) -> SortedCopies:
    """Sorts the copies of `route` by expert.

    Args:
        chosen: int32 [T, top_k], the experts of each token.
        local: number of experts of this rank, first .. first + local - 1. Copies of other experts are left out.
        block_m: largest number of copies of a block.
    """
    copies, device = chosen.numel(), chosen.device
    chunks, ep = triton.cdiv(copies, CHUNK), max(16, int(triton.next_power_of_2(local)))
    most = max_block_count(copies, local, block_m)
    order = torch.empty(copies, dtype=torch.int32, device=device)
    blocks = torch.empty(1 + 3 * most, dtype=torch.int32, device=device)
    counts, counted = blocks, copies > COUNT_MIN
    if counted:
        counts = torch.empty(chunks, ep, dtype=torch.int32, device=device)
        _count_kernel[(chunks,)](chosen, counts, copies, first, CHUNK=CHUNK, EP=ep, num_warps=4, **pdl_args(device))
    _sort_kernel[(chunks,)](
        chosen, counts, order, blocks, copies, first, local, most,
        CHUNK=CHUNK, EP=ep, BM=block_m, COUNTED=counted, num_warps=8, **pdl_args(device),
    )  # fmt: skip
    return SortedCopies(order, blocks, most, block_m)
