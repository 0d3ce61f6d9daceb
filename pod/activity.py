"""What a pod did since its start, for gateways' dashboards: see Activity in transfer.proto."""

from __future__ import annotations

from common.pb import transfer_pb2
from engine.speculation.stats import SpeculationStats
from pod.gpu_driver import GpuReading


def activity_to_pb(
    generated_tokens: int, preemptions: int, drafts: SpeculationStats | None, gpu: GpuReading | None
) -> transfer_pb2.Activity:
    """For the answer to Info. drafts None: nobody makes any; gpu None: nothing is known of one."""
    activity = transfer_pb2.Activity(generated_tokens=generated_tokens, preemptions=preemptions)
    if drafts is not None:
        activity.drafts.CopyFrom(
            transfer_pb2.Drafts(
                proposer=drafts.proposer,
                chains=drafts.chains,
                proposed=drafts.proposed,
                accepted=drafts.accepted,
                useless=drafts.is_useless,
            )
        )
    if gpu is not None:
        activity.gpu.CopyFrom(
            transfer_pb2.Gpu(utilization=gpu.utilization, memory_used=gpu.memory_used, memory_total=gpu.memory_total)
        )
    return activity
