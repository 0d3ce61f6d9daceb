"""Counter-based noise: a token's noise depends on its own request and position, and not on the batch.

Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011) in int64 arithmetic.

    key        seed of the request: low word, high word
    counter    vocabulary index // 4, position, child, stream
    output     four words; word `index % 4` belongs to vocabulary index `index`

Stream 0 draws the tokens. A kernel that follows this layout gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
#: The largest float32 below 1.
_LARGEST = 1.0 - 2.0**-24


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Returns the four output words as int64 tensors of 32-bit words. Counter and key words broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap in int64, but their low and high words are correct.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = (p1 >> 32).bitwise_and_(_WORD) ^ (c1 ^ k0), (p0 >> 32).bitwise_and_(_WORD) ^ (c3 ^ k1)
        c1, c3 = p1.bitwise_and_(_WORD), p0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


def _words(seed: Tensor, child: Tensor, position: Tensor, group: Tensor, stream: int = 0) -> Tensor:
    """Returns the output words, int64 [R, G, 4], for counter words `group` [R or 1, G]."""
    counter = (group, position[:, None], child[:, None], torch.full_like(position, stream)[:, None])
    key = ((seed & _WORD)[:, None], ((seed >> 32) & _WORD)[:, None])
    return torch.stack(philox(counter, key), dim=-1)


def _gumbel(word: Tensor) -> Tensor:
    """Returns standard Gumbel noise from 32-bit words."""
    uniform = (word.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_(max=_LARGEST)))


def uniform(seed: Tensor, child: Tensor, position: Tensor, *, stream: int) -> Tensor:
    """Returns one number in [0, 1) per row, float32 [R]."""
    words = _words(seed, child, position, torch.zeros(1, 1, dtype=torch.int64, device=seed.device), stream)
    return (words[:, 0, 0] >> 8).to(torch.float32) * 2.0**-24


def gumbel(seed: Tensor, child: Tensor, position: Tensor, vocab_size: int, *, stream: int = 0) -> Tensor:
    """Returns standard Gumbel noise, float32 [R, vocab_size], for int64 [R] seeds, children and positions."""
    group = torch.arange(-(-vocab_size // 4), device=seed.device)[None]
    return _gumbel(_words(seed, child, position, group, stream).flatten(1)[:, :vocab_size])


def gumbel_at(seed: Tensor, child: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Returns `gumbel(...).gather(1, index)` for vocabulary indices [R, K]; computes no other noise."""
    words = _words(seed, child, position, index // 4)
    return _gumbel(words.gather(2, (index % 4)[..., None]).squeeze(2))
