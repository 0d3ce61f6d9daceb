"""The kernel of attention over paged latents for Hopper, in Gluon: its groups of warps do different work.

One group of four warps copies tiles of keys to shared memory. The others multiply them with the tensor cores, which
read shared memory (wgmma). Barriers in shared memory (mbarrier) say that a tile has arrived, and that it was read.

    few rows                                 many rows
    copy    [0][1][2][3]                     copy    [0][1]   [2]   [3]
    sums       [0][1][2][3]                  scores     [0]   [1]   [2]      and the left half of the sums
                                             values        [0]   [1]   [2]   the right half of the sums

A row is a pair of token and head. Few rows: the keys are the left operand of both products, so no row is padding, and
memory is the limit. Many rows: the queries are the left operand. Sums of 64 rows with 512 columns fill the registers of
two groups, and two tiles of 64 keys fill shared memory. Triton's own pipeline hides no copy in that room.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.kernels.decode_tiles import EMPTY
from engine.kernels.pdl import wait_for_previous

BUFFERS = gl.constexpr(2)  # Tiles of keys in shared memory. Two tiles of 64 keys and 64 rows of queries fill it.
COPY_THREADS = gl.constexpr(128)
COPY_REGISTERS, VALUE_REGISTERS = gl.constexpr(112), gl.constexpr(184)
DECODE, PROMPT, LISTED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # Kinds of kernels.
empty = gl.constexpr(EMPTY.value)
_wait_for_previous = gluon.jit(wait_for_previous.fn)
# Triton 3.6 has other names than later versions for a barrier of all threads and for an asynchronous copy.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _product(columns: int) -> gl.NVMMADistributedLayout:
    """Returns the layout of a product of one warp group with so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _item(
    cursor, end, b, plan, cu_q, seq_lens,
    HEADS: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Returns a program's next piece of work: rows of a sequence and keys that they see.

    That is: the sequence, its first token, its number of new tokens and of keys; the first row; the range of keys, in
    whole tiles; the slot of partial results, or -1; the cursor and the sequence after this piece.
    """
    if KIND == DECODE:
        base = gl.load(plan + b)
        tile_count = gl.load(plan + b + 1) - base
        first = cursor - base
        count = gl.minimum(tile_count - first, end - cursor)
        m0 = gl.program_id(0) * M
        # A share has at most two parts: one that starts in an earlier share, one that continues in a later share.
        slot = gl.where(count == tile_count, -1, 2 * gl.program_id(1) + (first == 0).to(gl.int32))
        cursor = cursor + count
    elif KIND == LISTED:
        b = gl.load(plan + 1 + 2 * cursor)
        m0 = gl.load(plan + 2 + 2 * cursor)
        cursor = cursor + gl.num_programs(0)
    q0 = gl.load(cu_q + b)
    queries = gl.load(cu_q + b + 1) - q0
    length = gl.load(seq_lens + b)
    after = b
    if KIND == DECODE:
        lo = first * BN
        hi = gl.where(m0 < queries * HEADS, lo + count * BN, lo)  # without rows: no tiles
        after = b + (first + count == tile_count).to(gl.int32)
    else:
        if KIND == PROMPT:
            # The last tokens see the most keys, so they start first.
            m0 = ((queries * HEADS + M - 1) // M - 1 - gl.program_id(0)) * M
            cursor = end
        last = gl.minimum(length - queries + (m0 + M - 1) // HEADS + 1, length)
        lo = 0 * length
        hi = (last + BN - 1) // BN * BN
        slot = 0 * length - 1
    return b, q0, queries, length, m0, lo, hi, slot, cursor, after


@gluon.jit
def _copy_keys(
    dst, kv, ids, start, limit, warp, kv_block, TOKEN: gl.constexpr, COLUMNS: gl.constexpr, N: gl.constexpr,
    BS: gl.constexpr, LAYOUT: gl.constexpr, LAYOUT3: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the keys start.. to a tile in shared memory. Keys from the limit on become zeros.

    ids: of the block that has the N keys of each warp. LAYOUT: of the tile. LAYOUT3: the same of [warps, N, columns].
    """
    KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT3))
    c = gl.arange(0, dst.shape[1], gl.SliceLayout(0, LAYOUT))
    i = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT3)))
    ids = gl.convert_layout(ids, WARP, assert_trivial=True)
    first = start + gl.convert_layout(warp, WARP, assert_trivial=True) * N
    place = ids.to(gl.int64) * kv_block + (first % BS) * TOKEN
    place = gl.reshape(place[:, None] + (i * TOKEN)[None, :], [dst.shape[0]])
    place = gl.multiple_of(gl.convert_layout(place, KEYS, assert_trivial=True), 8)
    seen = gl.reshape(first[:, None] + i[None, :], [dst.shape[0]]) < limit
    ok = gl.convert_layout(seen, KEYS, assert_trivial=True)[:, None] & (c < COLUMNS)[None, :]
    _async_load(dst, kv + (place[:, None] + c[None, :]), mask=ok)


