"""Sampling without sorting: penalties, bias, temperature, top-k, top-p, min-p and Gumbel-max, in two launches.

The first kernel applies penalties, bias, mask and temperature, adds Gumbel noise and keeps the best token of each tile.
The second takes the best token of a row. With top-k, top-p or min-p it counts the more likely tokens and their mass. If
the token is cut, all tokens at or below its logit are cut too, because all three cuts are thresholds on the logit. So
the best token above is tried next. An accepted token has the best score of all tokens that are not cut, so sorting
would give the same token. On average each rejection halves the candidates (FlashInfer, Ye et al. 2025, which draws new
noise each time). The k-th largest maximum of short segments and min-p exclude most tokens without counting. top-k with
top-p needs the mass of the top k, so bisection finds the k-th logit.

The kernels read a row's parameters on the device, from its slot, so a captured graph serves any mix of requests. A
greedy row costs the maximum of its logits only. The noise is Philox4x32-10 with the same words as
`engine/sampling/sampler.py`; logarithms may differ in the last bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import pdl_args, wait_for_previous

TILE = 2048  # Number of vocabulary entries in a tile of the first kernel.
SCAN = 8192  # Number of vocabulary entries that the second kernel reads at once.
SEGMENTS = 8  # Number of segments in a tile. The first kernel keeps the maximum of each segment.
IN_PROMPT = 1 << 30  # Bit of a token's count that is set if the token occurs in the prompt.
MIN_TEMPERATURE = 1e-5
MAX_ENTRIES = 2048  # Largest number of logit biases and banned tokens of a slot.

#: Places of the float32 parameters of a slot, then their number.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_FLOATS = range(7)
#: Places of the int64 parameters of a slot, then their number. Banned tokens are allowed from position BAN_UNTIL on.
TOP_K, SEED, CHILD, BAN_UNTIL, NUM_ENTRIES, PENALISED, NUM_INTS = range(7)
SLOT_WORDS = NUM_FLOATS // 2 + NUM_INTS  # Number of int64 words of a slot: the floats, two per word, then the integers.
# Constants as kernels need them.
_SLOT_WORDS, _FLOAT_WORDS, _PENALISED = (tl.constexpr(n) for n in (SLOT_WORDS, NUM_FLOATS // 2, PENALISED))
_TILE, _SEGMENTS, _ENTRIES = (tl.constexpr(n) for n in (TILE, SEGMENTS, MAX_ENTRIES))
_IN_PROMPT, _MIN_TEMPERATURE = tl.constexpr(IN_PROMPT), tl.constexpr(MIN_TEMPERATURE)


class SamplingTensors(NamedTuple):
    """The sampling parameters and the state of S slots, on the device."""

    #: int64 [S, SLOT_WORDS], the parameters. Temperature 0 is greedy; top_k 0 is off; PENALISED is 1 if the slot has
    #: penalties.
    words: Tensor
    #: int32 [S, 2, MAX_ENTRIES]: tokens in ascending order, and the bits of their float32 biases. -inf bans a token at
    #: positions before BAN_UNTIL.
    entries: Tensor
    #: int32 [S, vocab], occurrences of each token in the output, plus IN_PROMPT. Used by slots with penalties only.
    counts: Tensor


class RowBuffers(NamedTuple):
    """What the first kernel leaves for the second. Only the first three fields are set in a row without cuts."""

    #: int32 [R, tiles]: the token with the best score of each tile, and whether all logits of the tile are finite.
    best_token: Tensor
    tile_finite: Tensor
    #: float32 [R, tiles]: the best score of each tile, the logit of its token, the largest logit, the mass of the tile
    #: relative to the largest logit.
    best_score: Tensor
    best_logit: Tensor
    tile_max: Tensor
    tile_sum: Tensor
    segment_max: Tensor  # float32 [R, tiles * SEGMENTS], the largest logit of each segment.
    #: float32 [R, vocab]: logits after penalties, bias, mask and temperature; the scores, which include the noise.
    shaped: Tensor
    scores: Tensor


@triton.jit
def _gumbel(word):
    """Returns Gumbel noise from a random uint32."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # -log1p(-u). For small u a series, because 1 - u would lose the bits that decide the largest noise.
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * (0.16666667 + u * 0.14285715))))))
    return -tl.log(tl.where(u < 0.06, series, -tl.log(1.0 - u)))


