"""Kernels of multi-head latent attention against float64, with pools and outputs that are NaN elsewhere.

Shapes are tiny in the interpreter. On a GPU they are those of DeepSeek-V2-Lite and V3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.attention.base import StepShape
from engine.attention.latent import LatentAttentionBackend
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import DecodeRows
from engine.kernels import card
from engine.kernels.kv_write import kv_write
from engine.kernels.latent import attention as latent
from engine.kernels.latent import hopper_kernel
from engine.kernels.latent.write import latent_write
from engine.kernels.paged_decode import plan_decode
from engine.kernels.paged_prefill import list_tiles
from tests.rigs.engine.eager_gluon import run_eagerly
from tests.rigs.engine.paged import TOLERANCE, PagedCase, error, poisoned_layer

CUDA = torch.cuda.is_available()
#: heads, rank, rope: V2-Lite and a rank of V3, V3, or small shapes whose sizes are no powers of two
SHAPES = [(16, 512, 64), (128, 512, 64), (5, 96, 24)] if CUDA else [(3, 24, 8), (16, 32, 16), (20, 16, 8)]
DTYPES = [torch.bfloat16, torch.float32] if CUDA else [torch.float32]
TILES = (
    [latent.LatentTile(16, 32, 3, 4, 1), latent.LatentTile(64, 64, 3, 8, 1)]
    if CUDA
    else [latent.LatentTile(16, 16, 1, 4, 1), latent.LatentTile(32, 32, 1, 4, 1)]
)
HOPPER = CUDA and card.has_wgmma(torch.device("cuda"))
if HOPPER:
    TILES += latent.HOPPER_TILES.values()


def case(
    lens: list[int],
    queries: list[int],
    shape: tuple[int, int, int],
    device: torch.device,
    gen: torch.Generator,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16 if CUDA else 4,
) -> PagedCase:
    heads, rank, rope = shape
    sizes = {"heads": heads, "kv_heads": 1, "dim": rank + rope, "latent_dim": rank, "block_size": block_size}
    return PagedCase(lens, queries, **sizes, dtype=dtype, device=device, gen=gen, scale=0.3)  # type: ignore[arg-type]


def decode(made: PagedCase, tile: latent.LatentTile, max_query: int) -> torch.Tensor:
    heads, rank = made.q.shape[1], made.layer.latent_dim
    space = latent.latent_workspace(tile, heads, max_query, rank, made.q.device)
    sizes = {"num_kv_heads": 1, "head_dim": made.layer.head_dim, "itemsize": made.layer.kv.element_size()}
    plan = plan_decode(made.cu_q, made.seq_lens, space, tile=latent.decode_tile(tile), **sizes)
    space.part.fill_(float("nan"))
    space.part_lse.fill_(float("nan"))
    rows = made.tables, made.cu_q, made.seq_lens
    return latent.latent_decode(
        made.q, made.layer, *rows, plan, space, max_query=max_query, scale=made.scale, out=made.out
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.keys}{'-hopper' * tile.hopper}")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [5, 1, 3, 2]], ids=["decode", "verify"])
def test_decode(
    queries: list[int],
    shape: tuple[int, int, int],
    tile: latent.LatentTile,
    dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    """Sequences of one token, of whole tiles, and of several shares."""
    if dtype == torch.float32 and CUDA:
        tile = latent.FLOAT32_TILE
    made = case([max(1, queries[0]), 3000, 64, 33] if CUDA else [5, 70, 16, 33], queries, shape, device, gen, dtype)
    assert error(decode(made, tile, max(queries)), made.reference()) < TOLERANCE[dtype]


@pytest.mark.skipif(CUDA, reason="a GPU runs the kernel itself")
@pytest.mark.parametrize("few", [True, False], ids=["few-rows", "many-rows"])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(5, 96, 24), (20, 128, 32)])
def test_the_hopper_kernel_in_torch(
    heads: int, rank: int, rope: int, few: bool, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths around a tile, several tokens of a sequence, shares of several sequences, and rows without tokens."""
    run_eagerly(hopper_kernel, ["attend"], monkeypatch)
    shape, queries = (heads, rank, rope), [1, 3, 1, 2, 1]
    made = case([1, 64, 65, 700, 127], queries, shape, torch.device("cpu"), gen, torch.bfloat16, 16)
    reference = made.reference()
    made.cu_q = torch.cat((made.cu_q, made.cu_q[-1:]))
    made.seq_lens = torch.cat((made.seq_lens, made.seq_lens.new_zeros(1)))
    made.tables = torch.cat((made.tables, made.tables[:1]))
    tile = latent.LatentTile(16 if few else 64, 64, 2, 4 if few else 8, 1, hopper=True)
    assert error(decode(made, tile, 3), reference) < TOLERANCE[torch.bfloat16]

    rows = made.q, made.layer, made.tables, made.cu_q, made.seq_lens
    options: dict[str, Any] = {"scale": made.scale, "out": torch.full_like(made.out, float("nan"))}
    latent.latent_prefill(*rows, max_query=3, tile=tile, **options)
    assert error(options["out"], reference) < TOLERANCE[torch.bfloat16]
    starts = np.array(made.lens) - np.array(queries)
    tiles = torch.from_numpy(list_tiles(starts, np.array(queries), 0, heads, tile.rows))
    monkeypatch.setattr(latent, "latent_tile", lambda *_: tile)
    options["out"].fill_(float("nan"))
    latent.listed_prefill(*rows, tiles, max_tokens=8, **options)
    assert error(options["out"], reference) < TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lengths_around_a_tile_on_hopper(
    dtype: torch.dtype, rows: int, device: torch.device, gen: torch.Generator
) -> None:
    """Lengths of one key, of a tile and its neighbours, and rows without tokens at the end."""
    lens = [1, 63, 64, 65, 127, 128, 129, 1000]
    made = case(lens, [1] * 8, (rows, 512, 64), device, gen, dtype)
    reference = made.reference()
    made.cu_q = torch.cat((made.cu_q, made.cu_q[-1:].repeat(2)))
    made.seq_lens = torch.cat((made.seq_lens, made.seq_lens.new_zeros(2)))
    made.tables = torch.cat((made.tables, made.tables[:2]))
    tile = next(tile for most, tile in latent.HOPPER_TILES.items() if rows <= most)
    assert error(decode(made, tile, 1), reference) < TOLERANCE[dtype]