@gluon.jit
def _copy_queries(
    dst, q, q0, queries, m0, q_row, q_head, HEADS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Starts the copy of a part of the queries of the rows from m0 on. Rows behind the last one become zeros."""
    m = m0 + gl.arange(0, dst.shape[0], gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, dst.shape[1], gl.SliceLayout(0, LAYOUT))
    row = gl.multiple_of((q0 + m // HEADS).to(gl.int64) * q_row + (m % HEADS) * q_head, 8)
    ok = (m // HEADS < queries)[:, None] & (c < COLUMNS)[None, :]
    _async_load(dst, q + (row[:, None] + c[None, :]), mask=ok)


@gluon.jit
def _copy_partition(
    lefts, rights, ropes, q_left, q_right, q_rope, full, free, q, kv, tables, plan, cu_q, seq_lens, cursor, end, b,
    q_row, q_head, kv_block, table_row,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, P: gl.constexpr, TOKEN: gl.constexpr, BS: gl.constexpr,
    BN: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Copies queries and keys to shared memory. A half of a tile is copied when that half was read."""
    HALF: gl.constexpr = lefts.shape[2]
    N: gl.constexpr = BN // 4  # Keys that a warp copies.
    L: gl.constexpr = min(32, HALF // 8)  # Threads that copy a part of a key.
    LATENT: gl.constexpr = gl.BlockedLayout([N * L // 32, 8], [32 // L, L], [4, 1], [1, 0])
    LATENT3: gl.constexpr = gl.BlockedLayout([1, N * L // 32, 8], [1, 32 // L, L], [4, 1, 1], [2, 1, 0])
    T: gl.constexpr = ropes.shape[2] // 8
    ROPE: gl.constexpr = gl.BlockedLayout([N * T // 32, 8], [32 // T, T], [4, 1], [1, 0])
    ROPE3: gl.constexpr = gl.BlockedLayout([1, N * T // 32, 8], [1, 32 // T, T], [4, 1, 1], [2, 1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // L, L], [4, 1], [1, 0])
    Q_ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // T, T], [4, 1], [1, 0])
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LATENT3)))
    turn = 0
    while cursor < end:
        b, q0, queries, length, m0, lo, hi, _slot, cursor, after = _item(
            cursor, end, b, plan, cu_q, seq_lens, HEADS, M, BN, KIND
        )
        limit = gl.minimum(length, hi)
        table = tables + b.to(gl.int64) * table_row
        if lo < hi:
            if turn > 0:  # The products with the queries before these have ended.
                mbarrier.wait(free.index(2 * ((turn - 1) & 1) + 1), ((turn - 1) >> 1) & 1)
            _copy_queries(q_left, q, q0, queries, m0, q_row, q_head, HEADS, min(R, HALF), QUERY)
            _copy_queries(q_right, q + HALF, q0, queries, m0, q_row, q_head, HEADS, R - HALF, QUERY)
            _copy_queries(q_rope, q + R, q0, queries, m0, q_row, q_head, HEADS, P, Q_ROPE)
        last = gl.maximum(limit - 1, 0)
        ids = gl.load(table + gl.minimum(lo + warp * N, last) // BS)
        for start in range(lo, hi, BN):
            buffer = turn & 1
            phase = ((turn >> 1) & 1) ^ 1
            left, right, rope = lefts.index(buffer), rights.index(buffer), ropes.index(buffer)
            mbarrier.wait(free.index(2 * buffer), phase)
            _copy_keys(left, kv, ids, start, limit, warp, kv_block, TOKEN, min(R, HALF), N, BS, LATENT, LATENT3)
            async_copy.mbarrier_arrive(full.index(2 * buffer), increment_count=False)
            mbarrier.wait(free.index(2 * buffer + 1), phase)
            _copy_keys(right, kv + HALF, ids, start, limit, warp, kv_block, TOKEN, R - HALF, N, BS, LATENT, LATENT3)
            _copy_keys(rope, kv + R, ids, start, limit, warp, kv_block, TOKEN, P, N, BS, ROPE, ROPE3)
            async_copy.mbarrier_arrive(full.index(2 * buffer + 1), increment_count=False)
            ids = gl.load(table + gl.minimum(start + BN + warp * N, last) // BS)
            turn += 1
        b = after


@gluon.jit
def _store_half(
    acc, column, out, part, slot, q0, queries, m0, out_row, out_head, HEADS: gl.constexpr, M: gl.constexpr,
    R: gl.constexpr, RP: gl.constexpr, KEYS: gl.constexpr, SUMS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Stores the columns from `column` on of the rows m0 .. m0 + M, to the results or to a slot of the parts."""
    m = m0 + gl.arange(0, M, gl.SliceLayout(KEYS, SUMS))
    r = column + gl.expand_dims(gl.arange(0, RP // 2, gl.SliceLayout(1 - KEYS, SUMS)), 1 - KEYS)
    ok = gl.expand_dims(m // HEADS < queries, KEYS) & (r < R)
    if slot < 0:
        place = (q0 + m // HEADS).to(gl.int64) * out_row + (m % HEADS) * out_head
        gl.store(out + (gl.expand_dims(place, KEYS) + r), acc.to(out.dtype.element_ty), mask=ok)
    elif KIND == DECODE:
        place = (slot.to(gl.int64) * (gl.num_programs(0) * M) + m) * RP
        gl.store(part + (gl.expand_dims(place, KEYS) + r), acc, mask=ok)


@gluon.jit
def _store_lse(part_lse, best, total, slot, m0, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Stores the log-sum-exp of partial results, if there is a slot for them."""
    if slot >= 0:
        m = m0 + gl.arange(0, M, LAYOUT)
        lse = gl.where(total > 0, best + gl.log2(gl.where(total > 0, total, 1.0)), empty)
        gl.store(part_lse + slot.to(gl.int64) * (gl.num_programs(0) * M) + m, lse)


@gluon.jit
def _few_partition(
    lefts, rights, ropes, q_left, q_right, q_rope, shared_weights, full, free, out, part, part_lse, plan, cu_q,
    seq_lens, cursor, end, b, out_row, out_head, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Computes few rows. Scores are [keys, rows], and sums are [rank, rows]."""
    LAYOUT: gl.constexpr = _product(M)
    ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    no_scores = gl.zeros([BN, M], gl.float32, LAYOUT)
    turn = 0
    while cursor < end:
        b, q0, queries, length, m0, lo, hi, slot, cursor, after = _item(
            cursor, end, b, plan, cu_q, seq_lens, HEADS, M, BN, KIND
        )
        position = (length - queries + (m0 + gl.arange(0, M, ROWS)) // HEADS)[None, :]
        left_acc = gl.zeros([RP // 2, M], gl.float32, LAYOUT)
        right_acc = gl.zeros([RP // 2, M], gl.float32, LAYOUT)
        total = no_scores  # Each thread has sums of its own keys.
        best = gl.full([M], -float("inf"), gl.float32, ROWS)
        for start in range(lo, hi, BN):
            buffer = turn & 1
            phase = (turn >> 1) & 1
            left, right, rope = lefts.index(buffer), rights.index(buffer), ropes.index(buffer)
            mbarrier.wait(full.index(2 * buffer), phase)
            fence_async_shared()
            s = warpgroup_mma(left, q_left.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(full.index(2 * buffer + 1), phase)
            fence_async_shared()
            s = warpgroup_mma(right, q_right.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(rope, q_rope.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            s = gl.where((start + n)[:, None] <= position, s, -float("inf"))
            top = gl.maximum(best, gl.max(s, 0) * scale_log2)
            safe = gl.where(top == -float("inf"), 0.0, top)
            weights = gl.exp2(s * scale_log2 - safe[None, :])
            shrink = gl.exp2(best - safe)[None, :]
            best = top
            shared_weights.store(weights.to(shared_weights.dtype))
            fence_async_shared()
            total = total * shrink + weights
            left_acc *= shrink
            right_acc *= shrink
            _barrier()
            left_acc = warpgroup_mma(left.permute((1, 0)), shared_weights, left_acc, is_async=True)
            right_acc = warpgroup_mma(right.permute((1, 0)), shared_weights, right_acc, is_async=True)
            left_acc = warpgroup_mma_wait(1, deps=[left_acc])
            _barrier()  # All warps have read the left half.
            mbarrier.arrive(free.index(2 * buffer), count=1)
            right_acc = warpgroup_mma_wait(0, deps=[right_acc])
            _barrier()  # All warps have read the tile and the weights.
            mbarrier.arrive(free.index(2 * buffer + 1), count=1)
            turn += 1
        total_of_row = gl.sum(total, 0)
        divisor = gl.where(total_of_row > 0, total_of_row, 1.0)[None, :]
        _store_half(
            left_acc / divisor, 0, out, part, slot, q0, queries, m0, out_row, out_head,
            HEADS, M, R, RP, 0, LAYOUT, KIND,
        )  # fmt: skip
        _store_half(
            right_acc / divisor, RP // 2, out, part, slot, q0, queries, m0, out_row, out_head,
            HEADS, M, R, RP, 0, LAYOUT, KIND,
        )  # fmt: skip
        if KIND == DECODE:
            _store_lse(part_lse, best, total_of_row, slot, m0, M, ROWS)
        b = after


@gluon.jit
def _score_partition(
    lefts, rights, ropes, q_left, q_right, q_rope, shared_weights, factors, full, free, ready, used, out, part,
    part_lse, plan, cu_q, seq_lens, cursor, end, b, out_row, out_head, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Computes the scores of many rows, and the left half of their sums. It passes weights to `_value_partition`.

    A message to that partition has the weights of a tile and the factors of the sums before it, [rows]. The last
    message of a piece of work has the factors that normalise the sums.
    """
    SCORES: gl.constexpr = _product(BN)
    SUMS: gl.constexpr = _product(RP // 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    n = gl.arange(0, BN, gl.SliceLayout(0, SCORES))
    no_scores = gl.zeros([M, BN], gl.float32, SCORES)
    turn = 0
    message = 0
    while cursor < end:
        b, q0, queries, length, m0, lo, hi, slot, cursor, after = _item(
            cursor, end, b, plan, cu_q, seq_lens, HEADS, M, BN, KIND
        )
        position = (length - queries + (m0 + gl.arange(0, M, ROWS)) // HEADS)[:, None]
        acc = gl.zeros([M, RP // 2], gl.float32, SUMS)
        total = gl.zeros([M], gl.float32, ROWS)
        best = gl.full([M], -float("inf"), gl.float32, ROWS)
        for start in range(lo, hi, BN):
            buffer = turn & 1
            phase = (turn >> 1) & 1
            left, right, rope = lefts.index(buffer), rights.index(buffer), ropes.index(buffer)
            mbarrier.wait(full.index(2 * buffer), phase)
            fence_async_shared()
            s = warpgroup_mma(q_left, left.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(full.index(2 * buffer + 1), phase)
            fence_async_shared()
            s = warpgroup_mma(q_right, right.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            s = gl.where((start + n)[None, :] <= position, s, -float("inf"))
            top = gl.maximum(best, gl.max(s, 1) * scale_log2)
            safe = gl.where(top == -float("inf"), 0.0, top)
            weights = gl.exp2(s * scale_log2 - safe[:, None])
            shrink = gl.exp2(best - safe)
            best = top
            total = total * shrink + gl.sum(weights, 1)
            weights = weights.to(shared_weights.dtype)
            mbarrier.wait(used, (message & 1) ^ 1)
            shared_weights.store(weights)
            factors.store(shrink)
            fence_async_shared()
            _barrier()
            mbarrier.arrive(ready, count=1)
            acc *= gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            weights = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
            acc = warpgroup_mma(weights, left, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()  # All warps have read the left half.
            mbarrier.arrive(free.index(2 * buffer), count=1)
            turn += 1
            message += 1
        factor = 1.0 / gl.where(total > 0, total, 1.0)
        mbarrier.wait(used, (message & 1) ^ 1)
        factors.store(factor)
        _barrier()
        mbarrier.arrive(ready, count=1)
        message += 1
        acc *= gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
        _store_half(acc, 0, out, part, slot, q0, queries, m0, out_row, out_head, HEADS, M, R, RP, 1, SUMS, KIND)
        if KIND == DECODE:
            _store_lse(part_lse, best, total, slot, m0, M, ROWS)
        b = after


@gluon.jit
def _value_partition(
    rights, shared_weights, factors, free, ready, used, out, part, plan, cu_q, seq_lens, cursor, end, b, out_row,
    out_head,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Computes the right half of the sums of many rows, with the weights of `_score_partition`."""
    SUMS: gl.constexpr = _product(RP // 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    turn = 0
    message = 0
    while cursor < end:
        b, q0, queries, _length, m0, lo, hi, slot, cursor, after = _item(
            cursor, end, b, plan, cu_q, seq_lens, HEADS, M, BN, KIND
        )
        acc = gl.zeros([M, RP // 2], gl.float32, SUMS)
        for _start in range(lo, hi, BN):
            buffer = turn & 1
            mbarrier.wait(ready, message & 1)
            fence_async_shared()
            acc *= factors.load(ROWS)[:, None]
            acc = warpgroup_mma(shared_weights, rights.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()  # All warps have read the tile, the weights and the factors.
            mbarrier.arrive(used, count=1)
            mbarrier.arrive(free.index(2 * buffer + 1), count=1)
            turn += 1
            message += 1
        mbarrier.wait(ready, message & 1)
        factor = factors.load(ROWS)
        _barrier()
        mbarrier.arrive(used, count=1)
        message += 1
        acc *= factor[:, None]
        _store_half(acc, RP // 2, out, part, slot, q0, queries, m0, out_row, out_head, HEADS, M, R, RP, 1, SUMS, KIND)
        b = after


@gluon.jit(do_not_specialize=["num_seqs", "table_row", "num_programs"])
def attend(
    q, kv, tables, cu_q, seq_lens, plan, first_seq, out, part, part_lse, q_row, q_head, kv_block, table_row, out_row,
    out_head, num_seqs, num_programs, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
    TOKEN: gl.constexpr, BS: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr, KIND: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes the work of one program. `latent_decode`, `latent_prefill` and `listed_prefill` say what that is.

    plan: of a decode step, or the list of tiles.
    """
    b = gl.program_id(1)
    if KIND == DECODE:
        work = gl.load(plan + num_seqs).to(gl.int64)
        shares = gl.maximum(gl.minimum(num_programs, work), 1)
        cursor = (b * work // shares).to(gl.int32)
        end = gl.minimum((b + 1) * work // shares, work).to(gl.int32)
        b = gl.load(first_seq + b)
    elif KIND == LISTED:
        cursor = gl.program_id(0)
        end = gl.load(plan)
    else:
        cursor = 0 * b
        end = (gl.program_id(0) * M < (gl.load(cu_q + b + 1) - gl.load(cu_q + b)) * HEADS).to(gl.int32)
    # The plan is older than the kernel before this one, but queries and new latents come from that kernel.
    _wait_for_previous(PDL)

    dtype: gl.constexpr = kv.dtype.element_ty
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPES: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * PP), 16)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * M) if FEW else 128, 16)
    lefts = gl.allocate_shared_memory(dtype, [BUFFERS, BN, RP // 2], HALVES)
    rights = gl.allocate_shared_memory(dtype, [BUFFERS, BN, RP // 2], HALVES)
    ropes = gl.allocate_shared_memory(dtype, [BUFFERS, BN, PP], ROPES)
    q_left = gl.allocate_shared_memory(dtype, [M, RP // 2], HALVES)
    q_right = gl.allocate_shared_memory(dtype, [M, RP // 2], HALVES)
    q_rope = gl.allocate_shared_memory(dtype, [M, PP], ROPES)
    shared_weights = gl.allocate_shared_memory(dtype, [BN, M] if FEW else [M, BN], WEIGHTS)
    # Barriers of the halves of tiles: one has arrived, one may be overwritten. The rotated part is in the right half.
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=COPY_THREADS)
        mbarrier.init(free.index(i), count=1)
    # Constants in a tuple that has a name would become variables.
    if FEW:
        gl.warp_specialize([
            (_few_partition, (
                lefts, rights, ropes, q_left, q_right, q_rope, shared_weights, full, free, out, part, part_lse, plan,
                cu_q, seq_lens, cursor, end, b, out_row, out_head, scale_log2, HEADS, M, R, RP, BN, KIND)),
            (_copy_partition, (
                lefts, rights, ropes, q_left, q_right, q_rope, full, free, q, kv, tables, plan, cu_q, seq_lens, cursor,
                end, b, q_row, q_head, kv_block, table_row, HEADS, M, R, P, TOKEN, BS, BN, KIND)),
        ], [4], [COPY_REGISTERS])  # fmt: skip
    else:
        factors = gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # A message to `_value_partition` is there, and was read.
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        used = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        mbarrier.init(used, count=1)
        gl.warp_specialize([
            (_score_partition, (
                lefts, rights, ropes, q_left, q_right, q_rope, shared_weights, factors, full, free, ready, used, out,
                part, part_lse, plan, cu_q, seq_lens, cursor, end, b, out_row, out_head, scale_log2, HEADS, M, R, RP,
                BN, KIND)),
            (_value_partition, (
                rights, shared_weights, factors, free, ready, used, out, part, plan, cu_q, seq_lens, cursor, end, b,
                out_row, out_head, HEADS, M, R, RP, BN, KIND)),
            (_copy_partition, (
                lefts, rights, ropes, q_left, q_right, q_rope, full, free, q, kv, tables, plan, cu_q, seq_lens, cursor,
                end, b, q_row, q_head, kv_block, table_row, HEADS, M, R, P, TOKEN, BS, BN, KIND)),
        ], [4, 4], [VALUE_REGISTERS, COPY_REGISTERS])  # fmt: skip
