"""Random mixtures of experts in every form of weights, and their result in float64: the reference for the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.experts.layer import ExpertLayer
from engine.kernels.experts.routing import RoutingRule
from engine.kernels.experts.weight import ExpertWeight, fp8_weight, int4_weight, mxfp4_weight, plain_weight

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random_weight(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> tuple[ExpertWeight, Tensor]:
    """Returns a weight [E, N, K] and its numbers in float64. kind: plain, fp8, fp8_block, mxfp4, int4 or int4_zeros."""
    experts, outputs, inputs = shape
    if kind.startswith("int4"):
        codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device=device, generator=gen)
        scales = (torch.rand(experts, outputs, inputs // 32, generator=gen, device=device) / 64).half().float()
        zeros = (
            torch.randint(0, 16, scales.shape, device=device, generator=gen).byte() if kind == "int4_zeros" else None
        )
        numbers = torch.stack((codes & 15, codes >> 4), -1).double().view(*scales.shape, 32)
        exact = (numbers - (8 if zeros is None else zeros.double()[..., None])) * scales.double()[..., None]
        return int4_weight(codes, scales, zeros), exact.view(shape)
    if kind == "mxfp4":
        codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device=device, generator=gen)
        scales = torch.randint(119, 124, (experts, outputs, inputs // 32), device=device, generator=gen)
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=device)
        numbers = table[torch.stack((codes & 15, codes >> 4), -1).long()].view(experts, outputs, inputs // 32, 32)
        exact = numbers * (2.0 ** (scales.double() - 127))[..., None]
        return mxfp4_weight(codes, scales.to(torch.uint8)), exact.view(shape)
    weight = (torch.randn(shape, generator=gen, device=device) / inputs**0.5).to(dtype)
    if kind == "plain":
        return plain_weight(weight), weight.double()
    numbers = (weight.float() * 64).to(torch.float8_e4m3fn)
    if kind == "fp8":
        scales = torch.rand(experts, outputs, 1, generator=gen, device=device) / 32
        return fp8_weight(numbers, scales), numbers.double() * scales
    scales = torch.rand(experts, -(-outputs // 128), -(-inputs // 128), generator=gen, device=device) / 32
    spread = scales.repeat_interleave(128, 1)[:, :outputs].repeat_interleave(128, 2)[:, :, :inputs]
    return fp8_weight(numbers, scales), numbers.double() * spread


@dataclass(frozen=True)
class ExpertCase:
    """A layer with random parameters, and its numbers in float64."""

    layer: ExpertLayer
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    eps: float = 1e-5

    @staticmethod
    def make(
        kind: str,
        rule: RoutingRule,
        device: torch.device,
        gen: torch.Generator,
        *,
        experts: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype = torch.float32,
        gpt_oss: bool = False,
        corrected: bool = False,
    ) -> ExpertCase:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, device=device).to(dtype)

        gate_up, exact_gate_up = random_weight(kind, (experts, 2 * inner, hidden), dtype, device, gen)
        down, exact_down = random_weight(kind, (experts, hidden, inner), dtype, device, gen)
        layer = ExpertLayer(
            router=randn(experts, hidden) / hidden**0.5,
            rule=rule,
            gate_up=gate_up,
            down=down,
            router_bias=randn(experts) if gpt_oss else None,
            correction=randn(experts) / 4 if corrected else None,
            gate_up_bias=randn(experts, 2 * inner) if gpt_oss else None,
            down_bias=randn(experts, hidden) if gpt_oss else None,
            gpt_oss=gpt_oss,
        )
        return ExpertCase(layer, exact_gate_up, exact_down, randn(hidden))

    def normed(self, x: Tensor) -> Tensor:
        x = x.double()
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.norm.double()

    def expected(self, x: Tensor) -> Tensor:
        """Returns the sum over experts, float64 [T, hidden]."""
        layer, normed = self.layer, self.normed(x)
        logits = normed @ layer.router.double().T
        if layer.router_bias is not None:
            logits = logits + layer.router_bias.double()
        weights, experts = choose(logits, layer.rule, layer.correction)
        out = torch.zeros_like(normed)
        local = range(layer.rule.first, layer.rule.first + len(self.gate_up))
        for t in range(len(x)):
            for weight, expert in zip(weights[t], experts[t].tolist(), strict=True):
                if expert in local:
                    out[t] += weight * self.expert(expert - layer.rule.first, normed[t])
        return out

    def expert(self, e: int, x: Tensor) -> Tensor:
        """Returns the result of local expert e for one row."""
        layer = self.layer
        gate_up = self.gate_up[e] @ x
        if layer.gate_up_bias is not None:
            gate_up = gate_up + layer.gate_up_bias[e].double()
        gate, up = gate_up.chunk(2)
        if layer.gpt_oss:
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            y = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            y = torch.nn.functional.silu(gate) * up
        y = self.down[e] @ y
        return y if layer.down_bias is None else y + layer.down_bias[e].double()

    def part(self, first: int, count: int) -> ExpertCase:
        """Returns the case of a rank with the experts first .. first + count - 1."""

        def cut(weight: ExpertWeight) -> ExpertWeight:
            names = "numbers", "scales", "zeros"
            return replace(
                weight, **{n: t[first : first + count] for n in names if (t := getattr(weight, n)) is not None}
            )

        layer = self.layer
        biases = {
            name: None if (bias := getattr(layer, name)) is None else bias[first : first + count]
            for name in ("gate_up_bias", "down_bias")
        }
        rule = replace(layer.rule, first=first)
        layer = replace(layer, rule=rule, gate_up=cut(layer.gate_up), down=cut(layer.down), **biases)
        return replace(
            self, layer=layer, gate_up=self.gate_up[first : first + count], down=self.down[first : first + count]
        )


def choose(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns weights and experts of each row, [T, top_k], the best first."""
    scores = logits.sigmoid() if rule.sigmoid else logits.softmax(-1)
    choice = scores if correction is None else scores + correction.to(scores.dtype)
    if rule.groups > 1:
        grouped = choice.view(len(choice), rule.groups, -1)
        best = grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(rule.top_groups, -1).indices, 1).bool()
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).view_as(choice)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, experts)
    if rule.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * rule.scale, experts
