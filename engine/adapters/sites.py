"""The sites of a decoder: the products that may have adapters. Each has one or several modules of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from engine.models.layers import MLP, Attention, Linear
from engine.models.spec import ModelSpec

MAX_PARTS = 3  # Modules of a site: queries, keys and values


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One product of the decoder, or its embedding."""

    index: int
    names: tuple[str, ...]  # The modules in the checkpoint, in the order of the outputs
    inputs: int
    outputs: tuple[int, ...]  # Of each module
    orders: tuple[Tensor | None, ...]  # The order of each module's outputs, see `layers.Target`
    is_embedding: bool = False  # The inputs are token ids

    def largest(self, rank: int) -> int:
        """Returns the numbers of an adapter of this rank."""
        return rank * (len(self.names) * self.inputs + sum(self.outputs))


class DecoderSites:
    """All sites of a decoder: qkv, out, gate_up and down of each layer without experts, embedding and LM head."""

    def __init__(self, spec: ModelSpec, layers: Iterable[tuple[Attention, nn.Module]]) -> None:
        """`layers` has the attention and the MLP or experts of each layer."""
        self._by_linear: dict[nn.Module, Site] = {}
        self.all: list[Site] = []
        for index, (attention, mlp) in enumerate(layers):
            linears = [attention.qkv, attention.out]
            if isinstance(mlp, MLP):
                linears += [mlp.gate_up, mlp.down]
            for linear in linears:
                self._by_linear[linear] = self._add(f"model.layers.{index}.", linear)
        vocab, hidden = spec.vocab_size, spec.hidden_size
        self.embedding = self._append(("model.embed_tokens",), vocab, (hidden,), (None,), is_embedding=True)
        # Tied weights have two sites: PEFT changes the product of each module and not the shared weight.
        self.head = self._append(("lm_head",), hidden, (vocab,), (None,))

    def of(self, linear: nn.Module) -> Site:
        return self._by_linear[linear]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each module."""
        pairs = [(site, *part) for site in self.all for part in zip(site.names, site.outputs, strict=True)]
        return {name: (site.inputs, outputs) for site, name, outputs in pairs}

    def _add(self, prefix: str, linear: Linear) -> Site:
        names = tuple(prefix + name for name in linear.parts)
        orders = tuple(linear.orders.get(name) for name in linear.parts)
        return self._append(names, linear.in_features, tuple(linear.parts.values()), orders)

    def _append(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        orders: tuple[Tensor | None, ...],
        *,
        is_embedding: bool = False,
    ) -> Site:
        assert len(names) <= MAX_PARTS
        self.all.append(Site(len(self.all), names, inputs, outputs, orders, is_embedding))
        return self.all[-1]
