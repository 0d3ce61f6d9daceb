"""An adapter in one piece of host memory, so that one copy brings it to the device.

    numbers   [ A of site 0 | B of its parts | A of site 1 | ... ]    in the model's dtype
    A         [ranks of all parts together, inputs]; of the embedding [tokens, rank]
    B         [outputs of the part, rank]

Ranks are padded with zeros to multiples of RANK_MULTIPLE, so kernels need no mask inside a tile of this size, and every
piece is aligned. `table` and `scales` say where the pieces are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.adapters.peft import AdapterFile, LoraPair
from engine.adapters.sites import MAX_PARTS, DecoderSites, Site
from engine.models.spec import UNSHARDED, Shard

RANK_MULTIPLE = 16  # The smallest depth of a product on tensor cores
A_OFFSET, RANKS, B_OFFSETS, TABLE_WIDTH = 0, 1, 1 + MAX_PARTS, 8  # Columns of the table


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter in host memory. It stays unchanged; an adapter with other weights is another object."""

    digest: str
    rank: int  # The largest rank of its modules
    numbers: Tensor  # Flat. All tensors are page-locked if the device is a GPU
    table: Tensor  # int64 [sites, TABLE_WIDTH]: place of A, padded ranks of the parts (0: none), places of B
    scales: Tensor  # float32 [sites, MAX_PARTS]
    load: int = 0  # Number of its load, by which the ranks of one engine know the same adapter

    def ranks(self, site: Site) -> list[int]:
        """Returns the padded rank of each part."""
        row = self.table[site.index, RANKS : RANKS + len(site.names)]
        return [int(rank) for rank in row]

    def a(self, site: Site) -> Tensor:
        """Returns A [ranks, inputs] of a site; of the embedding [tokens, rank]."""
        start, rows = int(self.table[site.index, A_OFFSET]), sum(self.ranks(site))
        flat = self.numbers[start : start + rows * site.inputs]
        return flat.view(site.inputs, rows) if site.is_embedding else flat.view(rows, site.inputs)

    def b(self, site: Site, part: int) -> Tensor:
        """Returns B [outputs, rank] of a part."""
        start, rank = int(self.table[site.index, B_OFFSETS + part]), self.ranks(site)[part]
        return self.numbers[start : start + site.outputs[part] * rank].view(-1, rank)


def pack_adapter(
    file: AdapterFile,
    sites: DecoderSites,
    dtype: torch.dtype,
    *,
    pin: bool,
    shard: Shard = UNSHARDED,
    load: int = 0,
) -> Adapter:
    """Brings an adapter, or the part of one rank, into the form of the device. `sites` may be those of any rank."""
    table = np.zeros((len(sites.all), TABLE_WIDTH), dtype=np.int64)
    scales = np.zeros((len(sites.all), MAX_PARTS), dtype=np.float32)
    end = 0
    for site in sites.all:
        if not sites.has(site, shard):
            continue
        row = table[site.index]
        for part, name in enumerate(site.names):
            if (pair := file.pairs.get(name)) is not None:
                row[RANKS + part] = padded_rank(pair.rank)
                scales[site.index, part] = pair.scale
        row[A_OFFSET], end = end, end + int(row[RANKS : RANKS + MAX_PARTS].sum()) * site.inputs
        for part, outputs in enumerate(site.outputs):
            row[B_OFFSETS + part], end = end, end + int(row[RANKS + part]) * outputs
    numbers = torch.zeros(end, dtype=dtype, pin_memory=pin)
    rank = max(pair.rank for pair in file.pairs.values())
    small = [torch.from_numpy(array) for array in (table, scales)]
    places, factors = (part.pin_memory() for part in small) if pin else small  # a copy of other memory would wait
    adapter = Adapter(file.digest, rank, numbers, places, factors, load)
    for site in sites.all:
        start = 0
        if not sites.has(site, shard):
            continue
        for part, name in enumerate(site.names):
            if (pair := file.pairs.get(name)) is None:
                continue
            a, (own_a, own_b) = adapter.a(site), _part_of(pair, site, part, shard)
            if site.is_embedding:
                a[:, : pair.rank] = own_a.t()
            else:
                a[start : start + pair.rank] = own_a
            adapter.b(site, part)[:, : pair.rank] = own_b
            start += padded_rank(pair.rank)
    return adapter


def _part_of(pair: LoraPair, site: Site, part: int, shard: Shard) -> tuple[Tensor, Tensor]:
    """Returns the A and B of a module that one rank has. Both follow the weight: see `Site.split`."""
    a, b, order = pair.a, pair.b, site.orders[part]
    if site.split == 1:
        a = a.narrow(1, shard.rank * site.inputs, site.inputs)
    elif site.split == 0:
        b = b.narrow(0, shard.among(site.copies[part]).rank * site.outputs[part], site.outputs[part])
    return a, b if order is None else b[order]


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
