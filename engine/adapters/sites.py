"""The sites of a decoder: the products that may have adapters. Each has one or several modules of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from engine.models.layers import MLP, Attention, Linear
from engine.models.spec import UNSHARDED, ModelSpec, Shard

MAX_PARTS = 3  # Modules of a site: queries, keys and values


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One product of the decoder, or its embedding."""

    index: int
    names: tuple[str, ...]  # The modules in the checkpoint, in the order of the outputs
    inputs: int  # On one rank
    outputs: tuple[int, ...]  # Of each module on one rank
    orders: tuple[Tensor | None, ...]  # The order of each module's outputs, see `layers.Target`
    is_embedding: bool = False  # The inputs are token ids
    #: What ranks split, as in `layers.Linear`: 0: the outputs, so B is split and A is whole. 1: the inputs, so A is
    #: split and B is whole. None: every rank has all of the adapter.
    split: int | None = None
    copies: tuple[int, ...] = ()  # Of each module: neighbouring ranks that have the same outputs, if outputs are split

    def largest(self, rank: int) -> int:
        """Returns the numbers of an adapter of this rank."""
        return rank * (len(self.names) * self.inputs + sum(self.outputs))


class DecoderSites:
    """All sites of a decoder: qkv, out, gate_up and down of each layer without experts, embedding and LM head."""

    def __init__(
        self, spec: ModelSpec, layers: Iterable[tuple[Attention, nn.Module]], shard: Shard = UNSHARDED
    ) -> None:
        """`layers` has the attention and the MLP or experts of each layer. `shard` is the part that they are of."""
        self.shard = shard
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
        """Inputs and outputs of each module in the whole model."""
        found: dict[str, tuple[int, int]] = {}
        for site in self.all:
            inputs = site.inputs * (self.shard.size if site.split == 1 else 1)
            for part, (name, outputs) in enumerate(zip(site.names, site.outputs, strict=True)):
                ranks = self.shard.among(site.copies[part]).size if site.split == 0 else 1
                found[name] = inputs, outputs * ranks
        return found

    def numbers(self, rank: int) -> int:
        """Returns the numbers of an adapter of this rank that changes all modules, on this rank of the group."""
        return sum(site.largest(rank) for site in self.all if self.has(site, self.shard))

    def has(self, site: Site, shard: Shard) -> bool:
        """Returns whether a rank computes a site: rank 0 alone computes logits."""
        return site is not self.head or shard.rank == 0

    def _add(self, prefix: str, linear: Linear) -> Site:
        names = tuple(prefix + name for name in linear.parts)
        orders = tuple(linear.orders.get(name) for name in linear.parts)
        copies = tuple(linear.copies.get(name, 1) for name in linear.parts)
        parts = tuple(linear.parts.values())
        return self._append(names, linear.in_features, parts, orders, split=linear.split, copies=copies)

    def _append(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        orders: tuple[Tensor | None, ...],
        *,
        is_embedding: bool = False,
        split: int | None = None,
        copies: tuple[int, ...] = (),
    ) -> Site:
        assert len(names) <= MAX_PARTS
        self.all.append(Site(len(self.all), names, inputs, outputs, orders, is_embedding, split, copies))
        return self.all[-1]