@triton.jit
def _noise(seed, child, position, first):
    """Returns Gumbel noise at vocabulary indices first .. first + TILE; first is a multiple of 4."""
    group = (first // 4 + tl.arange(0, _TILE // 4)).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(
        seed, group, zero + position.to(tl.uint32), zero + child.to(tl.uint32), zero, n_rounds=10
    )
    return _gumbel(tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(_TILE))


@triton.jit
def _parameters(tensors, slot):
    """Returns pointers to the float32 and the int64 parameters of a slot."""
    words = tensors.words + slot * _SLOT_WORDS
    return words.to(tl.pointer_type(tl.float32)), words + _FLOAT_WORDS


@triton.jit
def _cuts(floats, ints, vocab):
    """Returns k (vocab if off), top-p, min-p, and whether the row is sampled with any of these cuts."""
    k = tl.load(ints)
    k = tl.where((k > 0) & (k < vocab), k, vocab).to(tl.int32)
    top_p = tl.load(floats + 1)
    min_p = tl.load(floats + 2)
    return k, top_p, min_p, (tl.load(floats) > 0) & ((k < vocab) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _score_kernel(
    logits,
    slots,
    positions,
    tensors,
    allowed,
    inputs,
    offsets,
    buffers,
    logits_row,
    counts_row,
    allowed_row,
    inputs_row,
    vocab,
    num_tiles,
    MASKED: tl.constexpr,
    DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    floats, ints = _parameters(tensors, slot)
    first = tile * _TILE
    i = first + tl.arange(0, _TILE)
    ok = i < vocab
    x = tl.load(logits + row * logits_row + i, mask=ok, other=0.0).to(tl.float32)
    # The parameters that decide the branches are loaded together, in parallel with the logits.
    penalised = tl.load(ints + _PENALISED) > 0
    num_entries = tl.load(ints + 4)
    temperature = tl.load(floats)
    _k, _top_p, _min_p, cut = _cuts(floats, ints, vocab)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0)

    if penalised:
        count = tl.load(tensors.counts + slot * counts_row + i, mask=ok, other=0)
        if DRAFTS:
            for back in range(tl.load(offsets + row)):
                count += (i == tl.load(inputs + row * inputs_row - back)).to(tl.int32)
        repetition = tl.load(floats + 3)
        x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        said = count & (_IN_PROMPT - 1)
        x -= tl.load(floats + 5) * said.to(tl.float32) + tl.where(said > 0, tl.load(floats + 4), 0.0)
    if num_entries > 0:
        entry = tensors.entries + slot * (2 * _ENTRIES)
        e = tl.arange(0, _ENTRIES)
        named = tl.load(entry + e, mask=e < num_entries, other=vocab + _TILE)
        banned = position < tl.load(ints + 3)
        for j in range(tl.sum((named < first).to(tl.int32), 0), tl.sum((named < first + _TILE).to(tl.int32), 0)):
            bias = tl.load(entry + _ENTRIES + j).to(tl.float32, bitcast=True)
            x += tl.where((i == tl.load(entry + j)) & (banned | (bias > -float("inf"))), bias, 0.0)
    if MASKED:
        word = tl.load(allowed + row * allowed_row + i // 32, mask=ok, other=0)
        x = tl.where((word >> (i % 32)) & 1 != 0, x, -float("inf"))

    if temperature > 0:
        x = x / tl.maximum(temperature, _MIN_TEMPERATURE)
    x = tl.where(ok, x, -float("inf"))
    score = x
    if temperature > 0:
        score = x + _noise(tl.load(ints + 1), tl.load(ints + 2), position, first)

    tile_index = row * num_tiles + tile
    best, where = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(buffers.best_score + tile_index, best)
    tl.store(buffers.best_token + tile_index, first + where)
    tl.store(buffers.tile_finite + tile_index, finite)
    if cut:
        tops = tl.max(tl.reshape(x, [_SEGMENTS, _TILE // _SEGMENTS]), 1)
        tl.store(buffers.segment_max + tile_index * _SEGMENTS + tl.arange(0, _SEGMENTS), tops)
        top = tl.max(tops, 0)
        tl.store(buffers.best_logit + tile_index, tl.max(tl.where(i == first + where, x, -float("inf")), 0))
        tl.store(buffers.tile_max + tile_index, top)
        tl.store(buffers.tile_sum + tile_index, tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), 0))
        tl.store(buffers.shaped + row * vocab + i, x, mask=ok)
        tl.store(buffers.scores + row * vocab + i, score, mask=ok)


@triton.jit
def _mass_from(shaped, vocab, top, threshold, SCAN: tl.constexpr):
    """Returns the number of logits at or above the threshold, and their mass relative to the largest logit."""
    count = tl.zeros([SCAN], tl.int32)
    mass = tl.zeros([SCAN], tl.float32)
    for first in range(0, vocab, SCAN):
        i = first + tl.arange(0, SCAN)
        x = tl.load(shaped + i, mask=i < vocab, other=-float("inf"))
        inside = x >= threshold
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(x - top), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _kth_maximum(segment_max, n, k, SIZE: tl.constexpr):
    """Returns the k-th largest of n <= SIZE numbers, -inf if n < k. Counts the larger numbers for each number."""
    i = tl.arange(0, SIZE)
    mine = tl.load(segment_max + i, mask=i < n, other=-float("inf"))
    larger = tl.zeros([SIZE], tl.int32)
    for first in range(0, n, 64):
        j = first + tl.arange(0, 64)
        other = tl.load(segment_max + j, mask=j < n, other=-float("inf"))
        larger += tl.sum((other[None, :] > mine[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(larger < k, mine, float("inf")), 0)


@triton.jit
def _select_kernel(
    slots,
    tensors,
    buffers,
    tokens,
    finite,
    results,
    counts_row,
    vocab,
    num_tiles,
    TILES: tl.constexpr,
    SCAN: tl.constexpr,
    COUNT: tl.constexpr,
    RESULTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    floats, ints = _parameters(tensors, slot)
    shaped = buffers.shaped + row * vocab
    scores = buffers.scores + row * vocab
    t = tl.arange(0, TILES)
    tile_index = row * num_tiles + t
    ok = t < num_tiles
    all_finite = tl.min(tl.load(buffers.tile_finite + tile_index, mask=ok, other=1), 0)
    _, winner = tl.max(
        tl.load(buffers.best_score + tile_index, mask=ok, other=-float("inf")),
        0,
        return_indices=True,
        return_indices_tie_break_left=True,
    )
    token = tl.load(buffers.best_token + row * num_tiles + winner)

    k, top_p, min_p, cut = _cuts(floats, ints, vocab)
    if cut & (all_finite > 0):
        logit = tl.load(buffers.best_logit + row * num_tiles + winner)
        tops = tl.load(buffers.tile_max + tile_index, mask=ok, other=-float("inf"))
        top = tl.max(tops, 0)
        total = tl.sum(tl.load(buffers.tile_sum + tile_index, mask=ok, other=0.0) * tl.exp(tops - top), 0)
        floor = tl.where(min_p > 0.0, top + tl.log(tl.maximum(min_p, 1e-30)), -float("inf"))
        kth = tl.full([], -float("inf"), tl.float32)
        if k < vocab:
            segments = buffers.segment_max + row * num_tiles * _SEGMENTS
            kth = _kth_maximum(segments, num_tiles * _SEGMENTS, k, TILES * _SEGMENTS)
            floor = tl.maximum(floor, kth)
        if (k < vocab) & (top_p < 1.0):
            # Invariant of the bisection: at least k logits are >= low, fewer than k are >= high.
            low = tl.where(kth > -float("inf"), kth, top - 64.0)
            high = tl.where(top > 0, top * 1.0001 + 1e-30, top * 0.9999 + 1e-30)
            count, mass = _mass_from(shaped, vocab, top, low, SCAN)
            if count < k:
                high = low
                low = tl.full([], -3.0e38, tl.float32)
                count, mass = _mass_from(shaped, vocab, top, low, SCAN)
            total = mass
            middle = low + (high - low) * 0.5
            while (count != k) & (middle > low) & (middle < high):
                inside, part = _mass_from(shaped, vocab, top, middle, SCAN)
                if inside >= k:
                    low = middle
                    count = inside
                    total = part
                else:
                    high = middle
                middle = low + (high - low) * 0.5
        limit = tl.where(top_p < 1.0, top_p * total, float("inf"))

        accepted = tl.full([], 0, tl.int32)
        while accepted == 0:
            count = tl.zeros([SCAN], tl.int32)
            mass = tl.zeros([SCAN], tl.float32)
            best = tl.full([SCAN], -float("inf"), tl.float32)
            where = tl.zeros([SCAN], tl.int32)
            for first in range(0, vocab, SCAN):
                i = first + tl.arange(0, SCAN)
                x = tl.load(shaped + i, mask=i < vocab, other=-float("inf"))
                above = x > logit
                count += above.to(tl.int32)
                mass += tl.where(above, tl.exp(x - top), 0.0)
                score = tl.load(scores + i, mask=above & (x >= floor), other=-float("inf"))
                better = score > best
                best = tl.where(better, score, best)
                where = tl.where(better, i, where)
            above_count = tl.sum(count, 0)
            inside = (logit >= floor) & (above_count < k) & (tl.sum(mass, 0) < limit)
            accepted = (inside | (above_count == 0)).to(tl.int32)
            if accepted == 0:
                leader = tl.max(best, 0)
                token = tl.min(tl.where(best == leader, where, vocab - 1), 0)
                logit = tl.load(shaped + token)
    token = tl.minimum(token, vocab - 1)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, all_finite.to(tl.int8))
    if RESULTS:
        tl.store(results + row, tl.where(all_finite > 0, token, -1).to(tl.int64))
    if COUNT:  # noqa: SIM102 - known when it is compiled
        if (tl.load(ints + _PENALISED) > 0) & (all_finite > 0):
            seen = tensors.counts + slot * counts_row + token
            tl.store(seen, tl.load(seen) + 1)


class SamplingKernels:
    """The sampling kernels and their buffers for up to max_rows rows. Every stream that samples needs an instance."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self._max_rows, self._vocab, self._tiles = max_rows, vocab, triton.cdiv(vocab, TILE)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        ints = torch.empty(2, max_rows, self._tiles, dtype=torch.int32, device=device)
        by_tile, by_token = floats(4, max_rows, self._tiles), floats(2, max_rows, vocab)
        self._buffers = RowBuffers._make((*ints, *by_tile, floats(max_rows, self._tiles * SEGMENTS), *by_token))

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        params: SamplingTensors,
        allowed: Tensor | None = None,
        drafts: tuple[Tensor, Tensor] | None = None,
        results: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Samples one token per row. Returns int64 [R] tokens and bool [R] flags.

        A flag is False if a logit of the row is NaN or infinite; the row's token is then meaningless.

        Args:
            logits: [R, vocab] of any float dtype and row stride; not changed.
            slots: integer [R], the slot with the row's parameters. A slot with penalties counts the sampled token, so
                it may occur in one row only, except with `drafts`.
            positions: integer [R], the position of the token to sample.
            allowed: int32 [R, ceil(vocab / 32)]; bit i % 32 of word i // 32 allows token i. None: all.
            drafts: (inputs int64 [R], offsets int32 [R]) in a verify step: the input token of each row, and the number
                of drafts up to this token, which lie before it in memory. Penalties treat these drafts as output.
                A slot may occur in several rows, and no token is counted; `accept_drafts` counts them.
            results: int64 [R], receives each row's token, -1 if it is meaningless.
        """
        rows = logits.shape[0]
        assert rows <= self._max_rows
        assert logits.shape[1] == self._vocab
        assert logits.stride(1) == 1
        assert slots.shape == positions.shape == (rows,)
        assert allowed is None or allowed.shape == (rows, triton.cdiv(self._vocab, 32))
        assert results is None or results.shape == (rows,)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        finite = torch.empty(rows, dtype=torch.int8, device=logits.device)
        mask = params.words if allowed is None else allowed
        inputs, offsets = drafts or (slots, slots)
        counts_row, sizes, pdl = params.counts.stride(0), (self._vocab, self._tiles), pdl_args(logits.device)
        tensors = logits, slots, positions, params, mask, inputs, offsets, self._buffers
        strides = logits.stride(0), counts_row, mask.stride(0), inputs.stride(0)
        options = {"MASKED": allowed is not None, "DRAFTS": drafts is not None, **pdl}
        _score_kernel[(self._tiles, rows)](*tensors, *strides, *sizes, **options, num_warps=4)
        scan = min(SCAN, triton.next_power_of_2(self._vocab))
        outputs = tokens, finite, tokens if results is None else results
        options = {"COUNT": drafts is None, "RESULTS": results is not None, **pdl}
        tiles = {"TILES": triton.next_power_of_2(self._tiles), "SCAN": scan}
        _select_kernel[(rows,)](
            slots, params, self._buffers, *outputs, counts_row, *sizes, **tiles, **options, num_warps=scan // 256 or 1
        )
        return tokens, finite.view(torch.bool)


@triton.jit
def _count_kernel(counts, slots, tokens, counts_row, n, BN: tl.constexpr):
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = i < n
    slot = tl.load(slots + i, mask=ok, other=0).to(tl.int64)
    token = tl.load(tokens + i, mask=ok, other=0)
    said = token >= 0
    cell = counts + slot * counts_row + tl.where(said, token, ~token)
    tl.atomic_add(cell, 1, mask=ok & said)
    tl.atomic_or(cell, _IN_PROMPT, mask=ok & (token < 0))


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Counts tokens[i] as output in counts[slots[i]]. A negative value marks token ~tokens[i] as part of the prompt."""
    n = tokens.shape[0]
    if n:
        _count_kernel[(triton.cdiv(n, 128),)](counts, slots, tokens, counts.stride(0), n, BN=128, num_warps=4)


@triton.jit
def _accept_kernel(
    sampled,
    finite,
    inputs,
    cu_q,
    row_slots,
    tensors,
    last_tokens,
    counts_row,
    QP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0)
    first = tl.load(cu_q + row)
    num_new = tl.load(cu_q + row + 1) - first
    slot = tl.load(row_slots + row).to(tl.int64)
    j = tl.arange(0, QP)
    token = tl.load(sampled + first + j, mask=j < num_new, other=0)
    good = tl.load(finite + first + j, mask=j < num_new, other=0) > 0
    draft = tl.load(inputs + first + j + 1, mask=j + 1 < num_new, other=-1)
    _, ints = _parameters(tensors, slot)
    counted = tl.load(ints + _PENALISED) > 0
    # A token counts if all tokens before it equal the drafts at their places.
    stop = tl.min(tl.where(good & (draft == token), QP, j), 0)
    count = tl.sum((good & (j <= stop)).to(tl.int32), 0)
    tl.atomic_add(tensors.counts + slot * counts_row + token, 1, mask=j < tl.where(counted, count, 0))
    tl.store(last_tokens + slot, tl.sum(tl.where(j == count - 1, token, 0), 0), mask=count > 0)


def accept_drafts(
    sampled: Tensor,
    finite: Tensor,
    inputs: Tensor,
    cu_q: Tensor,
    row_slots: Tensor,
    params: SamplingTensors,
    last_tokens: Tensor,
    *,
    query: int,
) -> None:
    """Counts the tokens that a verify step accepts, and stores each row's last token in last_tokens.

    A draft is accepted if it and all drafts before it equal the tokens sampled at their places.

    Args:
        sampled, finite: int64 [T] and bool [T], the results of `SamplingKernels.sample`.
        inputs: int64 [T], the tokens of the step: a row's last token, then its drafts.
        cu_q: int32 [B + 1], the first token of each row.
        row_slots: int64 [B].
        last_tokens: int64 [slots].
        query: largest number of tokens in a row.
    """
    tensors = sampled, finite.view(torch.int8), inputs, cu_q, row_slots, params, last_tokens
    options = {"QP": triton.next_power_of_2(query), **pdl_args(sampled.device)}
    _accept_kernel[(row_slots.shape[0],)](*tensors, params.counts.stride(0), **options, num_warps=1)
