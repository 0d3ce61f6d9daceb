"""`ModelSpec`, the description of a model for our decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.kv.groups.state_pool import StateShape
from engine.models.base import ModelShape
from engine.models.spec.rope import RopeSpec

MXFP4_GROUP = 32  #: Inputs that share a scale in MXFP4.

Activation = Literal["silu", "gpt_oss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The mixture of experts that replaces the MLP of some layers; the experts that this rank holds."""

    num_experts: int  # Experts of a layer, of all ranks together.
    top_k: int  # Experts of a token.
    expert_size: int  # Intermediate size of an expert on this rank.
    layers: tuple[bool, ...]  # Whether a layer has experts instead of an MLP.
    first_local: int = 0  # The first expert of this rank.
    num_local: int  # Experts of this rank.
    #: Scores of the experts: softmax over the logits of all experts, or the sigmoid of each.
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # The weights of a token's experts are divided by their sum.
    routed_scale: float = 1.0  # Factor on the weights.
    #: Experts are chosen from the `top_groups` best of `groups` equal groups, by the sum of a group's best scores.
    groups: int = 1
    top_groups: int = 1
    #: How many scores are summed. Not in the repr: it follows from the architecture, and revisions hash the repr.
    group_best: int = field(default=2, repr=False)
    router_bias: bool = False  # The router's logits have a bias.
    correction: bool = False  # A bias of each expert takes part in the choice, but not in the weights.
    shared_size: int = 0  # Intermediate size of the expert that sees every token, on this rank; 0: there is none.
    #: The shared expert's result is multiplied with a sigmoid. Not in the repr, like `group_best`.
    shared_gate: bool = field(default=False, repr=False)
    activation: Activation = "silu"
    gate_up_bias: bool = False
    down_bias: bool = False  # On one rank only if ranks split an expert, because their partial sums are added.
    mxfp4: bool = False  # The checkpoint has the experts in MXFP4 (blocks and scales).


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ModelShape):
    """A decoder of the Llama family."""

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    #: RMSNorm of queries and keys before the rotation: of each head, or of all heads together.
    qk_norm: Literal["head", "all"] | None
    tie_word_embeddings: bool
    rope: RopeSpec
    moe: MoeSpec | None = None
    sinks: bool = False  # Each query head has a learned logit in its softmax, which belongs to no key.
    embedding_multiplier: float = 1.0  # Factor on the embeddings.
    residual_multiplier: float = 1.0  # Factor on what attention and MLP add to the residual stream.
    logits_divisor: float = 1.0
    extra_layers: int = 0  # Layers after the decoder's in the checkpoint, for multi-token prediction. Not used.
    #: Ranks that hold the same KV head, see `Shard`. Not in the repr, which is part of a model's revision.
    kv_copies: int = field(default=1, repr=False)

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that the rope tables cover."""
        return self.head_dim

    @property
    def output_gate(self) -> bool:
        """Whether the results of attention are multiplied with a sigmoid of a projection of the states."""
        return False

    @property
    def zero_centred(self) -> bool:
        """Whether the checkpoint has the weights of norms minus one, and they need float32."""
        return False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts instead of an MLP."""
        return self.moe is not None and self.moe.layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024).

    Each token has one vector for all heads: a latent of `rank` numbers, and a rotated key of `rope_dim` numbers. A head
    has a matrix that makes its key from the latent, and one that makes its value.
    """

    query_rank: int | None  # Size of the latent from which queries are made. None: they are made from the states.
    rank: int
    key_dim: int  # Numbers of a head's query and key that do not rotate.
    rope_dim: int  # Numbers that rotate.
    value_dim: int  # Numbers of a head's value.
    interleaved: bool  # Dimension 2 * i rotates with 2 * i + 1. False: i rotates with i + rope_dim / 2.


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentModelSpec(ModelSpec):
    """A decoder with multi-head latent attention. In the KV cache it has one kv head of `rank` + `rope_dim` numbers."""

    latent: LatentSpec

    @property
    def latent_dim(self) -> int:
        return self.latent.rank

    @property
    def rope_dim(self) -> int:
        return self.latent.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """The layers of gated delta networks (Yang et al., 2024, arXiv 2412.06464) of a hybrid model.

    Queries and keys have `key_heads` heads; each of them serves value_heads / key_heads value heads.
    """

    layers: tuple[bool, ...]  # Whether a layer is a gated delta layer; the others have attention.
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # Tokens that the convolution before the rule sees.
    #: The checkpoint has queries, keys, values and output gates of a key head side by side, in one projection.
    grouped: bool

    @property
    def channels(self) -> int:
        """Numbers of a token's queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModelSpec(ModelSpec):
    """A decoder with gated delta layers and attention layers, which have output gates. Norms are zero-centred."""

    delta: GatedDeltaSpec

    @property
    def kv_layers(self) -> int:
        return self.num_layers - sum(self.delta.layers)

    @property
    def states(self) -> StateShape:
        delta = self.delta
        return StateShape(
            layers=sum(delta.layers),
            heads=delta.value_heads,
            value_dim=delta.value_dim,
            key_dim=delta.key_dim,
            channels=delta.channels,
            taps=delta.taps,
        )

    @property
    def output_gate(self) -> bool:
        return True

    @property
    def zero_centred(self) -> bool:
        return True
