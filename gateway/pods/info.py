"""The facts and counters that a pod reports by Info."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest
from common.kv_groups import blocks_that_fit, window_tails
from common.pb import transfer_pb2
from common.types import PoolCounts, Role
from common.wire import layout_from_pb, role_from_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PodInfo:
    """The facts of one pod process. They count even if the index or the configuration says something else."""

    name: str
    generation: int  #: Number of the process under this name, never reused.
    address: str
    role: Role
    model: str
    weights: str = ""  #: How the weights are quantised, in words; "": not at all.
    fingerprint: str  #: Hash of the KV layout; only pods with equal fingerprints work together.
    scope: str  #: Key space of the layout in the prefix index.
    block_size: int  #: Tokens of a KV block.
    block_bytes: int  #: Bytes of a KV block on all ranks; with KV groups, of a page.
    window_tails: tuple[int, ...] = ()  #: KV groups with a window: the pages of each at the end of a prefix.
    state_pages: int = 0  #: Blocks whose bytes hold a recurrent state; 0 for a model without.
    max_model_len: int
    num_blocks: int  #: Blocks of the longest sequence that fits the pool; without KV groups, all of them.
    vocab_size: int
    ready: bool
    draining: bool
    stuck: str = ""  #: Which loop of the pod makes no progress, in words; then it is not ready. "" while all run.

    @classmethod
    def from_pb(cls, pb: transfer_pb2.InfoResponse, address: str) -> PodInfo:
        """Raises BatonError if the answer is invalid."""
        layout = layout_from_pb(pb.layout)
        if not layout.block_size:
            raise InvalidRequest(f"the KV layout of the pod at {address} has no block_size", field="block_size")
        page_bytes = pb.layout.block_bytes
        if layout.state_bytes and not page_bytes:
            raise InvalidRequest(f"the KV layout of the pod at {address} has states, but no bytes", field="block_bytes")
        tails = window_tails(layout)
        return cls(
            name=pb.pod,
            generation=pb.generation,
            address=address,
            role=role_from_pb(pb.role),
            model=layout.model,
            weights=layout.weights,
            fingerprint=pb.fingerprint,
            scope=pb.fingerprint[:8],
            block_size=layout.block_size,
            block_bytes=page_bytes * max(1, layout.num_kv_heads) // layout.rank_heads,
            window_tails=tails,
            state_pages=-(-layout.state_bytes // page_bytes) if layout.state_bytes else 0,
            max_model_len=pb.max_model_len,
            num_blocks=blocks_that_fit(pb.num_blocks, tails),
            vocab_size=pb.vocab_size,
            ready=pb.ready,
            draining=pb.draining,
            stuck=pb.stuck,
        )

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens that one request can have on the pod."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of speculative decoding since the pod's start."""

    proposer: str
    chains: int  #: Proposals: one for each sequence and step.
    proposed: int  #: Tokens of the proposals.
    accepted: int  #: Number of these drafts that the model accepted.
    useless: bool  #: No recent draft token was accepted.


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """KV traffic of a pod with one other pod, in both directions, since its start."""

    pod: str
    transport: str
    bytes: int
    busy_s: float  #: Seconds in which at least one transfer ran.
    gb_s: float  #: Recent rate in 1e9 bytes per second.


@dataclass(frozen=True, slots=True)
class GpuUsage:
    utilization: float | None  #: 0 to 1; None if the driver does not report it.
    memory_used: int  #: Bytes, of all processes.
    memory_total: int  #: Bytes.


@dataclass(frozen=True, slots=True)
class PodActivity:
    """Counters since the pod's start, and its current blocks and GPU. Values that a pod does not report are 0."""

    blocks: PoolCounts
    prefilled: int = 0  #: Prompt tokens computed for requests.
    recomputed: int = 0  #: Tokens computed again after preemptions.
    generated: int = 0  #: Output tokens.
    preemptions: int = 0
    drafts: DraftCounts | None = None
    links: tuple[PeerTraffic, ...] = ()
    gpu: GpuUsage | None = None
    steps: int | None = None  #: Engine steps; None from older pods.
    step_bound_s: float = 0.0  #: Seconds after which the pod calls its present step stuck.

    @classmethod
    def from_pb(cls, pb: transfer_pb2.InfoResponse) -> PodActivity:
        did, blocks, d, g = pb.activity, pb.blocks, pb.activity.drafts, pb.activity.gpu
        utilization = g.utilization if g.HasField("utilization") else None
        return cls(
            blocks=PoolCounts(blocks.free, blocks.cached, blocks.leased, blocks.quarantined),
            prefilled=pb.computed.prefill + pb.computed.local,
            recomputed=pb.computed.recompute,
            generated=did.generated_tokens,
            preemptions=did.preemptions,
            drafts=DraftCounts(d.proposer, d.chains, d.proposed, d.accepted, d.useless)
            if did.HasField("drafts")
            else None,
            links=tuple(PeerTraffic(p.pod, p.transport, p.bytes, p.busy_s, p.gb_s) for p in pb.pairs),
            gpu=GpuUsage(utilization, g.memory_used, g.memory_total) if did.HasField("gpu") else None,
            steps=did.steps if did.HasField("steps") else None,
            step_bound_s=pb.step_bound_s,
        )


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The largest request that the pods of a model can serve."""

    max_model_len: int  #: Prompt plus output tokens.
    default_total_len: int  #: Prompt plus output tokens if the client sends no max_tokens.
    vocab_size: int  #: Token ids are below this.
