"""Random paged pools and attention over them in float64: the reference of every attention kernel."""

from __future__ import annotations

import torch


class PagedCase:
    """A pool [blocks, layers, 2, heads, block_size, D] of NaN in which only the sequences' tokens are numbers."""

    def __init__(
        self,
        lens: list[int],
        queries: list[int],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        gen: torch.Generator,
        layers: int = 2,
        layer: int = 1,
    ) -> None:
        self.lens, self.queries, self.scale = lens, queries, dim**-0.5
        blocks = [-(-n // block_size) for n in lens]
        total = sum(blocks) + 2
        order = torch.randperm(total, generator=gen, device=device).tolist()
        pool = torch.full((total, layers, 2, kv_heads, block_size, dim), float("nan"), dtype=dtype, device=device)
        self.kv = pool[:, layer]
        self.tables = torch.full((len(lens), max(blocks) + 1), 2**30, dtype=torch.int32, device=device)
        rows = sum(queries)
        self.q = torch.randn(rows, heads, dim, generator=gen, device=device).to(dtype)
        for i, n in enumerate(lens):
            for j in range(blocks[i]):
                block = order.pop()
                self.tables[i, j] = block
                used = min(block_size, n - j * block_size)
                new = torch.randn(2, kv_heads, used, dim, generator=gen, device=device)
                self.kv[block, :, :, :used] = new.to(dtype)
        ends = torch.tensor([0, *queries]).cumsum(0)
        self.cu_q = ends.to(torch.int32).to(device)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.out = torch.full_like(self.q, float("nan"))

    def dense(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of sequence i, each [kv_heads, len, D]."""
        n, block_size = self.lens[i], self.kv.shape[3]
        ids = self.tables[i, : -(-n // block_size)].long()
        both = self.kv[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :n]
        return both[0], both[1]

    def reference(self, window: int = 0) -> torch.Tensor:
        outs, row = [], 0
        for i, (n, t) in enumerate(zip(self.lens, self.queries, strict=True)):
            k, v = (x.double().repeat_interleave(self.q.shape[1] // self.kv.shape[2], 0) for x in self.dense(i))
            q = self.q[row : row + t].double().transpose(0, 1)
            row += t
            position = torch.arange(n - t, n, device=q.device)[:, None]
            key = torch.arange(n, device=q.device)[None]
            seen = key <= position
            if window:
                seen &= key > position - window
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(~seen, float("-inf"))
            outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outs)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the 2-norm; NaN when an element was not written."""
    out = out.double()
    return float((out - reference).norm() / reference.norm())


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
