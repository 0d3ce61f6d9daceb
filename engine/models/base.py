"""The interface of a model: its shape, and the operations that the engine calls.

Invariant: a model that loads is computed exactly. A model that cannot be computed exactly is refused with a ConfigError
before or during loading; the error names the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.kv.groups.state_pool import StateShape, StepStates
from engine.kv.kv_pool import LayerKV

#: A forward pass calls this with (i, the residual stream [T, hidden] before layer i, valid during the call only). After
#: the last layer, i is the number of layers.
LayerHook = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The properties of a model that KV cache, attention and scheduler use."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Sliding window of each layer with KV in tokens: a query sees itself and the window - 1 tokens before. None: all.
    windows: tuple[int | None, ...]
    scale: float | None = None  # Factor on the attention scores. None: head_dim ** -0.5.
    softcap: float | None = None  # Bound of the scores: softcap * tanh(score / softcap). None: unbounded.
    max_position: int  # Longest sequence in tokens that the position embedding supports.
    eos_token_ids: tuple[int, ...]  # Of config.json and generation_config.json; `Engine` adds the tokenizer's.

    @property
    def latent_dim(self) -> int:
        """`KVLayout.latent_dim` of the model's KV."""
        return 0

    @property
    def kv_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.num_layers

    @property
    def states(self) -> StateShape | None:
        """The recurrent state of a sequence. None: the model has no layers with one."""
        return None


class ForwardContext(NamedTuple):
    """The KV pool and the attention of a forward pass."""

    cache: Sequence[LayerKV]  # The layers of the KV pool, in order.
    backend: AttentionBackend[Any]
    metadata: Any  # The result of `backend.prepare` for this step.
    layer_hook: LayerHook | None = None  # Called before each layer and after the last. Only `Decoder` supports it.
    adapters: Any = None  # A `StepAdapters`; None: no row of the step has one. Only `Decoder` supports them.
    states: StepStates | None = None  # The recurrent states of the step's rows. None: the model has none.


class Model(Protocol):
    """A loaded model on one device. The tokens of all sequences of a step form one flat dimension T."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture `forward` and `logits`: neither waits for the host nor copies from it."""

    def forward(self, tokens: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        """Computes hidden states [R, hidden], the input of `logits`, and writes the tokens' keys and values.

        tokens and positions are [T]. rows, int64[R], are the tokens that need a result; None: all T.
        """

    def write_kv(self, tokens: Tensor, positions: Tensor, context: ForwardContext) -> None:
        """Runs `forward` only as far as the keys and values of `tokens` need it."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Applies the norm before the LM head to states of `forward`, [R, hidden] to [R, hidden]."""

    def logits(self, hidden: Tensor, adapters: Any = None) -> Tensor:
        """Returns the logits float32[R, vocab] of states [R, hidden] of `forward`. adapters: `AdapterRows`."""
