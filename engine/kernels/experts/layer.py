"""A mixture of experts on a GPU: the one function that models call, and its choice of kernels.

rows                     launches of a layer
up to MAX_FEW copies     norm with router and routing; gate and up; down
more                     norm, router, routing, sort, two grouped products, sum
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.kernels.experts.grouped import block_rows, many_rows
from engine.kernels.experts.routing import MAX_ROUTED, RoutingRule, norm_and_route, route, sort_copies
from engine.kernels.experts.vector import vector_rows
from engine.kernels.experts.weight import MXFP4, ExpertWeight
from engine.kernels.gemm import MAX_SKINNY_ROWS, skinny_gemm
from engine.kernels.norm import rms_norm

MAX_FEW, MAX_FEW_MXFP4 = 32, 16  # Largest number of copies that `vector_rows` computes faster.
MAX_SLOTS = 16  # The most experts of a token for `vector_rows`, whose code grows with them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """The parameters of a layer: the router, and the experts of this rank."""

    router: Tensor  # [E, hidden], all experts of the model.
    rule: RoutingRule
    gate_up: ExpertWeight  # [local, 2 * inner, hidden], the rows of gate, then those of up.
    down: ExpertWeight  # [local, hidden, inner].
    router_bias: Tensor | None = None  # [E].
    correction: Tensor | None = None  # [E], see `route`.
    gate_up_bias: Tensor | None = None  # [local, 2 * inner].
    down_bias: Tensor | None = None  # [local, hidden].
    gpt_oss: bool = False  # The activation is that of gpt-oss, not SiLU x mul.


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Returns whether kernels may use the conversions of sm_89. Cached: a device does not change."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def router_logits(normed: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the router's logits, float32 [T, E]."""
    if len(normed) <= MAX_SKINNY_ROWS:
        out = torch.empty(len(normed), len(router), dtype=torch.float32, device=normed.device)
        return skinny_gemm(normed, router, bias=bias, out=out)
    if normed.dtype == torch.float32 or normed.device.type == "cpu":
        logits = F.linear(normed, router).float()
    else:
        logits = torch.mm(normed, router.t(), out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def mixture(
    x: Tensor,
    layer: ExpertLayer,
    norm: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    max_few: int | None = None,
) -> Tensor:
    """Returns residual + experts(norm(x)), [T, hidden]; without a residual, the second addend.

    A CUDA graph can capture this call: nothing waits for the host. With experts of this rank only, the result is the
    partial sum over these.

    Args:
        x: [T, hidden], contiguous rows.
        norm: [hidden], weight of the RMSNorm before the experts.
        residual: [T, hidden]; may be x.
        out: result; may be x or the residual. None allocates it.
        max_few: largest number of copies (tokens x top_k) that are not sorted. None: the fastest choice.
    """
    rule, tokens, mxfp4 = layer.rule, len(x), layer.gate_up.kind == MXFP4.value
    shared: dict[str, Any] = {
        "gpt_oss": layer.gpt_oss,
        "gate_up_bias": layer.gate_up_bias,
        "down_bias": layer.down_bias,
    }
    shared |= {"residual": residual, "out": out, "first": rule.first}
    native = converts_e4m3(x.device)
    if max_few is None:
        max_few = MAX_FEW_MXFP4 if mxfp4 else MAX_FEW
    if tokens * rule.top_k <= max_few and tokens <= MAX_ROUTED and rule.top_k <= MAX_SLOTS:
        bias, correction = layer.router_bias, layer.correction
        routed = norm_and_route(x, norm, eps, layer.router, rule, bias=bias, correction=correction)
        return vector_rows(*routed, layer.gate_up, layer.down, native=native, **shared)
    normed = rms_norm(x, norm, eps)
    weights, experts = route(router_logits(normed, layer.router, layer.router_bias), rule, layer.correction)
    copies = sort_copies(
        experts,
        layer.gate_up.shape[0],
        block_rows(tokens * rule.top_k, len(layer.router), layer.gate_up.kind),
        rule.first,
    )
    return many_rows(normed, weights, experts, copies, layer.gate_up, layer.down, native=native, **shared)
