"""The gated delta rule in plain torch, for CPUs and as a reference of the kernels. All of it is float32.

A value head has a matrix S [value_dim, key_dim]. A token decays it and replaces the value under its key:

    S <- exp(g) S;    S <- S + beta (v - S k) k^T;    o = S q

A row of many tokens is computed in chunks (the parallel form of Yang et al., arXiv 2406.06484, with the decay of arXiv
2412.06464). Within a chunk G_i is the sum of g up to token i, and D_ij = exp(G_i - G_j) for j <= i, else 0:

    A = beta (K K^T * D), strictly lower              the tokens of the chunk that token i sees
    U = (I + A)^-1 beta V,  W = (I + A)^-1 beta exp(G) K
    N = U - W S^T                                     the new values of the chunk
    O = exp(G) Q S^T + (Q K^T * D) N
    S <- exp(G_end) S + N^T exp(G_end - G) K
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.groups.state_pool import LayerState, StateRow
from engine.models.gated_delta.layer import DeltaProjections, GatedDelta

CHUNK = 64  # Tokens of a chunk.
NORM_EPS = 1e-6  # Of the norms of queries and keys; config.json has no field for it.


class _RuleInputs(NamedTuple):
    """The inputs of the rule: of each token and head."""

    query: Tensor  # [T, heads, key_dim], of length key_dim ** -0.5.
    key: Tensor  # [T, heads, key_dim], of length one.
    value: Tensor  # [T, heads, value_dim]
    decay: Tensor  # [T, heads], g.
    beta: Tensor  # [T, heads]

    def part(self, first: int, end: int) -> _RuleInputs:
        """Returns the inputs of the tokens first..end."""
        return _RuleInputs(*(x[first:end] for x in self))


def gated_delta_torch(
    projected: DeltaProjections, layer: GatedDelta, state: LayerState, rows: Sequence[StateRow]
) -> Tensor:
    """Returns the layer's result before its output projection, [T, value_heads * value_dim]. Advances the states."""
    channels, heads, dim = layer.channels, layer.value_heads, layer.value_dim
    convolved = _convolve(projected.mixed[:, :channels], layer.rule.conv, state.conv, rows)
    keys = layer.key_heads * layer.key_dim
    query, key, value = torch.split(convolved.float(), [keys, keys, heads * dim], dim=-1)
    query, key = (_unit(x.view(-1, layer.key_heads, layer.key_dim)) for x in (query, key))
    query = query * layer.key_dim**-0.5
    query, key = (x.repeat_interleave(heads // layer.key_heads, dim=1) for x in (query, key))
    beta, decay = projected.gates.float().chunk(2, dim=-1)
    decay = -layer.rule.decay_log.exp() * F.softplus(decay + layer.rule.decay_bias)
    inputs = _RuleInputs(query, key, value.view(-1, heads, dim), decay, beta.sigmoid())
    decodes = num_decodes(rows)
    results: list[Tensor] = []
    if decodes:
        results.append(_decode(inputs.part(0, decodes), state.recurrent, [row.slot for row in rows[:decodes]]))
    first = decodes
    for row in rows[decodes:]:
        results.append(_prefill(inputs.part(first, first + row.num_new), state.recurrent, row))
        first += row.num_new
    result = torch.cat(results).to(projected.mixed.dtype)
    normed = F.rms_norm(result.float(), (dim,), None, layer.norm.eps).to(result.dtype) * layer.norm.weight
    gate = projected.mixed[:, channels:].view(-1, heads, dim)
    return (normed * F.silu(gate.float())).to(result.dtype).flatten(1)


def num_decodes(rows: Sequence[StateRow]) -> int:
    """Returns the number of first rows with one token, which are computed without chunks."""
    return sum(1 for _ in itertools.takewhile(lambda row: row.num_new == 1, rows))


def chunk_ends(row: StateRow) -> Iterator[int]:
    """Yields the ends of a row's chunks. No chunk goes beyond a snapshot."""
    start = 0
    for stop in (*(snapshot.length for snapshot in row.snapshots), row.num_new):
        while start < stop:
            start = min(start + CHUNK, stop)
            yield start


def _convolve(x: Tensor, weight: Tensor, state: Tensor, rows: Sequence[StateRow]) -> Tensor:
    """Returns silu of the causal convolution of x [T, channels], and stores the last inputs of each row."""
    kept, decodes = state.shape[1], num_decodes(rows)
    results: list[Tensor] = []
    if decodes:
        slots = torch.tensor([row.slot for row in rows[:decodes]], device=x.device)
        window = torch.cat((state[slots], x[:decodes, None]), 1)
        results.append((window * weight.t()).sum(1))
        state[slots] = window[:, 1:]
    first = decodes
    for row in rows[decodes:]:
        inputs = torch.cat((state[row.slot], x[first : first + row.num_new]))
        results.append(F.conv1d(inputs.t()[None], weight[:, None], groups=len(weight))[0].t())
        for snapshot in row.snapshots:
            state[snapshot.slot] = inputs[snapshot.length : snapshot.length + kept]
        state[row.slot] = inputs[row.num_new :]
        first += row.num_new
    return F.silu(torch.cat(results))


def _unit(x: Tensor) -> Tensor:
    """Returns vectors of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _decode(inputs: _RuleInputs, states: Tensor, slots: list[int]) -> Tensor:
    """Computes one token of each row, [rows, heads, value_dim]."""
    query, key, value, decay, beta = inputs
    index = torch.tensor(slots, device=states.device)
    matrix = states[index] * decay.exp()[..., None, None]
    new = (value - (matrix @ key[..., None])[..., 0]) * beta[..., None]
    matrix += new[..., None] * key[..., None, :]
    states[index] = matrix
    return (matrix @ query[..., None])[..., 0]


def _prefill(inputs: _RuleInputs, states: Tensor, row: StateRow) -> Tensor:
    """Computes the tokens of one row, [num_new, heads, value_dim]."""
    matrix, start, results = states[row.slot], 0, list[Tensor]()
    slots = {snapshot.length: snapshot.slot for snapshot in row.snapshots}
    for end in chunk_ends(row):
        result, matrix = _chunk(inputs.part(start, end), matrix)
        results.append(result)
        if end in slots:
            states[slots[end]] = matrix
        start = end
    states[row.slot] = matrix
    return torch.cat(results, 1).transpose(0, 1)


def _chunk(inputs: _RuleInputs, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one chunk of all heads: the results [heads, C, value_dim] and the matrices after it."""
    query, key, value, decay, beta = (x.transpose(0, 1) for x in inputs)
    total = decay.cumsum(-1)
    pairs = total[:, :, None] - total[:, None]
    upper = torch.ones(pairs.shape[1:], dtype=torch.bool, device=pairs.device).triu(1)
    pairs = pairs.masked_fill(upper, float("-inf")).exp()
    system = beta[..., None] * (key @ key.transpose(1, 2)) * pairs  # its diagonal is taken as one
    known = torch.cat((value, total.exp()[..., None] * key), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, seen = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)
    new = new - seen @ matrix.transpose(1, 2)
    result = (total.exp()[..., None] * query) @ matrix.transpose(1, 2) + (query @ key.transpose(1, 2) * pairs) @ new
    rest = (total[:, -1:] - total).exp()[..., None] * key
    return result, total[:, -1].exp()[:, None, None] * matrix + new.transpose(1, 2) @ rest
