"""Attention over paged latents on Hopper: which layers the kernel reads, and its launches."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from engine.kernels import card
from engine.kernels.latent import hopper_kernel
from engine.kernels.paged_decode import DecodePlan, DecodeTile, DecodeWorkspace
from engine.kernels.pdl import pdl_args
from engine.kv.kv_pool import LayerKV

MAX_FEW = 32  # Largest number of rows in the form for few rows.
MIN_RANK, MAX_RANK, MAX_ROPE = 72, 512, 64
MIN_BLOCK = 16  # Each warp copies keys of one block.


@dataclass(frozen=True)
class LatentTile:
    """The tile of a program."""

    rows: int  # (token, head) pairs.
    keys: int
    stages: int  # Of Triton's pipeline. Block ids take half of them.
    warps: int
    programs: int  # Programs of an SM that run at once.
    hopper: bool = False  # The kernels of this module compute it.


@dataclass(frozen=True)
class HopperTile(DecodeTile):
    """A tile of the decode kernel of this module."""


def serves(layer: LayerKV) -> bool:
    """Returns whether these kernels can read the layer, on this card."""
    if triton.knobs.runtime.interpret or not card.has_wgmma(layer.kv.device):
        return False
    rank, rope = layer.latent_dim, layer.head_dim - layer.latent_dim
    fits = MIN_RANK <= rank <= MAX_RANK and rope <= MAX_ROPE and rank % 8 == rope % 8 == 0
    return layer.kv.element_size() == 2 and fits and layer.block_size % MIN_BLOCK == 0


def decode(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    *,
    scale_log2: float,
    out: Tensor,
) -> None:
    """Computes the shares of `latent_decode`. Its caller merges the parts.

    Args:
        scale_log2: scale of scores in units of log2.
    """
    programs, rows = plan.first_seq.shape[0], workspace.part.shape[1]
    hopper_kernel.attend[(rows // workspace.row_tile, programs)](
        q, layer.kv, block_tables, cu_q, seq_lens, plan.cum, plan.first_seq, out, workspace.part, workspace.part_lse,
        *_strides(q, layer, block_tables, out), seq_lens.shape[0], programs, scale_log2, KIND=int(hopper_kernel.DECODE),
        **_sizes(q, layer, workspace.row_tile, plan.tile.keys), **pdl_args(q.device),
    )  # fmt: skip


def prefill(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    programs: int,
    *,
    tile: LatentTile,
    scale_log2: float,
    out: Tensor,
    tiles: Tensor | None = None,
) -> None:
    """Computes `latent_prefill`, or `listed_prefill` if there is a list of tiles.

    Args:
        programs: number of programs of a sequence, or of the list.
    """
    kind, grid = hopper_kernel.PROMPT, (programs, seq_lens.shape[0])
    if tiles is not None:
        kind, grid = hopper_kernel.LISTED, (programs, 1)
    plan = cu_q if tiles is None else tiles
    hopper_kernel.attend[grid](
        q, layer.kv, block_tables, cu_q, seq_lens, plan, cu_q, out, out, out, *_strides(q, layer, block_tables, out),
        0, 0, scale_log2, KIND=int(kind), PDL=False, **_sizes(q, layer, tile.rows, tile.keys),
    )  # fmt: skip


def _sizes(q: Tensor, layer: LayerKV, rows: int, keys: int) -> dict[str, int]:
    """Returns the constants of a kernel."""
    rank, rope = layer.latent_dim, q.shape[2] - layer.latent_dim
    assert q.stride(2) == 1
    assert q.dtype == layer.kv.dtype
    assert not (q.storage_offset() | q.stride(0) | q.stride(1)) % 8  # Copies have 16 bytes.
    sizes = {"R": rank, "RP": triton.next_power_of_2(rank), "P": rope, "PP": max(32, triton.next_power_of_2(rope))}
    sizes |= {"HEADS": q.shape[1], "TOKEN": layer.kv.stride(3), "BS": layer.block_size}
    return {**sizes, "M": rows, "BN": keys, "FEW": rows <= MAX_FEW, "num_warps": 4}


def _strides(q: Tensor, layer: LayerKV, block_tables: Tensor, out: Tensor) -> tuple[int, ...]:
    return *q.stride()[:2], layer.kv.stride(0), block_tables.stride(0), *out.stride()[:2]
