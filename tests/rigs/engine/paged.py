"""Random paged KV pools, and attention over them in float64: the reference for all attention kernels."""

from __future__ import annotations

import torch

from engine.kv.kv_pool import LayerKV, dequantize_e4m3, quantize_e4m3

#: NaN as e4m3. Two such bytes are NaN as the bfloat16 of a scale.
NAN_BYTE = 0xFF


def poisoned_layer(
    blocks: int,
    layers: int,
    layer: int,
    kv_heads: int,
    block_size: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    latent_dim: int = 0,
) -> LayerKV:
    """Returns one layer of a pool of NaN, with the strides of a real pool. dtype uint8: e4m3 with scales."""
    shape = (blocks, layers, 1 if latent_dim else 2, kv_heads, block_size, dim)
    if dtype != torch.uint8:
        return LayerKV(torch.full(shape, float("nan"), dtype=dtype, device=device)[:, layer], None, latent_dim)
    codes = torch.full(shape, NAN_BYTE, dtype=dtype, device=device)
    scales = torch.full((blocks, layers, kv_heads, block_size, 4), NAN_BYTE, dtype=dtype, device=device)
    return LayerKV(codes[:, layer], scales.view(torch.bfloat16)[:, layer])


class PagedCase:
    """A batch of sequences in a pool that is NaN everywhere else. kv_dtype uint8: e4m3 with scales.

    latent_dim above 0: a token has one vector, whose first latent_dim numbers are its value.
    """

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
        kv_dtype: torch.dtype | None = None,
        scale: float | None = None,
        spread: float = 1.0,
        latent_dim: int = 0,
    ) -> None:
        self.lens, self.queries = lens, queries
        self.scale = dim**-0.5 if scale is None else scale
        blocks = [-(-n // block_size) for n in lens]
        total = sum(blocks) + 2
        order = torch.randperm(total, generator=gen, device=device).tolist()
        sizes = kv_heads, block_size, dim
        self.layer = poisoned_layer(total, 2, 1, *sizes, kv_dtype or dtype, device, latent_dim)
        self.tables = torch.full((len(lens), max(blocks) + 1), 2**30, dtype=torch.int32, device=device)
        self.q = (torch.randn(sum(queries), heads, dim, generator=gen, device=device) * spread).to(dtype)
        for i, n in enumerate(lens):
            for j in range(blocks[i]):
                block = order.pop()
                self.tables[i, j] = block
                used = min(block_size, n - j * block_size)
                new = torch.randn(self.layer.kv.shape[1], kv_heads, used, dim, generator=gen, device=device).to(dtype)
                if self.layer.scales is None:
                    self.layer.kv[block, :, :, :used] = new
                else:
                    self.layer.kv[block, :, :, :used], scales = quantize_e4m3(new)
                    self.layer.scales[block, :, :used] = scales.permute(1, 2, 0)
        ends = torch.tensor([0, *queries]).cumsum(0)
        self.cu_q = ends.to(torch.int32).to(device)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.out = torch.full_like(self.q[..., : self.layer.value_dim], float("nan"))

    def dense(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cached keys and values of sequence i, [kv_heads, len, D] each; values may be shorter."""
        n = self.lens[i]
        ids = self.tables[i, : -(-n // self.layer.block_size)].long()
        both = self.layer.kv[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :n]
        if self.layer.scales is not None:
            scales = self.layer.scales[ids].permute(3, 1, 0, 2).flatten(2, 3)[:, :, :n]
            both = dequantize_e4m3(both, scales, torch.float32)
        return both[0], both[-1, ..., : self.layer.value_dim]

    def reference(self, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Computes causal attention in float64, [rows, heads, D]. sinks: logits [heads] without values."""
        outs, row = [], 0
        for i, (n, t) in enumerate(zip(self.lens, self.queries, strict=True)):
            group = self.q.shape[1] // self.layer.num_kv_heads
            k, v = (x.double().repeat_interleave(group, 0) for x in self.dense(i))
            q = self.q[row : row + t].double().transpose(0, 1)
            row += t
            position = torch.arange(n - t, n, device=q.device)[:, None]
            key = torch.arange(n, device=q.device)[None]
            seen = key <= position
            if window:
                seen &= key > position - window
            scores = q @ k.transpose(1, 2) * self.scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, t, 1)), -1)
            outs.append((scores.softmax(-1)[..., :n] @ v).transpose(0, 1))
        return torch.cat(outs)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the relative error in the 2-norm. NaN if an element was not written."""
    out = out.double()
    return float((out - reference).norm() / reference.norm())


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
