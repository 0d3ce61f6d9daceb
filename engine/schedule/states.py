"""Adds the work on recurrent states to a planned step: copies before it, and snapshots within and after it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.groups.state_blocks import StateBlockPool, require_states
from engine.schedule.scheduler import ScheduledSequence


def plan_states(pool: StateBlockPool, scheduled: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Returns the step with `state_copies` in its first sequence, and the snapshots of each sequence."""
    planned: list[ScheduledSequence] = []
    leases = [require_states(entry.seq.lease) for entry in scheduled]
    for entry, lease in zip(scheduled, leases, strict=True):
        snapshots = lease.plan_snapshots(entry.start, entry.start + entry.num_new, entry.seq.prefill_len)
        planned.append(entry._replace(snapshots=snapshots))
    if planned:
        planned[0] = planned[0]._replace(state_copies=pool.take_copies(leases))
    return planned
