"""Adds the work on recurrent states to a planned step: copies before it, and snapshots within and after it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.state_blocks import StateBlockPool, require_states
from engine.schedule.scheduler import ScheduledSequence


def plan_states(pool: StateBlockPool, scheduled: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Returns the step with `state_copies` in its first sequence, and the snapshots of each sequence."""
    planned: list[ScheduledSequence] = []
    for entry in scheduled:
        end, lease = entry.start + entry.num_new, require_states(entry.seq.lease)
        snapshots = lease.plan_snapshots(entry.start, end, entry.seq.prompt_len)
        planned.append(entry._replace(snapshots=snapshots))
    if planned:
        planned[0] = planned[0]._replace(state_copies=pool.take_copies())
    return planned
