"""The operations of a decoder layer for a step of one token on a CPU, as in a chat with one user.

The step multiplies a vector with each weight. The memory's bandwidth is the limit, and one core nearly reaches it.
Everything else is calls of a few microseconds each, so this class computes the same as `TorchOps` with fewer calls:

    norm         a dot product and two multiplications
    rotation     one product with a matrix that all layers share
    product      with `Linear.row_weight`; the residual add is part of it

A step runs on one thread: waking another one takes longer than most operations. Products with int8 weights are limited
by arithmetic instead, so the larger ones use all threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.cpu_weights import product
from engine.models.layers import Attention, Embedding, Linear, LinearSlice, RMSNorm
from engine.models.ops import AttentionFn, TorchOps

#: Bytes of a weight up to which a product of one row gains nothing by a second thread.
MAX_ONE_THREAD_BYTES = 16 << 20
MIN_SPLIT_BYTES = 1 << 20  # Bytes of an int8 weight from which its product gains by a second thread.


class SingleRowOps(TorchOps):
    """The operations for one token, in float32. Without tensor parallelism."""

    _threads = 1  # Threads of the engine, while a step runs on one.
    _is_small = False  # Whether a step may run on one thread.

    @classmethod
    def of(cls, ops: TorchOps, linears: Sequence[Linear]) -> SingleRowOps:
        """Returns these operations with the rope tables of `ops`. linears: all products of the layers."""
        made = cls(ops._cos, ops._sin)
        made._is_small = all(map(_gains_nothing_by_threads, linears))
        return made

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Runs layers or the head on one thread, if no weight of the layers is large."""
        threads = torch.get_num_threads()
        if threads == 1 or not self._is_small:
            yield
            return
        self._threads = threads
        torch.set_num_threads(1)
        try:
            yield
        finally:
            self._threads = 1
            torch.set_num_threads(threads)

    def attention_for(self, positions: Tensor, context: ForwardContext) -> AttentionFn:
        attend_normed, rotation = super().attention_for(positions, context), self._rotation_matrix(positions)

        def attend(qkv: Tensor, attention: Attention, cache: LayerKV) -> Tensor:
            if attention.q_norm is not None:
                return attend_normed(qkv, attention, cache)
            heads, kv_heads = attention.heads, attention.kv_heads
            split = qkv.view(heads + 2 * kv_heads, attention.head_dim)
            rotated = torch.mm(split[: heads + kv_heads], rotation)
            split[heads : heads + kv_heads] = rotated[heads:]
            kv = split[heads:].view(1, 2, kv_heads, attention.head_dim)
            query = rotated[:heads].unsqueeze(0)
            attended = context.backend.attend(query, kv, cache, context.metadata, attention.window, attention.sinks)
            return attended.reshape(1, -1)

        return attend

    def _rotation_matrix(self, positions: Tensor) -> Tensor:
        """Returns [D, D] so that heads @ matrix are the heads, rotated to the position of the token, see `rotate_`."""
        cos, sin = self._cos[positions].squeeze(0), self._sin[positions].squeeze(0)
        return torch.diag(sin).roll(len(sin) // 2, 0).add_(torch.diag(cos))

    def norm_linear(self, x: Tensor, norm: RMSNorm, linear: Linear | Embedding | LinearSlice) -> Tensor:
        normed = self._norm(x, norm)
        weight = None if isinstance(linear, LinearSlice) else linear.row_weight
        if weight is None:
            return self._general_product(normed, linear)
        return torch.mm(normed, weight) if linear.bias is None else torch.addmm(linear.bias, normed, weight)

    def norm_swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
        return self._swiglu(self.norm_linear(x, norm, gate_up))

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        if linear.row_weight is None:
            return x.add_(self._general_product(y, linear), alpha=linear.multiplier)
        x.addmm_(y, linear.row_weight, alpha=linear.multiplier)
        return x if linear.bias is None else x.add_(linear.bias, alpha=linear.multiplier)

    def _general_product(self, x: Tensor, linear: Linear | Embedding | LinearSlice) -> Tensor:
        """Returns linear(x) by a weight in another form than `row_weight`."""
        if self._threads == 1 or linear.scales is None or linear.weight.nbytes < MIN_SPLIT_BYTES:
            return product(x, linear)
        torch.set_num_threads(self._threads)
        try:
            return product(x, linear)
        finally:
            torch.set_num_threads(1)

    def logits(self, x: Tensor, norm: RMSNorm, head: Linear | Embedding | LinearSlice) -> Tensor:
        return self.norm_linear(x, norm, head)

    def _norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Returns the RMSNorm of the only row of x, [1, n]."""
        row = x.view(-1)
        mean_square = torch.dot(row, row).item() / len(row)
        return torch.mul(x, norm.weight).mul_((mean_square + norm.eps) ** -0.5)

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up of [1, 2 * n]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _gains_nothing_by_threads(linear: Linear) -> bool:
    """Returns whether a product of one row is as fast on one thread, or chooses its threads itself."""
    if linear.scales is not None:
        return True
    weight = linear.weight if linear.plain else linear.row_weight
    return weight is not None and weight.nbytes <= MAX_ONE_THREAD_BYTES
