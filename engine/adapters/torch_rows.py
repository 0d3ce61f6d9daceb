"""Adapters of a step in plain torch: one product for each adapter, site and part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.adapters.packed import Adapter
from engine.adapters.rows import NO_ADAPTER
from engine.adapters.sites import DecoderSites, Site
from engine.models.layers import RMSNorm
from engine.models.ops import rms_norm_torch


class _TorchShrunk(NamedTuple):
    """A x of one site."""

    site: Site
    states: list[tuple[Adapter, Tensor, Tensor]]  # Of each adapter: its rows, and [rows, ranks]


class TorchRows:
    """Implements `AdapterRows` on a CPU."""

    slots: np.ndarray | None

    def __init__(self, sites: DecoderSites, adapters: Sequence[Adapter | None], slots: np.ndarray) -> None:
        self.sites, self.slots = sites, slots
        self._groups: list[tuple[Adapter, Tensor]] = []
        for slot in np.unique(slots[slots != NO_ADAPTER]).tolist():
            adapter = adapters[slot]
            assert adapter is not None, "rows use a slot without an adapter"
            self._groups.append((adapter, torch.from_numpy(np.flatnonzero(slots == slot))))

    def shrink(self, x: Tensor, site: Site, norm: RMSNorm | None) -> _TorchShrunk:
        states = list[tuple[Adapter, Tensor, Tensor]]()
        for adapter, rows in self._groups:
            if any(adapter.ranks(site)):
                part = x[rows]
                part = part if norm is None else rms_norm_torch(part, norm)
                states.append((adapter, rows, F.linear(part, adapter.a(site))))
        return _TorchShrunk(site, states)

    def expand(self, shrunk: _TorchShrunk, out: Tensor, *, first_part: int = 0, factor: float = 1.0) -> None:
        for adapter, rows, states in shrunk.states:
            _add_states(out, states, adapter, shrunk.site, rows, first_part, factor)

    def expand_swiglu(self, shrunk: _TorchShrunk, gate_up: Tensor) -> Tensor:
        self.expand(shrunk, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def row_change(self, shrunk: _TorchShrunk) -> None:
        return None

    def chunk_change(self, shrunk: _TorchShrunk) -> None:
        return None

    def add_embedding(self, out: Tensor, tokens: Tensor) -> None:
        site = self.sites.embedding
        for adapter, rows in self._groups:
            if any(adapter.ranks(site)):
                _add_states(out, adapter.a(site)[tokens[rows]], adapter, site, rows, 0, 1.0)


def _add_states(
    out: Tensor, states: Tensor, adapter: Adapter, site: Site, rows: Tensor, first_part: int, factor: float
) -> None:
    """Adds B of each part times its states [rows, ranks]."""
    column = start = 0
    for part, (rank, outputs) in enumerate(zip(adapter.ranks(site), site.outputs, strict=True)):
        if part >= first_part:
            if rank:
                change = F.linear(states[:, start : start + rank], adapter.b(site, part)).to(out.dtype)
                scale = float(adapter.scales[site.index, part]) * factor
                out[:, column : column + outputs].index_add_(0, rows, change, alpha=scale)
            column += outputs
        start += rank
