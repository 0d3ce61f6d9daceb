"""What happened between two samples, in the words of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gateway.dashboard.history import PodKey, Sample
from gateway.dashboard.shape import Shape
from gateway.pod_activity import Drafts, Link, PodActivity

_NOTHING = Shape()


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` to `end`; a pod that came in between is counted from its own start."""

    start: Sample
    end: Sample

    @property
    def seconds(self) -> float:
        return max(self.end.at - self.start.at, 1e-9)

    def count(self, name: str) -> float:
        """How much a counter grew."""
        return self.end.counts.get(name, 0.0) - self.start.counts.get(name, 0.0)

    def rate(self, name: str) -> float:
        """Per second."""
        return self.count(name) / self.seconds

    def histogram(self, name: str) -> Shape:
        """Distribution of what was observed."""
        return self.end.histograms.get(name, _NOTHING).difference(self.start.histograms.get(name, _NOTHING))

    def pod(self, key: PodKey) -> tuple[PodActivity | None, PodActivity | None]:
        """What a pod had done at the start and at the end."""
        return self.start.pods.get(key), self.end.pods.get(key)

    def pod_rate(self, key: PodKey, count: str) -> float:
        """Per second; count is prefilled or generated."""
        before, after = self.pod(key)
        grew = {"prefilled": 0, "generated": 0}
        for sign, activity in ((-1, before), (1, after)):
            if activity is not None:
                grew["prefilled"] += sign * activity.prefilled
                grew["generated"] += sign * activity.generated
        return max(0, grew[count]) / self.seconds if after is not None else 0.0

    def preemptions(self, key: PodKey) -> int:
        before, after = self.pod(key)
        return (0 if after is None else after.preemptions) - (0 if before is None else before.preemptions)

    def drafts(self, key: PodKey) -> Drafts | None:
        """Of the window alone; None for a pod that does not speculate."""
        before, after = self.pod(key)
        if after is None or after.drafts is None:
            return None
        now, then = after.drafts, None if before is None else before.drafts
        if then is None:
            return now
        grown = (now.chains - then.chains, now.proposed - then.proposed, now.accepted - then.accepted)
        return Drafts(now.proposer, *grown, now.useless)

    def links(self) -> Iterator[tuple[str, Link]]:
        """Of the window alone: the pod that wrote, and the link. A connection that was made anew counts from zero."""
        for key, after in self.end.pods.items():
            before = self.start.pods.get(key)
            then = {} if before is None else {(link.pod, link.transport): link for link in before.links}
            for link in after.links:
                was = then.get((link.pod, link.transport))
                if was is not None and was.bytes <= link.bytes:
                    grown = link.bytes - was.bytes, max(0.0, link.busy_s - was.busy_s)
                    yield key[0], Link(link.pod, link.transport, *grown, link.gb_s)
                else:
                    yield key[0], link


def speculation_json(drafts: Drafts) -> dict[str, Any]:
    """acceptance_length: tokens of a step with drafts, its own included; None when there was none."""
    return {
        "proposer": drafts.proposer,
        "acceptance_length": 1 + drafts.accepted / drafts.chains if drafts.chains else None,
        "accepted": drafts.accepted,
        "proposed": drafts.proposed,
        "useless": drafts.useless,
    }


def link_json(source: str, link: Link) -> dict[str, Any]:
    """See the top of the package."""
    return {
        "from": source,
        "to": link.pod,
        "transport": link.transport,
        "bytes": link.bytes,
        "busy_s": link.busy_s,
        "gb_per_s": link.bytes / link.busy_s / 1e9 if link.busy_s else link.gb_s or None,
    }
