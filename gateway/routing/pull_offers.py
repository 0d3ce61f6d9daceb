"""Which pods had better fetch a prefix from another pod than compute it, and from whom. Pure.

A pull takes its pod's measured latency and the missing bytes at the pair's measured rate; it is offered where that is
less than computing the same tokens takes there. Of a pair that has never moved anything the mean of known pairs is
assumed, and that connecting takes CONNECT_S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from gateway.pods.view import PodView
from gateway.routing.policy import PullOffer

CONNECT_S = 0.3
HOLDERS = 3  # that hold most are asked about


def offer_pulls(
    held: Mapping[str, int],
    promises: Mapping[str, int],
    pullers: Sequence[PodView],
    holders: Sequence[PodView],
    block_bytes: int,
) -> dict[str, PullOffer]:
    """By puller's name, where a pull is worth it. held: prompt tokens that pods have, in device memory; promises: with
    those that need no computing when the request's turn comes.
    """
    best = sorted((view for view in holders if held.get(view.name)), key=lambda v: held[v.name], reverse=True)[:HOLDERS]
    if not best:
        return {}
    most = held[best[0].name]
    lacking = [view for view in pullers if view.pulls and promises.get(view.name, 0) < most]
    if not lacking:
        return {}
    written = [rate for view in (*best, *lacking) for rate in view.pair_rates.values()]
    usual = fmean(written) if written else 0.0
    offers = ((view.name, _best(held, promises, view, best, block_bytes, usual)) for view in lacking)
    return {name: pull for name, pull in offers if pull is not None}


def _rate(view: PodView, holder: PodView, usual: float) -> tuple[float, float]:
    """Bytes per second at which `view` gets blocks from there, and the seconds that come on top where that is not
    known. usual: the mean rate of known pairs, 0 for none.
    """
    rate = holder.pair_rates.get(view.name) or view.pair_rates.get(holder.name)
    return (rate, 0.0) if rate else (usual, CONNECT_S)


def _best(
    held: Mapping[str, int],
    promises: Mapping[str, int],
    view: PodView,
    holders: Sequence[PodView],
    block_bytes: int,
    usual: float,
) -> PullOffer | None:
    """The pull that saves most; None when none saves anything."""
    used, found, saved = promises.get(view.name, 0), None, 0.0
    for holder in holders:
        tokens = held[holder.name]
        missing = tokens - used
        if holder is view or missing <= 0:
            continue
        rate, extra = _rate(view, holder, usual)
        if rate <= 0:
            continue
        seconds = view.pull_s + extra + missing / view.block_size * block_bytes / rate
        saves = missing * view.prefill_s_per_token - seconds
        if saves > saved:
            found, saved = PullOffer(tokens, seconds, holder.name), saves
    return found
