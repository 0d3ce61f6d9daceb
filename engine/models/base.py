"""What the engine knows of a model, whoever computes it: its shape, and a few operations.

Invariant: a model that loads is computed exactly. What cannot be is refused with a ConfigError that names the reason,
before or while it loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.attention.base import AttentionBackend
    from engine.kv.layer_kv import LayerKV


# Of one pass: (i, the residual stream [T, hidden] before layer i); i is the number of layers after the last. It may be
# read during the call.
LayerHook = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What KV, attention and scheduling need to know.

    windows[i] is layer i's sliding window in tokens (a query sees itself and the window - 1 tokens before it), None for
    full attention. scale: factor on the scores, None for head_dim ** -0.5. softcap: scores are bounded by
    softcap * tanh(score / softcap); None for unbounded. max_position: the longest sequence that the position embedding
    serves.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    scale: float | None = None
    softcap: float | None = None
    max_position: int
    eos_token_ids: tuple[int, ...]


class Model(Protocol):
    """A loaded model on one device. A step's tokens are one flat dimension T, whatever sequences they belong to."""

    @property
    def capturable(self) -> bool:
        """A CUDA graph can hold `hidden` and `logits`: neither waits for the host nor copies from it."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
        rows: Tensor | None = None,
        *,
        tap: LayerHook | None = None,
    ) -> Tensor:
        """States [R, hidden] of the tokens `rows` (int64[R]; None: all T), for `logits`.

        tokens[T] are at positions[T]; cache holds the pool's layers in order, which get the new keys and values. tap:
        only of models whose layers are called one by one here.
        """

    def write_kv(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
    ) -> None:
        """`hidden` for the keys and values alone."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] of hidden[R, hidden], what `hidden` returned: the states that the head is applied to."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab] of hidden[R, hidden], what `hidden` returned."""
