"""Mixture of experts: the parameters of a layer, and its computation in plain torch.

A router gives each token `top_k` experts and their weights. An expert is an MLP: down(act(gate(x), up(x))). The layer's
result is the weighted sum over the token's experts, plus the shared expert, which sees every token.

Ranks split the experts in one of two ways (`Shard.splits_experts`): each rank has a part of the intermediate size of
every expert, or it has whole experts (expert parallelism). The sum of the ranks' results is the layer's result either
way. `route` computes the same on every rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ConfigError
from engine.models.layers import MLP, Linear, Target
from engine.models.spec import ModelSpec, MoeSpec, Shard
from engine.models.spec.model import MXFP4_GROUP, Activation
from engine.quantization.inputs import InputRounding
from engine.quantization.scheme import Scheme
from engine.quantization.weight import BLOCK, FIXED_ZERO, QuantizedWeight

GPT_OSS_ALPHA, GPT_OSS_LIMIT = 1.702, 7.0  # Slope of the sigmoid, and the bound of gate and up, in gpt-oss.
#: Largest exponent of an MXFP4 scale, 2^63: the kernels' numbers fit a bfloat16 on the way. CPUs refuse more, too.
MAX_MXFP4_SCALE = 190
INT4_GROUP = 32  # Groups of 4-bit numbers that stay in 4 bits are multiples of this size.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # The positive numbers of 4 bits; bit 3 is the sign.


class ExpertNames(NamedTuple):
    """The names of a layer's tensors in a checkpoint."""

    router: str
    gate_up: str  # All experts stacked: [experts, 2 * I, hidden].
    down: str  # All experts stacked: [experts, hidden, I].
    #: gate, up and down of one expert, `{}` for its number. None: a checkpoint has the experts stacked only.
    each: tuple[str, str, str] | None = None
    #: gpt-oss: the stacked weights are transposed, and gate and up are the even and odd columns of gate_up.
    interleaved: bool = False


def _names(module: str, router: str, gate: str, up: str, down: str) -> ExpertNames:
    experts = f"{module}.experts"
    each = f"{experts}.{{}}.{gate}.weight", f"{experts}.{{}}.{up}.weight", f"{experts}.{{}}.{down}.weight"
    return ExpertNames(f"{module}.{router}", f"{experts}.gate_up_proj", f"{experts}.down_proj", each)


_USUAL_NAMES = _names("mlp", "gate", "gate_proj", "up_proj", "down_proj")
_GRANITE = "block_sparse_moe"
_NAMES = {
    "MixtralForCausalLM": _names("block_sparse_moe", "gate", "w1", "w3", "w2"),
    "GraniteMoeForCausalLM": ExpertNames(
        f"{_GRANITE}.router.layer", f"{_GRANITE}.input_linear.weight", f"{_GRANITE}.output_linear.weight"
    ),
    "GptOssForCausalLM": ExpertNames(
        "mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", interleaved=True
    ),
}


