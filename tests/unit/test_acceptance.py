"""`accepted_mask` on the device and `accepted_tokens` on the host follow the same rule."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.acceptance import accepted_mask, accepted_tokens

row = st.integers(0, 4).flatmap(
    lambda drafts: st.tuples(
        st.lists(st.integers(0, 2), min_size=drafts, max_size=drafts),
        st.lists(st.integers(-1, 2), min_size=drafts + 1, max_size=drafts + 1),
    )
)


@given(st.lists(row, min_size=1, max_size=5))
def test_device_and_host_accept_the_same_tokens(rows: list[tuple[list[int], list[int]]]) -> None:
    inputs, sampled, offsets = [], [], []
    counts: list[bool] = []
    final: list[bool] = []
    for drafts, drawn in rows:
        inputs += [9, *drafts]
        sampled += drawn
        offsets += range(len(drawn))
        count = len(accepted_tokens(drafts, drawn))
        counts += [place < count for place in range(len(drawn))]
        final += [place == count - 1 for place in range(len(drawn))]
    got = accepted_mask(torch.tensor(sampled), torch.tensor(inputs), torch.tensor(offsets), 5)
    assert got[0].tolist() == counts
    assert got[1].tolist() == final
