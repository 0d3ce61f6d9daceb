"""What a pod says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from common.pb import transfer_pb2
from common.types import Role
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