class ExpertRouter(nn.Module):
    """Chooses the experts of a token. Every rank has all of it.

    Attributes:
        weight: [experts, hidden].
        bias: [experts] or None, added to the logits.
        correction: float32 [experts] or None, added to the scores for the choice only.
    """

    float32_parameters: tuple[str, ...] = ("correction",)

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.name = _NAMES.get(spec.architecture, _USUAL_NAMES).router
        self.top_k, self.scoring, self.normalize = moe.top_k, moe.scoring, moe.normalize
        self.groups, self.top_groups, self.group_best = moe.groups, moe.top_groups, moe.group_best
        self.scale = moe.routed_scale * spec.residual_multiplier  # Factor on the weights.
        self.weight = nn.Parameter(torch.empty(moe.num_experts, spec.hidden_size))
        self.bias = nn.Parameter(torch.empty(moe.num_experts)) if moe.router_bias else None
        self.correction = nn.Parameter(torch.empty(moe.num_experts)) if moe.correction else None
        if not moe.correction:
            self.float32_parameters = ()

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Yields the name and the destination of each checkpoint tensor."""
        yield f"{self.name}.weight", Target(self.weight)
        if self.bias is not None:
            yield f"{self.name}.bias", Target(self.bias)
        if self.correction is not None:
            yield f"{self.name}.e_score_correction_bias", Target(self.correction)


class Experts(nn.Module):
    """The experts of a layer that this rank has, or its parts of all experts. E experts of intermediate size I.

    Attributes:
        gate_up: [E, 2 * I, hidden], the rows of gate before those of up. In MXFP4: uint8 [E, 2 * I, hidden / 2], the
            low four bits are the even input.
        down: [E, hidden, I]. In MXFP4: uint8 [E, hidden, I / 2].
        gate_up_bias, down_bias: [E, 2 * I] and [E, hidden], or None.
        gate_up_scales, down_scales: None if the weights are in the model's dtype. In MXFP4: uint8 exponents with a bias
            of 127 for each group of 32 inputs, [E, 2 * I, hidden / 32] and [E, hidden, I / 32]. In FP8 (e4m3 numbers):
            float32 for each output, [E, outputs, 1], or for blocks of 128 x 128 numbers. In 4 bits (uint8 as in MXFP4):
            float32 for groups, [E, outputs, groups].
        gate_up_zeros, down_zeros: uint8, zeros of the groups of 4-bit numbers; None in other forms.
        input_scales: float32 [E] by "gate_up" and "down": scales of their inputs, with static activations.
        scheme: how the weights are quantised in the checkpoint or while they load; None: not at all, or in MXFP4.
        first: number of the first expert. A token's other experts belong to other ranks and are left out here.
    """

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.names = _NAMES.get(spec.architecture, _USUAL_NAMES)
        self.activation: Activation = moe.activation
        self.first, self.num_experts = moe.first_local, moe.num_experts
        count, size, hidden = moe.num_local, moe.expert_size, spec.hidden_size
        self.size, self.hidden = size, hidden
        self.gate_up, self.gate_up_scales = _weight(count, 2 * size, hidden, mxfp4=moe.mxfp4)
        self.down, self.down_scales = _weight(count, hidden, size, mxfp4=moe.mxfp4)
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * size)) if moe.gate_up_bias else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if moe.down_bias else None
        self.gate_up_zeros: nn.Parameter | None = None
        self.down_zeros: nn.Parameter | None = None
        self.input_scales: dict[str, Tensor] = {}
        self.scheme: Scheme | None = None
        self.float32_parameters: tuple[str, ...] = ()

    def set_scheme(self, schemes: Mapping[str, Scheme | None], *, keep: bool) -> None:
        """Sets the scheme of the weights, by `projection_names`. Raises ConfigError if the weights differ in it.

        keep: weights of FP8 and 4 bits stay so, as the kernels of a GPU need. Otherwise they are dequantised when they
        are loaded, as other formats are.
        """
        first, *others = schemes.items()
        if any(scheme != first[1] for _, scheme in others):
            raise ConfigError(f"{first[0]} and other experts of its layer are quantised differently", field="model")
        self.scheme = first[1]
        if self.scheme is None or not keep or self.scheme.kind == "int8":
            return
        if self.scheme.kind == "int4":
            self._keep_int4(self.scheme)
            return
        block = self.scheme.extent == "block"
        if block and self.size % BLOCK:
            return  # gate and up would share a block
        for name, outputs, inputs in (("gate_up", 2 * self.size, self.hidden), ("down", self.hidden, self.size)):
            count = len(getattr(self, name))
            numbers = torch.empty(count, outputs, inputs, dtype=torch.float8_e4m3fn)
            extent = (-(-outputs // BLOCK), -(-inputs // BLOCK)) if block else (outputs, 1)
            setattr(self, name, nn.Parameter(numbers, requires_grad=False))
            setattr(self, f"{name}_scales", nn.Parameter(torch.empty(count, *extent)))
        self.float32_parameters = ("gate_up_scales", "down_scales")

    def _keep_int4(self, scheme: Scheme) -> None:
        """Makes the parameters 4-bit ones, unless this rank's part begins or ends within a group."""
        sizes = {"gate_up": (2 * self.size, self.hidden), "down": (self.hidden, self.size)}
        groups = {name: scheme.group_size or inputs for name, (_, inputs) in sizes.items()}
        if any(group % INT4_GROUP or sizes[name][1] % group for name, group in groups.items()):
            return
        for name, (outputs, inputs) in sizes.items():
            count, extent = len(getattr(self, name)), (outputs, inputs // groups[name])
            numbers, zeros = (
                torch.empty(count, *shape, dtype=torch.uint8) for shape in ((outputs, inputs // 2), extent)
            )
            setattr(self, name, nn.Parameter(numbers, requires_grad=False))
            setattr(self, f"{name}_scales", nn.Parameter(torch.empty(count, *extent)))
            setattr(self, f"{name}_zeros", nn.Parameter(zeros, requires_grad=False))
        self.float32_parameters = ("gate_up_scales", "down_scales")

    @property
    def quantized_bytes(self) -> int:
        """Bytes of quantised weights, scales and zeros; 0 for weights in the model's dtype."""
        kept = [self.gate_up, self.gate_up_scales, self.gate_up_zeros, self.down, self.down_scales, self.down_zeros]
        return 0 if self.gate_up_scales is None else sum(part.nbytes for part in kept if part is not None)

    def projection_names(self) -> list[str]:
        """Returns the names of all experts' projections; empty if a checkpoint has the experts stacked only."""
        each = () if self.names.each is None else self.names.each
        return [name.format(e).removesuffix(".weight") for e in range(self.num_experts) for name in each]

    def projections(self, shard: Shard) -> Iterator[Projection]:
        """Yields the projections of this rank's experts."""
        assert self.names.each is not None
        spans = self._spans(shard)
        for local in range(len(self.gate_up)):
            names = (name.format(self.first + local).removesuffix(".weight") for name in self.names.each)
            for kind, name in zip(("gate", "up", "down"), names, strict=True):
                outputs, inputs = (self.hidden, spans.whole) if kind == "down" else (spans.whole, self.hidden)
                yield Projection(name, kind, local, outputs, inputs, spans.inner)

    def place(self, projection: Projection, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        """Stores the weight of a projection, of which this rank has a part.

        4-bit weights in an order of their own (activation order) have no groups that the kernels know: with the first
        of them, all weights of the layer become numbers of `dtype`.
        """
        down, span = projection.kind == "down", projection.span
        if span != slice(0, projection.inputs if down else projection.outputs):
            weight = weight.columns(span) if down else weight.rows(span)
        name = "down" if down else "gate_up"
        if weight.input_scale is not None:
            self._add_input_scale(name, projection.local, weight.input_scale)
        if weight.order is not None:
            self.dequantize(dtype)

        def rows(kind: str) -> Tensor:
            tensor: Tensor = getattr(self, kind)[projection.local]
            return tensor if down else tensor.chunk(2)[projection.kind == "up"]

        numbers = rows(name)
        if getattr(self, f"{name}_scales") is None:
            numbers.copy_(weight.dequantize(numbers.dtype, numbers.shape[1]))
            return
        numbers.copy_(weight.numbers)
        rows(f"{name}_scales").copy_(weight.scales)
        if getattr(self, f"{name}_zeros") is not None:
            zeros = rows(f"{name}_zeros")
            zeros.fill_(FIXED_ZERO) if weight.zeros is None else zeros.copy_(weight.zeros)

    def _add_input_scale(self, name: str, local: int, scale: Tensor) -> None:
        """Notes a static scale of inputs. gate and up read the same inputs, so the larger of their scales counts."""
        scales = self.input_scales.setdefault(name, torch.zeros(len(self.gate_up), device=scale.device))
        scales[local] = torch.maximum(scales[local], scale)

    def round_inputs(self, name: str, local: int, x: Tensor) -> Tensor:
        """Returns the inputs of gate_up or down of an expert as the scheme rounds them."""
        scheme = self.scheme
        if scheme is None or scheme.activations == "none":
            return x
        scale = self.input_scales[name][local] if scheme.activations == "static" else None
        return InputRounding(scheme.kind, scheme.activations, scale)(x)

    def dequantize(self, dtype: torch.dtype) -> None:
        """Replaces quantised weights by weights of `dtype`, which the torch path computes with."""
        for name in ("gate_up", "down"):
            scales, zeros = getattr(self, f"{name}_scales"), getattr(self, f"{name}_zeros")
            if scales is not None:
                weight = _dequantize(getattr(self, name), scales, zeros, dtype)
                setattr(self, name, nn.Parameter(weight, requires_grad=False))
                setattr(self, f"{name}_scales", None)
                setattr(self, f"{name}_zeros", None)

    def check_scales(self) -> None:
        """Raises ConfigError if a scale of MXFP4 is too large."""
        for name in ("gate_up", "down"):
            scales: Tensor | None = getattr(self, f"{name}_scales")
            if scales is None or scales.dtype != torch.uint8:
                continue
            if (largest := int(scales.max())) > MAX_MXFP4_SCALE:
                problem = f"an MXFP4 scale is 2^{largest - 127}, at most 2^{MAX_MXFP4_SCALE - 127} is supported"
                raise ConfigError(problem, field="model")

    def targets(self, shard: Shard) -> Iterator[tuple[str, Target]]:
        """Yields the name and the destination of each checkpoint tensor, also of those that only other ranks need."""
        names, spans = self.names, self._spans(shard)
        if self.scheme is not None:
            return  # `projections` says what is read
        if names.interleaved:
            yield from self._interleaved_targets(spans)
            return
        whole = spans.whole
        replaced: dict[str, set[str]] = {names.gate_up: set(), names.down: set()}
        for expert in range(self.num_experts) if names.each is not None else ():
            assert names.each is not None
            local = expert - self.first
            gate, up, down = (name.format(expert) for name in names.each)
            replaced[names.gate_up] |= {gate, up}
            replaced[names.down].add(down)
            if 0 <= local < len(self.gate_up):
                gate_rows, up_rows = self.gate_up[local].chunk(2)
                yield gate, Target(gate_rows, 0 if spans.split else None)
                yield up, Target(up_rows, 0 if spans.split else None)
                yield down, Target(self.down[local], 1 if spans.split else None)
            else:
                yield from ((name, Target(None)) for name in (gate, up, down))

        def gate_up_part(part: Any) -> Tensor:
            first, last = spans.inner.start, spans.inner.stop
            return torch.cat((part[spans.experts, first:last], part[spans.experts, whole + first : whole + last]), 1)

        shapes = (self.num_experts, 2 * whole, self.hidden), (self.num_experts, self.hidden, whole)
        for name, tensor, shape, read in (
            (names.gate_up, self.gate_up, shapes[0], gate_up_part),
            (names.down, self.down, shapes[1], lambda part: part[spans.experts, :, spans.inner]),
        ):
            yield name, Target(tensor, shape=shape, read=read, replaces=frozenset(replaced[name]))

    def _interleaved_targets(self, spans: _Spans) -> Iterator[tuple[str, Target]]:
        """Yields the targets of gpt-oss. Its gate and up rows alternate, so this rank's rows are one range."""
        count, whole, hidden, names = self.num_experts, spans.whole, self.hidden, self.names
        rows = slice(2 * spans.inner.start, 2 * spans.inner.stop)
        experts, inner = spans.experts, spans.inner

        def target(tensor: Tensor, shape: tuple[int, ...], read: Callable[[Any], Tensor]) -> Target:
            return Target(tensor, shape=shape, read=read)

        if self.gate_up_scales is not None and self.down_scales is not None:
            groups = slice(inner.start // MXFP4_GROUP, inner.stop // MXFP4_GROUP)
            sizes = (count, 2 * whole, hidden // MXFP4_GROUP), (count, hidden, whole // MXFP4_GROUP)
            for suffix, bytes_per_group, gate_up, down in (
                ("blocks", (MXFP4_GROUP // 2,), self.gate_up, self.down),
                ("scales", (), self.gate_up_scales, self.down_scales),
            ):
                shapes = (*sizes[0], *bytes_per_group), (*sizes[1], *bytes_per_group)
                yield (
                    f"{names.gate_up}_{suffix}",
                    target(gate_up, shapes[0], lambda p: _deinterleave(p[experts, rows]).flatten(2)),
                )
                yield f"{names.down}_{suffix}", target(down, shapes[1], lambda p: p[experts, :, groups].flatten(2))
        else:
            shapes = (count, hidden, 2 * whole), (count, whole, hidden)
            yield (
                names.gate_up,
                target(self.gate_up, shapes[0], lambda p: _deinterleave(p[experts, :, rows].transpose(1, 2))),
            )
            yield names.down, target(self.down, shapes[1], lambda p: p[experts, inner].transpose(1, 2))
        if self.gate_up_bias is not None:
            shape = count, 2 * whole
            yield f"{names.gate_up}_bias", target(self.gate_up_bias, shape, lambda p: _deinterleave(p[experts, rows]))
            shape, name = (count, hidden), f"{names.down}_bias"
            bias = self.down_bias
            yield name, Target(None) if bias is None else target(bias, shape, lambda p: p[experts])

    def whole_shape(self, kind: str, shard: Shard) -> list[int]:
        """Returns the shape of the parameter `kind` in the whole model."""
        shape = list(getattr(self, kind).shape)
        shape[0] = self.num_experts
        if self._spans(shard).split and kind.startswith("gate_up"):
            shape[1] *= shard.size
        elif self._spans(shard).split and kind != "down_bias":
            shape[2] *= shard.size
        return shape

    def rank_part(self, kind: str, whole: Tensor, shard: Shard) -> Tensor:
        """Returns this rank's part of the whole model's parameter `kind`."""
        spans = self._spans(shard)
        part = whole[spans.experts]
        if spans.split and kind.startswith("gate_up"):
            gate, up = part.chunk(2, 1)
            part = torch.cat((gate.chunk(shard.size, 1)[shard.rank], up.chunk(shard.size, 1)[shard.rank]), 1)
        elif spans.split and kind != "down_bias":
            part = part.chunk(shard.size, 2)[shard.rank]
        return part

    def _spans(self, shard: Shard) -> _Spans:
        local = len(self.gate_up)
        split = shard.size > 1 and local == self.num_experts
        first = shard.rank * self.size if split else 0
        whole = self.size * shard.size if split else self.size
        return _Spans(slice(self.first, self.first + local), slice(first, first + self.size), whole, split)


class Projection(NamedTuple):
    """One projection of one expert in a checkpoint."""

    name: str
    kind: str  # gate, up or down.
    local: int  # The expert, counted from the first one of this rank.
    outputs: int  # Of the whole model.
    inputs: int
    span: slice  # This rank's outputs of gate and up, its inputs of down.


class _Spans(NamedTuple):  # The part of a layer's experts that a rank has.
    experts: slice
    inner: slice  # Its part of the intermediate size of each expert.
    whole: int  # The intermediate size of the whole model.
    split: bool  # Whether ranks split the intermediate size.


class MoE(nn.Module):
    """The feed-forward part of a layer with experts."""

    prepared: Any = None  # The parameters in the form of the GPU's kernels, see `FusedOps.prepare_experts`.

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.router, self.experts = ExpertRouter(spec, moe), Experts(spec, moe)
        name = "mlp.shared_expert" if moe.shared_gate else "mlp.shared_experts"
        self.shared = MLP(spec, name, moe.shared_size) if moe.shared_size else None
        self.shared_gate = Linear(spec.hidden_size, {f"{name}_gate": 1}, bias=False) if moe.shared_gate else None
        if self.shared_gate is not None:
            self.shared_gate.plain = True


def route(x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
    """Returns the weights float32 [T, top_k] and the experts int32 [T, top_k] of tokens x [T, hidden].

    Computed in float32: a rounded score may choose another expert.
    """
    bias = None if router.bias is None else router.bias.float()
    logits = F.linear(x.float(), router.weight.float(), bias)
    scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
    choice = scores if router.correction is None else scores + router.correction
    if router.groups > 1:
        grouped = choice.view(len(x), router.groups, -1)
        best = grouped.topk(router.group_best, dim=-1).values.sum(-1).topk(router.top_groups, dim=-1).indices
        open_groups = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=x.device).scatter_(1, best, True)
        choice = grouped.masked_fill(~open_groups.unsqueeze(-1), float("-inf")).flatten(1)
    experts = choice.topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.scale, experts.int()


def grouped_experts(x: Tensor, weights: Tensor, experts: Tensor, layer: Experts) -> Tensor:
    """Returns the weighted sum [T, hidden] over each token's experts. The experts of other ranks add nothing.

    Args:
        x: [T, hidden].
        weights: float32 [T, top_k].
        experts: int32 [T, top_k], numbers in the whole model.
    """
    tokens, top_k = experts.shape
    numbers, copies = (experts.flatten().long() - layer.first).sort(stable=True)
    ends = torch.searchsorted(numbers, torch.arange(len(layer.gate_up) + 1, device=x.device)).tolist()
    results = x.new_zeros(tokens * top_k, x.shape[1])
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        rows = copies[start:end]
        gate_up, down = _expert_weights(layer, expert, x.dtype)
        bias = None if layer.gate_up_bias is None else layer.gate_up_bias[expert]
        inputs = layer.round_inputs("gate_up", expert, x[rows // top_k])
        gated = activate(F.linear(inputs, gate_up, bias), layer.activation)
        gated = layer.round_inputs("down", expert, gated)
        bias = None if layer.down_bias is None else layer.down_bias[expert]
        results[rows] = F.linear(gated, down, bias)
    return (results.view(tokens, top_k, -1).float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns the input [T, I] of `down` for gate and up, [T, 2 * I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=GPT_OSS_LIMIT), up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return (up + 1) * gate * torch.sigmoid(GPT_OSS_ALPHA * gate)


def dequantize_mxfp4(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weights [..., K] of uint8 numbers [..., K / 2] and uint8 scales [..., K / 32]."""
    table = _mxfp4_table(numbers.device)
    nibbles = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
    values = table[nibbles.int()].view(*scales.shape, MXFP4_GROUP)
    return torch.ldexp(values, (scales.int() - 127).unsqueeze(-1)).flatten(-2).to(dtype)


@functools.cache
def _mxfp4_table(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1 + tuple(-number for number in _E2M1), device=device)


def _weight(count: int, rows: int, inputs: int, *, mxfp4: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Makes uninitialised weights [count, rows, inputs] and, in MXFP4, their scales."""
    if not mxfp4:
        return nn.Parameter(torch.empty(count, rows, inputs)), None

    def numbers(width: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(count, rows, width, dtype=torch.uint8), requires_grad=False)

    return numbers(inputs // 2), numbers(inputs // MXFP4_GROUP)


def _deinterleave(rows: Tensor) -> Tensor:
    """Returns [E, 2 * I, ...] with the even rows before the odd ones."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _expert_weights(layer: Experts, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns gate_up and down of one expert in the dtype."""
    gate_up, down = layer.gate_up[expert], layer.down[expert]
    if layer.gate_up_scales is not None and layer.down_scales is not None:
        zeros = [None if z is None else z[expert] for z in (layer.gate_up_zeros, layer.down_zeros)]
        gate_up = _dequantize(gate_up, layer.gate_up_scales[expert], zeros[0], dtype)
        down = _dequantize(down, layer.down_scales[expert], zeros[1], dtype)
    return gate_up, down


def _dequantize(numbers: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the weights [..., N, K] of 4-bit (with zeros), MXFP4 or FP8 numbers."""
    if zeros is not None:
        values = torch.stack((numbers & 15, numbers >> 4), dim=-1).view(*scales.shape, -1).float()
        return ((values - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2).to(dtype)
    if numbers.dtype == torch.uint8:
        return dequantize_mxfp4(numbers, scales, dtype)
    outputs, inputs = numbers.shape[-2:]
    if scales.shape[-2:] != (outputs, 1):
        scales = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :outputs, :inputs]
    return (numbers.float() * scales).to(dtype)
