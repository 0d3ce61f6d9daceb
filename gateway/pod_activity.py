"""What a pod did since its start, as it says twice a second; dashboards take differences."""

from __future__ import annotations

from dataclasses import dataclass

from common.pb import transfer_pb2
from common.types import PoolCounts


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding: chains are proposals of one sequence in one step, proposed and accepted their tokens."""

    proposer: str
    chains: int
    proposed: int
    accepted: int
    useless: bool


@dataclass(frozen=True, slots=True)
class Link:
    """KV that it moved to or from one pod. busy_s: seconds with any of it under way; gb_s: 1e9 bytes/s, lately."""

    pod: str
    transport: str
    bytes: int
    busy_s: float
    gb_s: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """utilization: 0 to 1, None where the driver does not tell. Memory in bytes, of all processes."""

    utilization: float | None
    memory_used: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class PodActivity:
    """Counts since the pod's start, but for blocks and gpu, which are of now. Zeros from a pod that does not say.

    prefilled: prompt tokens computed for requests; recomputed: again, after one of the preemptions.
    """

    blocks: PoolCounts
    prefilled: int = 0
    recomputed: int = 0
    generated: int = 0
    preemptions: int = 0
    drafts: Drafts | None = None
    links: tuple[Link, ...] = ()
    gpu: Gpu | None = None

    @classmethod
    def from_pb(cls, pb: transfer_pb2.InfoResponse) -> PodActivity:
        """Of a pod's answer to Info."""
        did, blocks = pb.activity, pb.blocks
        drafts, gpu = None, None
        if did.HasField("drafts"):
            d = did.drafts
            drafts = Drafts(d.proposer, d.chains, d.proposed, d.accepted, d.useless)
        if did.HasField("gpu"):
            g = did.gpu
            gpu = Gpu(g.utilization if g.HasField("utilization") else None, g.memory_used, g.memory_total)
        return cls(
            blocks=PoolCounts(blocks.free, blocks.cached, blocks.leased, blocks.quarantined),
            prefilled=pb.computed.prefill + pb.computed.local,
            recomputed=pb.computed.recompute,
            generated=did.generated_tokens,
            preemptions=did.preemptions,
            drafts=drafts,
            links=tuple(Link(p.pod, p.transport, p.bytes, p.busy_s, p.gb_s) for p in pb.pairs),
            gpu=gpu,
        )
