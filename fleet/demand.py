"""The reading of the fleet: pods and gateways, from what they publish in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import IndexUnavailable, Unavailable
from fleet.decision import DemandReading, FleetReading, PodReading
from prefix_index.demand import DemandReader, DemandRecord
from prefix_index.reader import IndexReader
from prefix_index.store import PodStatus


@dataclass(frozen=True, slots=True)
class ReadFleet:
    """A reading, and the pods of it by name."""

    reading: FleetReading
    pods: Mapping[str, PodStatus]


class FleetReader:
    """Reads the pods of one model and all gateways."""

    def __init__(self, index: IndexReader, demand: DemandReader, model: str | None = None) -> None:
        """`model`: served name of the planned pods; None if there is only one."""
        self._index, self._demand, self._model = index, demand, model
        self._counted = DemandSum()

    async def read(self, now: float) -> ReadFleet:
        """Returns what is known now. Raises Unavailable if Redis does not answer or the pods are of several models."""
        try:
            statuses = await self._index.pods()
        except IndexUnavailable as e:
            raise Unavailable(f"the prefix index does not answer: {e.message}") from e
        pods = {s.record.pod: s for s in statuses if self._model in (None, s.record.model)}
        if len(models := {status.record.model for status in pods.values()}) > 1:
            raise Unavailable(f"pods serve several models ({', '.join(sorted(models))}): give --served-name")
        records = await self._demand.read()
        # A pod whose lease has expired is not listed, so a listed load is at most 10 s old.
        found = tuple(
            PodReading(s.record.pod, s.record.role, s.load, 0.0, s.record.num_blocks, s.record.block_size)
            for s in pods.values()
        )
        mean_prompt = self._counted.mean_prompt
        return ReadFleet(FleetReading(now, found, self._counted.add(records, mean_prompt)), pods)


class DemandSum:
    """Adds the counters of gateways that come, go and start again, so that the sum never goes back."""

    def __init__(self) -> None:
        self._last: dict[str, DemandRecord] = {}
        self._total = dict.fromkeys(_COUNTERS, 0.0)

    @property
    def mean_prompt(self) -> float:
        """Mean prompt tokens of a served request; 0 before the first."""
        return self._total["prompt_tokens"] / self._total["served"] if self._total["served"] else 0.0

    def add(self, records: Mapping[str, tuple[DemandRecord, float]], mean_prompt: float) -> DemandReading | None:
        """Returns the sum after these records; None without a gateway, or if a gateway serves several models."""
        if not records or any(record.models != 1 for record, _ in records.values()):
            return None
        for gateway, (record, _) in records.items():
            before = self._last.get(gateway)
            if before is not None:
                again = before.started_ms != record.started_ms
                for name in _COUNTERS:
                    self._total[name] += max(0.0, getattr(record, name) - (0.0 if again else getattr(before, name)))
            self._last[gateway] = record
        for gone in self._last.keys() - records.keys():
            del self._last[gone]
        waiting = sum(record.waiting for record, _ in records.values())
        return DemandReading(
            **self._total, waiting_tokens=waiting * mean_prompt, age_s=max(age for _, age in records.values())
        )


_COUNTERS = ("arrivals", "prompt_tokens", "uncached_tokens", "output_tokens", "served", "in_time")