def test_rows_without_tokens_and_lone_sequences(device: torch.device, gen: torch.Generator) -> None:
    """A captured step has rows without tokens at its end. One sequence is split over all programs."""
    made = case([90], [1], SHAPES[0], device, gen)
    made.cu_q = torch.tensor([0, 1, 1, 1], dtype=torch.int32, device=device)
    made.seq_lens = torch.tensor([90, 0, 0], dtype=torch.int32, device=device)
    made.tables = made.tables.repeat(3, 1)
    assert error(decode(made, latent.FLOAT32_TILE, 1), made.reference()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("listed", [False, True], ids=["rows", "listed"])
def test_prompts(
    listed: bool, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    """Whole prompts, chunks after a prefix, and a single token."""
    lens, queries = ([300, 700, 9, 50], [300, 90, 1, 17]) if CUDA else ([21, 30, 9, 13], [21, 7, 1, 2])
    made = case(lens, queries, shape, device, gen, dtype)
    rows = made.tables, made.cu_q, made.seq_lens
    tokens, options = sum(queries), {"scale": made.scale, "out": made.out}
    if listed:
        tile = latent.latent_tile(shape[0] * tokens, made.layer)
        starts = np.array(lens) - np.array(queries)
        tiles = torch.from_numpy(list_tiles(starts, np.array(queries), 0, shape[0], tile.rows)).to(device)
        latent.listed_prefill(made.q, made.layer, *rows, tiles, max_tokens=tokens, **options)
    else:
        latent.latent_prefill(made.q, made.layer, *rows, max_query=max(queries), **options)
    assert error(made.out, made.reference()) < TOLERANCE[dtype]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("queries", [True, False], ids=["queries", "keys-only"])
def test_write(interleaved: bool, queries: bool, device: torch.device, gen: torch.Generator) -> None:
    """Latents are normalised and written, keys and queries are rotated, and slots of -1 are left out."""
    (heads, rank, rope), tokens = SHAPES[-1], 4

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device)

    layer = poisoned_layer(6, 2, 1, 1, 4, rank + rope, torch.float32, device, rank)
    new, norm, query = random(tokens, rank + rope), random(rank), random(tokens, heads, 5 + rope)
    angles = random(50, rope // 2)
    positions, slots = torch.tensor([3, 40, 7, 0]), torch.tensor([9, 2, -1, 23], dtype=torch.int32)
    place = positions.to(device), slots.to(device), angles.cos(), angles.sin()
    target = torch.full((tokens, heads, rank + rope), float("nan"), device=device)
    rotated = {"query": query[..., 5:], "rotated": target[..., rank:]} if queries else {}
    latent_write(new, norm, 1e-6, layer, *place, interleaved=interleaved, **rotated)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else x.unflatten(-1, (2, -1))
        cos, sin = (t[:, None] for t in (angles.cos()[positions], angles.sin()[positions]))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    normed = torch.nn.functional.rms_norm(new[:, :rank], (rank,), norm, 1e-6)
    want = torch.cat((normed, rotate(new[:, None, rank:])[:, 0]), -1)
    slot_view = layer.kv[:, 0, 0].flatten(0, 1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(slot_view[slot], want[token])
    assert int(slot_view.isnan().all(-1).sum()) == len(slot_view) - 3
    if queries:
        torch.testing.assert_close(target[..., rank:], rotate(query[..., 5:]))
        assert bool(target[..., :rank].isnan().all())


@torch.inference_mode()
def test_the_backend_equals_torch(device: torch.device, gen: torch.Generator) -> None:
    """Steps with decoding rows, verified drafts and chunks, selected tokens, and the metadata of captured steps."""
    shape = heads, rank, rope = SHAPES[0]
    made = case([9, 40, 33, 60], [1, 20, 3, 12], shape, device, gen)
    cache = made.layer
    cache.kv.nan_to_num_()
    tables = [row[row < 2**30].tolist() for row in made.tables.cpu()]
    starts = [n - t for n, t in zip(made.lens, made.queries, strict=True)]
    step = StepShape(starts, made.queries, tables)
    new = torch.randn(sum(made.queries), 1, 1, rank + rope, generator=gen, device=device)
    score = {"scale": made.scale, "softcap": None}
    ours = LatentAttentionBackend([cache], heads, (None,), 0, **score)
    plain = TorchAttention([cache], heads, (None,), 0, **score)  # type: ignore[arg-type]
    want = plain.attend(made.q, new, cache, plain.prepare(step), None)
    assert want.shape == (36, heads, rank)
    written = cache.kv.clone()
    got = ours.attend(made.q, new, cache, ours.prepare(step), None)
    tolerance = TOLERANCE[torch.float32]  # The order of sums differs: single numbers differ by 2e-5.
    assert error(got, want.double()) < tolerance
    assert torch.equal(cache.kv, written)

    chosen = torch.tensor([0, 20, 23, 35], device=device)
    positions = torch.cat([torch.arange(s, n) for s, n in zip(starts, made.lens, strict=True)]).to(device)
    selected = ours.select_tokens(ours.prepare(step), chosen, positions)
    got = ours.attend_written(made.q[chosen], new, cache, selected, None)
    assert error(got, want[chosen].double()) < tolerance

    order = [0, 2, 1, 3]  # captured steps have the decoding rows first
    counts = [made.queries[r] for r in order]
    tokens = torch.cat([torch.arange(int(made.cu_q[r]), int(made.cu_q[r + 1])) for r in order]).to(device)
    cu_q = torch.tensor([0, *counts], device=device).cumsum(0).int()
    lens, rows = made.seq_lens[order], made.tables[order]
    arrays = np.array([starts[r] for r in order[2:]]), np.array(counts[2:])
    tiles = torch.from_numpy(ours.list_tiles(*arrays, 2, 40)).to(device)
    assert len(tiles) <= ours.tile_list_size(40, 4)
    decodes = DecodeRows(torch.tensor([0, 1, 4, 4, 4], dtype=torch.int32, device=device), lens * (lens < 40), 3)
    slots = torch.full((36,), -1, dtype=torch.int32, device=device)
    metadata = ours.listed_metadata(slots, cu_q, lens, rows, tiles, decodes)
    got = ours.attend_written(made.q[tokens], new, cache, metadata, None)
    assert error(got, want[tokens].double()) < tolerance
    kv_write(new, cache, slots)
    assert torch.equal(cache.kv, written)
