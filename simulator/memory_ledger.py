"""What all gateways have booked, in memory: answers what common/lua/reserve.lua answers (a test compares them)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from common.index_reader import BOOKING_S
from common.index_records import Candidate, Reserved


class MemoryLedger:
    """Bookings by pod, oldest first. time: seconds, of any clock."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._booked: dict[str, OrderedDict[str, tuple[float, int]]] = {}

    def reserve(self, request_id: str, candidates: Sequence[Candidate]) -> Reserved:
        """Books the request on the candidate that is cheapest with what was booked lately; of equals, on the first."""
        now = self._time()
        units = [self._since(c.pod, now - min(c.age_s, BOOKING_S), request_id) for c in candidates]
        # Rounded as they travel, so that the same costs are equal.
        costs = [round(c.cost_s, 9) + booked * round(c.unit_s, 12) for c, booked in zip(candidates, units, strict=True)]
        chosen = costs.index(min(costs))
        bookings = self._booked.setdefault(candidates[chosen].pod, OrderedDict())
        while bookings and next(iter(bookings.values()))[0] <= now - BOOKING_S:
            bookings.popitem(last=False)
        bookings[request_id] = now, candidates[chosen].units
        bookings.move_to_end(request_id)
        return Reserved(chosen, tuple(units))

    def unbook(self, pod: str, request_id: str) -> None:
        """Ends a booking; harmless when there is none."""
        self._booked.get(pod, OrderedDict()).pop(request_id, None)

    def _since(self, pod: str, since: float, but: str) -> int:
        """Units that others booked on a pod after a time."""
        total = 0
        for request_id, (at, units) in reversed(self._booked.get(pod, OrderedDict()).items()):
            if at <= since:
                break
            if request_id != but:
                total += units
        return total
