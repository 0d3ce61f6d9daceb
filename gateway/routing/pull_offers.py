"""Finds the prefixes that a prefill pod can pull from another pod faster than it computes them. Pure.

A pull takes the puller's measured latency, and the missing bytes at the measured rate of the two pods. A pair that has
moved nothing yet is assumed to have the mean rate of the known pairs, and to need CONNECT_S for the connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from gateway.pods.view import PodView
from gateway.routing.policy import PullOffer

CONNECT_S = 0.3

MAX_HOLDERS = 3  #: Only so many pods, those with the longest prefixes, are considered as holders.


def offer_pulls(
    device_hits: Mapping[str, int],
    expected_hits: Mapping[str, int],
    pullers: Sequence[PodView],
    holders: Sequence[PodView],
    block_bytes: int,
) -> dict[str, PullOffer]:
    """Returns pull offers by the puller's name, for pullers that save time.

    Args:
        device_hits: Prompt tokens in device memory, by pod. Only these can be pulled.
        expected_hits: Prompt tokens by pod that need no computing when the request's turn comes.
    """
    holding = [view for view in holders if device_hits.get(view.name)]
    best = sorted(holding, key=lambda view: device_hits[view.name], reverse=True)[:MAX_HOLDERS]
    if not best:
        return {}
    longest = device_hits[best[0].name]
    lacking = [view for view in pullers if view.pulls and expected_hits.get(view.name, 0) < longest]
    if not lacking:
        return {}
    rates = [rate for view in (*best, *lacking) for rate in view.pair_rates.values()]
    mean_rate = fmean(rates) if rates else 0.0
    offers = (
        (view.name, _best_offer(device_hits, expected_hits, view, best, block_bytes, mean_rate)) for view in lacking
    )
    return {name: offer for name, offer in offers if offer is not None}


def _best_offer(
    device_hits: Mapping[str, int],
    expected_hits: Mapping[str, int],
    puller: PodView,
    holders: Sequence[PodView],
    block_bytes: int,
    mean_rate: float,
) -> PullOffer | None:
    """Returns the pull that saves the most time; None if no pull saves any."""
    used, best, best_saving_s = expected_hits.get(puller.name, 0), None, 0.0
    for holder in holders:
        tokens = device_hits[holder.name]
        missing = tokens - used
        if holder is puller or missing <= 0:
            continue
        rate, connect_s = _rate(puller, holder, mean_rate)
        if rate <= 0:
            continue
        pull_s = puller.pull_s + connect_s + missing / puller.block_size * block_bytes / rate
        saving_s = missing * puller.prefill_s_per_token - pull_s
        if saving_s > best_saving_s:
            best, best_saving_s = PullOffer(tokens, pull_s, holder.name), saving_s
    return best


def _rate(puller: PodView, holder: PodView, mean_rate: float) -> tuple[float, float]:
    """Returns the bytes per second from holder to puller, and the seconds to connect (0 for a known pair)."""
    rate = holder.pair_rates.get(puller.name) or puller.pair_rates.get(holder.name)
    return (rate, 0.0) if rate else (mean_rate, CONNECT_S)
