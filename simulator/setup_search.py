"""Finds the prefill:decode ratio, chunk size and number of pods with the highest goodput per GPU for a trace.

Goodput is the highest request rate at which the SLO is met (DistServe, OSDI'24). It is found by replaying the trace
faster or slower. Over the ratio, goodput has one maximum, because too few pods on either side limit it. So the search
climbs from the ratio that balances the work, and then over chunk sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from common.errors import ConfigError
from loadtest.workload.trace import WorkloadTrace
from simulator.cluster import SimulatedCluster
from simulator.hardware_rates import HardwareRates
from simulator.spec import MAX_PODS, ClusterSpec, RequestOutcome, RunSummary, Slo

CHUNKS = (512, 1024, 2048, 4096, 8192)
INITIAL_CHUNK_TOKENS = 2048
RATIO_GPUS = 8  # Pods with which the ratio is searched if their number is not given.
_STEPS = 6  # Bisections of the rate: the result is exact to 1/64 of the upper bound.
_HEADROOM = 1.3  # The upper bound is the estimated rate times this.


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """Numbers of prefill and decode pods, of one GPU each, and the chunk size."""

    prefill: int
    decode: int
    chunk_tokens: int

    @property
    def gpus(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class MeasuredSetup:
    """A setup, and a run at its goodput."""

    setup: ClusterSetup
    goodput: float  # Requests per second.
    summary: RunSummary | None  # None if the setup met the SLO at no rate.
    prefill_busy: float = 0.0  # Mean share of the run in which a pod computed.
    decode_busy: float = 0.0

    @property
    def per_gpu(self) -> float:
        return self.goodput / self.setup.gpus


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    measured: tuple[MeasuredSetup, ...]  # All setups that were tried, best goodput per GPU first.
    #: The fewest pods of about the best ratio that serve the trace at its rate. None if MAX_PODS pods do not.
    needed: MeasuredSetup | None
    runs: int  # Simulations that were run.

    @property
    def best(self) -> MeasuredSetup:
        return self.measured[0]


class SetupSearch:
    """Searches the best setup for a trace, an SLO and the rates of a pod."""

    def __init__(
        self,
        trace: WorkloadTrace,
        slo: Slo,
        rates: HardwareRates,
        *,
        chunks: tuple[int, ...] = CHUNKS,
        decode_seqs: int = 256,
        seed: int = 0,
        on_measured: Callable[[MeasuredSetup], None] = lambda measured: None,
    ) -> None:
        """on_measured: gets every setup as soon as it is measured. Raises ConfigError."""
        if not rates.decode_row_s[0][1] and not rates.decode_overhead_s:
            raise ConfigError(f"--rates: {rates.name} has no decode times", field="rates")
        pool = rates.pool_blocks(trace.block_size) * trace.block_size
        longest = max(r.prompt_len + r.output_len for r in trace.requests)
        if longest > pool:
            fault = f"the longest request has {longest} tokens and the KV memory of a pod holds {pool}"
            raise ConfigError(f"--rates: {fault}", field="rates")
        self._trace = trace
        self._slo = slo
        self._rates = rates
        self._chunks = tuple(sorted(chunks))
        self._decode_seqs = decode_seqs
        self._seed = seed
        self._on_measured = on_measured
        self._measured: dict[ClusterSetup, MeasuredSetup] = {}
        self._hit_rate = trace.ideal_hit_rate()
        self.runs = 0

    def plan(self, gpus: int | None = None) -> CapacityPlan:
        """Searches with `gpus` GPUs, or for the fewest that serve the trace if None. Raises ConfigError."""
        total = gpus or RATIO_GPUS
        if not 2 <= total <= MAX_PODS:
            raise ConfigError(f"--gpus must be from 2 to {MAX_PODS}, not {total}", field="gpus")
        chunk = min(self._chunks, key=lambda tokens: abs(tokens - INITIAL_CHUNK_TOKENS))
        best = self._climb_ratio(total, chunk)
        best = self._climb_chunk(best.setup)
        if best.setup.chunk_tokens != chunk:
            best = self._climb_ratio(total, best.setup.chunk_tokens, start=best.setup.prefill)
        needed = best if gpus is not None and best.goodput >= self._trace.rate else None
        if gpus is None and best.goodput > 0:
            needed = self._smallest(best)
        ranked = sorted(self._measured.values(), key=lambda m: (-m.per_gpu, m.setup.gpus, m.setup.chunk_tokens))
        if gpus is None:  # without the runs of `_smallest`
            ranked = [m for m in ranked if m.setup.gpus == total]
        return CapacityPlan(tuple(ranked), needed, self.runs)

    def _climb_ratio(self, total: int, chunk: int, start: int = 0) -> MeasuredSetup:
        """Climbs over the number of prefill pods, from `start` or from the ratio that balances the work."""
        prefill_s, decode_s = self._work_s(chunk)
        start = start or round(total * prefill_s / (prefill_s + decode_s))

        def move(setup: ClusterSetup, step: int) -> ClusterSetup | None:
            prefill = setup.prefill + step
            return ClusterSetup(prefill, total - prefill, chunk) if 1 <= prefill < total else None

        prefill = min(total - 1, max(1, start))
        return self._climb(ClusterSetup(prefill, total - prefill, chunk), move)

    def _climb_chunk(self, setup: ClusterSetup) -> MeasuredSetup:
        def move(setup: ClusterSetup, step: int) -> ClusterSetup | None:
            at = self._chunks.index(setup.chunk_tokens) + step
            return replace(setup, chunk_tokens=self._chunks[at]) if 0 <= at < len(self._chunks) else None

        return self._climb(setup, move)

    def _climb(self, start: ClusterSetup, move: Callable[[ClusterSetup, int], ClusterSetup | None]) -> MeasuredSetup:
        """Moves up, then down, while the goodput grows. `move` returns the neighbour of a setup, None at the end."""
        best = self._measure(start)
        for step in (1, -1):
            while (setup := move(best.setup, step)) is not None:
                other = self._measure(setup)
                if other.goodput <= best.goodput:
                    break
                best = other
        return best

    def _smallest(self, best: MeasuredSetup) -> MeasuredSetup | None:
        """Returns the fewest pods at about this ratio that serve the trace at its recorded rate."""
        share = best.setup.prefill / best.setup.gpus
        total = max(2, int(self._trace.rate / best.per_gpu))
        for gpus in range(total, min(MAX_PODS, 2 * total + 8) + 1):
            prefill = min(gpus - 1, max(1, round(gpus * share)))
            setup = ClusterSetup(prefill, gpus - prefill, best.setup.chunk_tokens)
            if (measured := self._meets_slo_at(setup, self._trace.rate)) is not None:
                return measured
        return None

    def _measure(self, setup: ClusterSetup) -> MeasuredSetup:
        """Finds the goodput of a setup by bisection of the rate."""
        if setup in self._measured:
            return self._measured[setup]
        # No rate is higher: all prefixes are cached, and all pods are always busy.
        prefill_s, decode_s = self._work_s(setup.chunk_tokens)
        low, high = 0.0, _HEADROOM * min(setup.prefill / prefill_s, setup.decode / decode_s)
        best = MeasuredSetup(setup, 0.0, None)
        for _ in range(_STEPS):
            rate = (low + high) / 2
            if (measured := self._meets_slo_at(setup, rate)) is not None:
                low, best = rate, measured
            else:
                high = rate
        self._measured[setup] = best
        self._on_measured(best)
        return best

    def _meets_slo_at(self, setup: ClusterSetup, rate: float) -> MeasuredSetup | None:
        """Runs a setup at a rate. Returns None if it misses the SLO; then the run ends as soon as that is certain."""
        self.runs += 1
        trace = self._trace.sped_up(rate / self._trace.rate)
        allowed = int(len(trace.requests) * (1 - self._slo.attainment) + 1e-9)
        bad = 0

        def stop(outcome: RequestOutcome) -> bool:
            nonlocal bad
            bad += not self._slo.is_met_by(outcome)
            return bad > allowed

        spec = ClusterSpec(
            rates=self._rates,
            prefill=setup.prefill,
            decode=setup.decode,
            block_size=trace.block_size,
            chunk_tokens=setup.chunk_tokens,
            decode_seqs=self._decode_seqs,
            seed=self._seed,
        )
        result = SimulatedCluster(spec, trace).run(stop)
        if bad > allowed:
            return None

        def busy(kind: str) -> float:
            return fmean(share for name, share in result.busy.items() if name.startswith(kind))

        return MeasuredSetup(setup, rate, result.summary, busy("prefill"), busy("decode"))

    def _work_s(self, chunk: int) -> tuple[float, float]:
        """Returns the least prefill and decode pod seconds of a mean request.

        They are the time of the prompt without its shared prefix, and its share of decode steps with as many sequences
        as slots, SLO and KV memory allow.
        """
        trace, rates = self._trace, self._rates
        count = len(trace.requests)
        prompt = trace.prompt_tokens / count * (1 - self._hit_rate)
        output = max(1.0, trace.output_tokens / count)
        context = trace.prompt_tokens / count + output / 2
        pool = rates.pool_blocks(trace.block_size) * trace.block_size
        batch = max(1, min(self._decode_seqs, int(pool / context)))
        while batch > 1 and rates.decode_s(batch, batch * context) > self._slo.itl_s:
            batch -= 1
        prefill_s = prompt * rates.prefill_s([(0, chunk)]) / chunk
        return max(prefill_s, 1e-9), rates.decode_s(batch, batch * context) * output / batch
