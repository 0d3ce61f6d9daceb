"""The sites of a decoder: the products that may have adapters. Each has one or several modules of the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from common.errors import ConfigError
from engine.models.layers import MLP, Linear

if TYPE_CHECKING:
    from engine.models.base import Model
    from engine.models.decoder import Decoder

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

    def __init__(self, model: Decoder) -> None:
        self._by_linear: dict[nn.Module, Site] = {}
        self.all: list[Site] = []
        for index, layer in enumerate(model.layer_list):
            linears = [layer.attention.qkv, layer.attention.out]
            if isinstance(layer.mlp, MLP):
                linears += [layer.mlp.gate_up, layer.mlp.down]
            for linear in linears:
                self._by_linear[linear] = self._add(f"model.layers.{index}.", linear)
        spec = model.spec
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


def sites_of(model: Model) -> DecoderSites:
    """Returns the sites of a model. Raises ConfigError if adapters over it are not supported."""
    from engine.models.decoder import Decoder

    if not isinstance(model, Decoder):
        problem = "adapters over a model that transformers computes, or that several ranks compute, are not supported"
        raise ConfigError(f"max_adapters: {problem}: leave it 0", field="max_adapters")
    return DecoderSites(model)
