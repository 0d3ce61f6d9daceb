"""Who a pod is to other pods: the name of its agent, and whether two pods may exchange KV."""

from __future__ import annotations

from common.errors import InvalidRequest, LayoutMismatch
from common.pb import transfer_pb2
from common.wire import layout_from_pb, role_from_pb


def agent_name(info: transfer_pb2.InfoResponse) -> str:
    """role-pod-generation: a name that no process ever had before."""
    return f"{role_from_pb(info.role).value}-{info.pod}-{info.generation}"


def require_compatible(mine: transfer_pb2.InfoResponse, theirs: transfer_pb2.InfoResponse) -> None:
    """Raises LayoutMismatch that names the first field in which the peer differs, InvalidRequest for no pod at all."""
    if not theirs.pod or not theirs.generation:
        raise InvalidRequest("the peer does not say who it is", field="info")
    if mine.protocol_version != theirs.protocol_version:
        raise LayoutMismatch(
            f"protocol versions differ: {mine.protocol_version} here, {theirs.protocol_version} there",
            field="protocol_version",
        )
    layout, other = layout_from_pb(mine.layout), layout_from_pb(theirs.layout)
    layout.require_equal(other)
    if mine.layout.block_bytes != theirs.layout.block_bytes:
        raise LayoutMismatch(
            f"KV layouts differ in block_bytes: {mine.layout.block_bytes} here, {theirs.layout.block_bytes} there",
            field="block_bytes",
        )
    if mine.fingerprint != theirs.fingerprint:
        raise LayoutMismatch("KV fingerprints differ although every field is equal", field="fingerprint")
