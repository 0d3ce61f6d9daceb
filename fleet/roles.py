"""Changes of the roles of running pods, by their control RPC."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from common.auth import OPERATOR, Signer, sign_calls
from common.errors import ConfigError, IndexUnavailable, Unavailable, describe
from common.pb import control_pb2, control_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel, translate_rpc_errors
from common.tls import TlsFiles
from common.types import Role
from common.wire import role_from_pb, role_to_pb
from prefix_index.reader import IndexReader
from prefix_index.store import PodRecord, PodStatus

INFO_TIMEOUT_S = 2.0
#: Time that a switch may take beyond the drain time: work that was told to end leaves the pod, and it becomes ready.
SWITCH_GRACE_S = 15.0
READ_TRIES = 3  # Reads of the index before the command gives up: the first one also connects


@dataclass(frozen=True, slots=True)
class PodAddress:
    """A running pod."""

    name: str
    address: str
    role: Role
    scope: str  # Pods of one scope exchange KV


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """A finished change of a pod's role."""

    former: Role
    moved: int  # Requests that went on elsewhere
    drained_s: float  # Seconds until the last request of the former role had left the pod
    ready_s: float  # Seconds from then until the pod was ready in the new role


def operator_signer(secret: str, name: str) -> Signer:
    """Returns the signer of the calls of an operator's process."""
    return Signer(secret.encode(), OPERATOR, name, int(time.time() * 1000))


async def read_pods(reader: IndexReader) -> list[PodStatus]:
    """Returns the live pods in the prefix index. Raises Unavailable if it does not answer."""
    for attempt in range(READ_TRIES):
        try:
            return await reader.pods()
        except IndexUnavailable as error:
            if attempt == READ_TRIES - 1:
                raise Unavailable(f"the prefix index (Redis) does not answer: {error.message}") from error
    raise AssertionError("the loop returns or raises")


async def pod_at(address: str, tls: TlsFiles | None) -> PodAddress:
    """Returns the pod that answers at HOST:PORT. Raises Unavailable."""
    async with open_channel(address, tls) as channel:
        try:
            stub = transfer_pb2_grpc.TransferStub(channel)
            info = await stub.Info(transfer_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as e:
            raise Unavailable(f"no pod answers at {address}: {describe(e, limit_s=INFO_TIMEOUT_S)}") from e
    return PodAddress(info.pod, address, role_from_pb(info.role), info.fingerprint[:8])


async def find_pod(named: str, redis: str | None, tls: TlsFiles | None) -> tuple[PodAddress, list[PodRecord]]:
    """Returns the pod of a name in the index or of HOST:PORT, and all pods in the index (none without Redis).

    Raises ConfigError for a name that cannot be found, Unavailable if the index or the pod does not answer.
    """
    records: list[PodRecord] = []
    if redis is not None:
        async with aclosing(_Reader(redis)) as index:
            records = [status.record for status in await read_pods(index.reader)]
    for record in records:
        if named in (record.pod, record.address):
            return PodAddress(record.pod, record.address, record.role, record.scope), records
    if ":" in named:
        return await pod_at(named, tls), records
    known = ", ".join(sorted(record.pod for record in records)) or "none"
    where = f"the prefix index has these pods: {known}" if redis else "give --redis to find pods by name, or HOST:PORT"
    raise ConfigError(f"POD: no pod is called {named!r}; {where}", field="pod")


class _Reader:
    """An index reader that `aclosing` can close."""

    def __init__(self, redis: str) -> None:
        self.reader = IndexReader(redis, books=False)

    async def aclose(self) -> None:
        await self.reader.close()


def require_another(pod: PodAddress, role: Role, records: Sequence[PodRecord]) -> None:
    """Raises ConfigError if the change leaves no pod that computes prompts, or none that decodes, in the pod's scope.

    Without pods in the index nothing is known, and nothing is refused.
    """
    roles = Counter(record.role for record in records if record.scope == pod.scope and record.pod != pod.name)
    if not any(record.pod == pod.name for record in records):
        return
    roles[role] += 1
    for lacking, word in ((Role.PREFILL, "computes prompts"), (Role.DECODE, "decodes")):
        if not roles[lacking] and not roles[Role.BOTH]:
            why = f"{pod.name} is the last pod of its layout that {word}: requests would wait for another one"
            raise ConfigError(f"ROLE: {why}; give --force to change it all the same", field="role")


async def switch_role(
    pod: PodAddress, role: Role, signer: Signer, *, drain_s: float, tls: TlsFiles | None = None
) -> RoleSwitch:
    """Changes the role of a running pod. Returns once the pod is ready in the new role. Raises BatonError."""
    async with open_channel(pod.address, tls) as channel:
        stub = control_pb2_grpc.ControlStub(sign_calls(channel, signer, lambda: pod.name))
        request = control_pb2.SwitchRoleRequest(role=role_to_pb(role), drain_s=drain_s)
        with translate_rpc_errors():
            answer = await stub.SwitchRole(request, timeout=drain_s + SWITCH_GRACE_S)
    return RoleSwitch(role_from_pb(answer.former), answer.moved, answer.drained_s, answer.ready_s)
