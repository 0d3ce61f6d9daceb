"""Prefill and decode pods over real NIXL: decode uses the KV that was moved. Repeated over TCP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.types import Role
from engine.llm import LLM
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.nixl import NixlBackend
from tests.rigs.pods.harness import BLOCK, CHUNK, Cluster, prompt_of, request
from tests.rigs.transfer.faulty_backend import FaultyBackend, WriteFaultPlan


class Wire:
    """NIXL under every pod; writes of prefill pods go through `faulty`."""

    def __init__(self) -> None:
        self.faulty: list[FaultyBackend] = []

    def __call__(self, role: Role) -> Backend:
        if role is not Role.PREFILL:
            return NixlBackend()
        self.faulty.append(FaultyBackend(NixlBackend()))
        return self.faulty[-1]


async def test_two_and_two_pods_give_the_tokens_of_one_process(model_dir: Path, llm: LLM) -> None:
    wire = Wire()
    sizes = {"num_blocks": 200}
    async with Cluster.start(
        model_dir, prefill=2, decode=2, backend=wire, decode_config=sizes, prefill_config=sizes
    ) as cluster:
        lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1]
        requests = [request(prompt_of(n, seed=n), 6) for n in lengths]
        answers = await asyncio.gather(
            *(
                cluster.generate(
                    r, prefill=cluster.prefills[i % 2], decode=cluster.decodes[i // 2 % 2], remote_only=True
                )
                for i, r in enumerate(requests)
            )
        )
        for r, answer in zip(requests, answers, strict=True):
            assert answer.ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
        for pod in cluster.decodes:
            computed = (await pod.info()).computed
            assert (computed.prefill, computed.local, computed.recompute) == (0, 0, 0)


async def test_a_block_damaged_on_the_wire_changes_the_output(model_dir: Path, llm: LLM) -> None:
    """Without checksums the damaged block is used."""
    wire = Wire()
    async with Cluster.start(model_dir, backend=wire, prefill_config={"checksums": False}) as cluster:
        r = request(prompt_of(3 * CHUNK), 12)
        right = llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
        faulty = wire.faulty[0]
        faulty.on_write = lambda _peer, _local, _remote: WriteFaultPlan(corrupt=0 if not faulty.corrupted else None)
        answer = await cluster.generate(r, remote_only=True)
        assert faulty.corrupted == 1
        assert answer.ids[0] == right[0], "the first token comes from prefill, whose own KV is whole"
        assert answer.ids != right
