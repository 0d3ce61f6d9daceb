"""A running pod changes its role: no request is lost, and weights, cache, name and generation stay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from benchmarks.reliability import role_switch
from cli.stack.valkey import EmbeddedValkey
from common.errors import BatonError, ConfigError, RoleChanged, Unauthenticated, Unavailable
from common.pb import control_pb2, control_pb2_grpc
from common.rpc import translate_rpc_errors
from common.settings.process import DEFAULT_SECRET
from common.types import Role
from common.wire import role_to_pb
from engine.llm import LLM
from fleet.roles import PodAddress, find_pod, operator_signer, pod_at, require_another, switch_role
from prefix_index.store import PodRecord
from tests.rigs.pods.harness import (
    CHUNK,
    MAX_LEN,
    Cluster,
    GatewayStream,
    Pod,
    expected,
    gateway_channel,
    prompt_of,
    request,
)
from tests.rigs.waiting import until

torch.set_num_threads(1)

SIGNER = operator_signer(DEFAULT_SECRET, "test")
ROOM = {"num_blocks": 256, "local_prefill": "off"}


async def switched(pod: Pod, role: Role, drain_s: float = 5.0) -> None:
    await switch_role(await pod_at(pod.runtime.address, None), role, SIGNER, drain_s=drain_s)


async def test_roles_change_under_load_without_a_wrong_or_lost_answer(tmp_path: Path) -> None:
    metrics = await role_switch.run(tmp_path, 6, seed=11)
    assert (metrics["failed"], metrics["mismatches"], metrics["switches"]) == (0, 0, 6)
    assert metrics["answers"] > 0
    assert metrics["resumed_sequences"].get("failed", 0) == 0


async def test_a_pod_keeps_cache_and_generation_and_serves_its_new_role(model_dir: Path, llm: LLM) -> None:
    asked = request(prompt_of(3 * CHUNK, seed=5), 8)
    answer_ids = expected(llm, asked)
    async with Cluster.start(model_dir, prefill=2, decode=1, prefill_config=ROOM, decode_config=ROOM) as cluster:
        pod, decode = cluster.prefill, cluster.decode
        await cluster.generate(asked)
        before = await pod.info()
        await switched(pod, Role.DECODE)
        after = await pod.info()
        assert (after.generation, after.pod) == (before.generation, before.pod)
        assert pod.runtime.engine.scheduler.config.local_chunk_tokens == 64
        with pytest.raises(RoleChanged):  # its Prefill goes to this pod
            await cluster.generate(request(asked.prompt_ids, 8), decode=decode, timeout_s=1.0)
        # The other prefill pod hands over to it, and its cache still has the prompt.
        await pod.channel.close()
        pod.channel = gateway_channel(pod.runtime.address, pod.runtime.name, "gw-new")
        stream = await GatewayStream(pod, "gw-new").open()
        cluster.decodes.append(pod)
        cluster.streams.append(stream)
        answer = await cluster.generate(request(asked.prompt_ids, 8), decode=pod, prefill=cluster.prefills[1])
        assert answer.ids == answer_ids
        assert answer.target is not None
        assert answer.target.first_block > 0
        await switched(pod, Role.PREFILL)
        assert (await cluster.generate(request(asked.prompt_ids, 8))).ids == answer_ids
        cluster.decodes.remove(pod)


async def test_queued_prompts_are_refused_retryably_and_running_answers_move(model_dir: Path) -> None:
    async with Cluster.start(model_dir, prefill=1, decode=1, prefill_config=ROOM, decode_config=ROOM) as cluster:
        running = asyncio.create_task(cluster.generate(request(prompt_of(9), MAX_LEN - 9)))
        await until(lambda: bool(cluster.decode.runtime.engine.scheduler.stats().running))
        await switched(cluster.decode, Role.PREFILL)
        with pytest.raises(RoleChanged) as lost:
            await running
        assert lost.value.retryable
        with pytest.raises(RoleChanged):
            await cluster.reserve(request([1], 2))
        await switched(cluster.decode, Role.BOTH)
        assert cluster.decode.counted("role_switches") == {("decode", "prefill"): 1, ("prefill", "both"): 1}


async def test_only_operators_may_change_a_role(model_dir: Path) -> None:
    async with Cluster.start(model_dir, prefill=0, decode=1) as cluster:
        stub, pod = control_pb2_grpc.ControlStub(cluster.decode.channel), cluster.decode.runtime
        with pytest.raises(Unauthenticated, match="operator"), translate_rpc_errors():
            await stub.SwitchRole(control_pb2.SwitchRoleRequest(role=role_to_pb(Role.BOTH)))
        assert pod.role.current is Role.DECODE
        with pytest.raises(BatonError, match="unknown role"):
            await switch_role_raw(cluster.decode, 0)


async def switch_role_raw(pod: Pod, role: int) -> None:
    from common.auth import sign_calls
    from common.rpc import open_channel

    async with open_channel(pod.runtime.address) as channel:
        stub = control_pb2_grpc.ControlStub(sign_calls(channel, SIGNER, lambda: pod.runtime.name))
        with translate_rpc_errors():
            await stub.SwitchRole(control_pb2.SwitchRoleRequest(role=role))  # type: ignore[arg-type]


async def test_the_index_has_the_new_role_at_once(model_dir: Path, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path)
    url = await valkey.start()
    try:
        config = {"redis": url, **ROOM}
        async with Cluster.start(
            model_dir, prefill=1, decode=1, prefill_config=config, decode_config=config
        ) as cluster:
            pod = cluster.prefill.runtime
            assert pod._index is not None
            index = pod._index
            await until(lambda: index.registered)
            await switched(cluster.prefill, Role.DECODE)

            async def role() -> Role:
                found, _ = await find_pod(pod.name, url, None)
                return found.role

            while await role() is not Role.DECODE:  # the registration is on its way
                await asyncio.sleep(0.01)
            assert index.registered
    finally:
        await valkey.stop()


def test_the_last_pod_of_a_kind_keeps_its_role() -> None:
    def record(name: str, role: Role) -> PodRecord:
        return PodRecord(name, 1, "127.0.0.1:1", role, "m", "scope", "f" * 32, 16, 512, 64)

    pods = [record("p", Role.PREFILL), record("d1", Role.DECODE), record("d2", Role.DECODE)]
    address = {r.pod: PodAddress(r.pod, r.address, r.role, r.scope) for r in pods}
    require_another(address["d1"], Role.PREFILL, pods)
    require_another(address["p"], Role.BOTH, pods)
    with pytest.raises(ConfigError, match="last pod of its layout that computes prompts"):
        require_another(address["p"], Role.DECODE, pods)
    with pytest.raises(ConfigError, match="last pod of its layout that decodes"):
        require_another(address["d1"], Role.PREFILL, pods[:2])


async def test_an_unknown_pod_is_named() -> None:
    with pytest.raises(ConfigError, match="no pod is called 'nobody'"):
        await find_pod("nobody", None, None)
    with pytest.raises(Unavailable, match="no pod answers"):
        await find_pod("127.0.0.1:1", None, None)
