"""Weights in the forms that are fast on a CPU, after loading: packed by oneDNN, or of 8 bits.

    packed      numbers of the model's dtype in the order in which oneDNN's product reads them
    row_weight  float32 [k, n], a second form of a packed weight, for products of one row
    int8        weight[n, k] ~ numbers[n, k] * scales[n]    numbers: int8 in -127..127, scales: bfloat16

oneDNN's product of one row reads 15 GB/s where a plain product reads 23 GB/s (one core of an EPYC with AVX2), but it is
6 to 20% faster for 2 to 32 rows. A small model therefore keeps its weights in both forms.

torch's product with int8 weights takes bfloat16 inputs, sums in float32 and gives bfloat16 results. That is too coarse
for logits, so only the layers have int8 weights. Embedding and LM head keep the dtype. It serves `--weights int8`;
the weights of quantised checkpoints are dequantised when they are loaded, because no product of torch reads them
exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.layers import Attention, Embedding, Linear, LinearSlice
from engine.quantization.inputs import input_rounding
from engine.quantization.weight import QuantizedWeight

#: Bytes of all weights up to which they are kept in both forms: a second form doubles the memory.
MAX_BOTH_FORMS_BYTES = 1 << 30
INPUT_MULTIPLE = 16  # The int8 product reads this many numbers of a row at a time, without a check.
PACKED_ROWS = 16  # The packed order is chosen for this many tokens of a step; it serves any number.
#: (most rows, multiple to which as many rows are padded). oneDNN compiles a product for each number of rows and keeps
#: up to 0.5 MiB of code for each: without padding a pod grows by 700 MiB until it has seen steps of 1 to 400 tokens.
ROW_MULTIPLES = ((4, 1), (32, 4), (64, 8), (256, 16))
MAX_ROW_MULTIPLE = 32


def product(x: Tensor, linear: Linear | LinearSlice | Embedding) -> Tensor:
    """Returns linear(x), [T, out] in the dtype of x [T, in]; of an embedding, x @ weight.T."""
    if linear.rounding is not None:
        x = linear.rounding(x)
    if linear.packed is not None:
        rows = len(x)
        padding = padded_rows(rows) - rows
        padded = F.pad(x, (0, 0, 0, padding)) if padding else x
        result: Tensor = _packed_product()(padded, linear.packed, linear.bias, "none", [], "")
        return result[:rows]
    if linear.scales is not None:
        result = torch._weight_int8pack_mm(x.to(torch.bfloat16).contiguous(), linear.weight, linear.scales).to(x.dtype)
        return result if linear.bias is None else result.add_(linear.bias)
    return F.linear(x, linear.weight, linear.bias)


def padded_rows(rows: int) -> int:
    """Returns the number of rows with which a packed product of `rows` rows is computed."""
    multiple = next((multiple for most, multiple in ROW_MULTIPLES if rows <= most), MAX_ROW_MULTIPLE)
    return -(-rows // multiple) * multiple


@functools.cache
def _packed_product() -> Callable[..., Tensor]:
    """Returns oneDNN's product; torch has none where `can_pack` is False."""
    operation: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return operation


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this torch and this CPU have packed products of the dtype."""
    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(
    embedding: Embedding, layers: list[nn.Module], head: Linear | Embedding, *, keep_head: bool, row_weights: bool
) -> None:
    """Packs the weights of a decoder's linear layers that are not int8, and frees the plain ones.

    A head that is the embedding keeps its plain weight too, which `F.embedding` reads. keep_head: keep that of another
    head, for a draft model. row_weights: make `Linear.row_weight` of a small model.
    """
    modules = [m for layer in layers for m in layer.modules() if isinstance(m, Linear)]
    linears = [linear for linear in modules if linear.scales is None and not linear.plain]
    row_weights = row_weights and sum(m.weight.nbytes for m in (*linears, head)) <= MAX_BOTH_FORMS_BYTES
    last = [module for module in layers[-1].modules() if isinstance(module, Attention)]
    for attention in last:
        if attention.qkv.scales is None:
            attention.packed_kv = _packed(attention.kv.weight)  # a slice of packed numbers is not possible
    for linear in (*linears, head):
        if row_weights and linear.rounding is None:
            linear.row_weight = _row_weight(linear.weight)
        linear.packed = _packed(linear.weight)
        if linear is not head or (head is not embedding and not keep_head):
            _free(linear)


def place(linear: Linear, weight: QuantizedWeight, dtype: torch.dtype) -> None:
    """Gives a layer its weight in a form of this module: int8 if scheme and shape allow it, or dequantised."""
    scheme = linear.scheme
    fits = weight.numbers.device.type == "cpu" and linear.in_features % INPUT_MULTIPLE == 0
    if scheme is not None and scheme.layout == "load" and weight.kind == "int8" and fits:
        linear.weight = nn.Parameter(weight.numbers, requires_grad=False)
        linear.scales = weight.scales[:, 0].to(torch.bfloat16)
    else:
        linear.weight = nn.Parameter(weight.dequantize(dtype, linear.in_features), requires_grad=False)
    linear.rounding = input_rounding(weight)


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)
    return packed


def _row_weight(weight: Tensor) -> Tensor:
    """Returns a copy of weight [n, k] as [k, n], in which the longer dimension is contiguous."""
    outputs, inputs = weight.shape
    matrix = weight.detach()
    return matrix.t().contiguous() if outputs >= inputs else matrix.clone().t()


def _free(linear: Linear | Embedding) -> None:
    linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
