"""What a pod says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from common.pb import transfer_pb2
from common.types import PoolCounts, Role
from common.wire import layout_from_pb, role_from_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PodInfo:
    """The authoritative facts, whatever the index or the configuration says."""

    name: str
    generation: int
    address: str
    role: Role
    model: str
    fingerprint: str
    scope: str
    block_size: int
    block_bytes: int
    max_model_len: int
    num_blocks: int
    vocab_size: int
    ready: bool
    draining: bool

    @classmethod
    def from_pb(cls, pb: transfer_pb2.InfoResponse, address: str) -> PodInfo:
        """Raises BatonError when the answer makes no sense."""
        layout = layout_from_pb(pb.layout)
        return cls(
            name=pb.pod,
            generation=pb.generation,
            address=address,
            role=role_from_pb(pb.role),
            model=layout.model,
            fingerprint=pb.fingerprint,
            scope=pb.fingerprint[:8],
            block_size=layout.block_size,
            block_bytes=pb.layout.block_bytes,
            max_model_len=pb.max_model_len,
            num_blocks=pb.num_blocks,
            vocab_size=pb.vocab_size,
            ready=pb.ready,
            draining=pb.draining,
        )

    @property
    def max_request_tokens(self) -> int:
        """Tokens, prompt and output, that one request can ever have here."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Speculative decoding: chains are proposals of one sequence in one step, proposed and accepted their tokens."""

    proposer: str
    chains: int
    proposed: int
    accepted: int
    useless: bool


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """KV that it moved to or from one pod. busy_s: seconds with any of it under way; gb_s: 1e9 bytes/s, lately."""

    pod: str
    transport: str
    bytes: int
    busy_s: float
    gb_s: float


@dataclass(frozen=True, slots=True)
class GpuUsage:
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
    drafts: DraftCounts | None = None
    links: tuple[PeerTraffic, ...] = ()
    gpu: GpuUsage | None = None

    @classmethod
    def from_pb(cls, pb: transfer_pb2.InfoResponse) -> PodActivity:
        """Of a pod's answer to Info."""
        did, blocks = pb.activity, pb.blocks
        drafts, gpu = None, None
        if did.HasField("drafts"):
            d = did.drafts
            drafts = DraftCounts(d.proposer, d.chains, d.proposed, d.accepted, d.useless)
        if did.HasField("gpu"):
            g = did.gpu
            gpu = GpuUsage(g.utilization if g.HasField("utilization") else None, g.memory_used, g.memory_total)
        return cls(
            blocks=PoolCounts(blocks.free, blocks.cached, blocks.leased, blocks.quarantined),
            prefilled=pb.computed.prefill + pb.computed.local,
            recomputed=pb.computed.recompute,
            generated=did.generated_tokens,
            preemptions=did.preemptions,
            drafts=drafts,
            links=tuple(PeerTraffic(p.pod, p.transport, p.bytes, p.busy_s, p.gb_s) for p in pb.pairs),
            gpu=gpu,
        )


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the pods that serve a model can take: prompt plus output, and token ids below vocab_size.

    default_len bounds prompt plus output where the client names no max_tokens.
    """

    max_model_len: int
    default_total_len: int
    vocab_size: int
