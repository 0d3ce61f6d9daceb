"""Watches the loops of a pod: the engine's thread, the transfer thread and the event loop.

The bound of an engine step is STEP_FACTOR times its predicted seconds, and at least `--stuck-step-s`. The pod's
measured rates predict a step. Before the first measurement the longest step of the warm-up is the prediction; on a CPU
it is multiplied by the step's tokens.

Nothing is watched before the pod is ready: loading, compiling, capturing and warming up have no bound.
"""

from __future__ import annotations

from collections.abc import Callable

from common.process.watchdog import STEP_FACTOR, Watchdog
from engine.engine import Engine
from engine.loop import EngineLoop
from kv_transfer.node import TransferNode
from pod.monitoring.rates import PodRates

LOOPS = ("engine", "transfer_thread", "event_loop")  #: Names of the watched loops, the labels of baton_stuck_loops.


class PodWatch:
    """The watchdog of one pod.

    Args:
        stuck_s: least bound of a step, and the bound of the other loops; 0 turns the watchdog off.
        on_stuck: called with the name of a loop that got stuck, on any thread.
        on_change: called after a change of `stuck`, on any thread. It must not block.
    """

    def __init__(
        self,
        stuck_s: float,
        engine: Engine,
        engine_loop: EngineLoop,
        node: TransferNode,
        rates: PodRates,
        *,
        on_stuck: Callable[[str], object],
        on_change: Callable[[], object],
    ) -> None:
        self.warm_up_s = 0.0  #: Seconds of the longest step of the warm-up.
        self._stuck_s, self._engine, self._rates = stuck_s, engine, rates
        self._is_cpu = engine.device.type == "cpu"
        self.watchdog = Watchdog(stuck_s, on_stuck=on_stuck, on_change=on_change)
        self.watchdog.watch("engine", engine_loop.heartbeat, self._sampled_bound_s)
        self.watchdog.watch("transfer_thread", node.heartbeat)

    @property
    def stuck(self) -> str:
        """Which loops are stuck, in words; empty while all run. Any thread."""
        return self.watchdog.stuck

    def start(self) -> None:
        """Starts the watchdog. Call it on the event loop of the pod."""
        self.watchdog.watch_event_loop()
        self.watchdog.start()

    def stop(self) -> None:
        """Stops the watchdog. Idempotent."""
        self.watchdog.stop()

    def step_bound_s(self) -> float:
        """Returns the bound of the engine's present steps in seconds; 0 for none. Any thread."""
        steps = self._engine.steps_under_way
        return self._bound_s(
            sum(entry.num_new for step in steps for entry in step if not entry.is_decode),
            sum(entry.is_decode for step in steps for entry in step),
        )

    def _sampled_bound_s(self) -> float:
        """Returns `step_bound_s`. Also sets the bound of the ranks, which is that of the largest possible step."""
        if (ranks := self._engine.rank_group) is not None:
            limits = self._engine.scheduler.config
            ranks.step_bound_s = self._bound_s(limits.max_step_tokens, limits.max_seqs)
        return self.step_bound_s()

    def _bound_s(self, prompt_tokens: int, decodes: int) -> float:
        """Returns the bound of a step with so many prompt tokens and decoding sequences; 0 for none."""
        if self._stuck_s <= 0:
            return 0.0
        predicted_s = self._rates.predicted_step_s(prompt_tokens, decodes)
        if predicted_s is None:
            predicted_s = self.warm_up_s * (prompt_tokens + decodes if self._is_cpu else 1)
        return max(self._stuck_s, STEP_FACTOR * predicted_s)
