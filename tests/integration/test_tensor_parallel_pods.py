"""Pods with two ranks each over NIXL: KV moves from rank r to rank r, and the tokens equal those of one device."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.probes import trouble
from cli.stack.certificates import Authority
from cli.stack.supervisor import ChildProcess, PortLease
from common.errors import BatonError, LayoutMismatch
from common.pb import decode_pb2
from common.process.watchdog import EXIT_STUCK
from common.tls import TlsFiles
from common.types import Role
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, Cluster, prompt_of, request
from tests.rigs.waiting import until

TWO: dict[str, Any] = {"tensor_parallel_size": 2}


async def test_kv_of_all_ranks_moves_and_tokens_equal_one_device(model_dir: Path, llm: LLM) -> None:
    async with Cluster.start(
        model_dir,
        own_backend=True,
        prefill_config={**TWO, "stuck_step_s": 2.5},
        decode_config={**TWO, "local_prefill": "off"},
    ) as cluster:
        lengths = [1, BLOCK, BLOCK + 1, CHUNK, 3 * CHUNK + 1]
        requests = [request(prompt_of(n, seed=n), 6) for n in lengths]
        answers = await asyncio.gather(*(cluster.generate(r, remote_only=True) for r in requests))
        for r, answer in zip(requests, answers, strict=True):
            assert answer.ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
        decode, prefill = cluster.decode, cluster.prefill
        assert (await decode.info()).computed.local == 0
        assert prefill.runtime.transfer_node.stats().sent_transfers == len(requests)
        # The next turn of a conversation hits the prefix cache of the decode pod; all ranks share its block ids.
        longer = request([*requests[-1].prompt_ids, *answers[-1].ids, 5, 6, 7], 6)
        again = await cluster.generate(longer, remote_only=True)
        assert again.ids == llm.generate([longer.prompt_ids], longer.sampling, ignore_eos=True)[0].ids
        assert again.target is not None
        assert again.target.first_block > 0

        # Over NIXL the one rank of another prefill pod writes each block's slices to both ranks.
        single = await cluster.add(Role.PREFILL, kv_order="heads")
        r = request(prompt_of(2 * CHUNK + 3, seed=77), 6)
        other = await cluster.generate(r, prefill=single, remote_only=True)
        assert other.ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
        assert single.runtime.transfer_node.stats().sent_transfers == 1
        cluster.prefills.remove(single)
        await single.close()

        # A pod with one rank whose heads are not slices of a block is refused at the handshake.
        alone = await cluster.add(Role.PREFILL)
        with pytest.raises(
            LayoutMismatch, match=r"size 2 with kv_order heads .*size 1 with kv_order layers"
        ) as refused:
            await alone.runtime.transfer_node.connect(decode.runtime.address, decode.runtime.name)
        assert refused.value.field == "kv_order"
        cluster.prefills.remove(alone)
        await alone.close()

        # A frozen rank stops its pod's engine, which the watchdog sees.
        # A lost rank ends its pod soon and with a reason.
        rank_group = prefill.runtime.engine.rank_group
        assert rank_group is not None
        exits: list[int] = []
        prefill.runtime.watch.watchdog.end = exits.append
        prefill.runtime.watch.start()
        os.kill(rank_group.pids[0], signal.SIGSTOP)
        r = request(prompt_of(9, seed=99), 4)
        task = asyncio.create_task(cluster.generate(r, remote_only=True, timeout_s=120))
        await until(lambda: bool(exits))
        assert exits[0] == EXIT_STUCK
        assert decode.runtime.engine.pool.counts().leased
        os.kill(rank_group.pids[0], signal.SIGKILL)
        with pytest.raises(BatonError):
            await task
        await until(lambda: prefill.runtime.lifecycle.draining)
        assert prefill.runtime.exit_code == 4
        assert "rank 1 has ended (SIGKILL)" in str(prefill.runtime.engine.failure)
        prefill.runtime.watch.stop()
        # The gateway ends the request on the decode pod too. Without that, its blocks would wait for its deadline.
        await decode.decode.Abort(decode_pb2.DecodeAbortRequest(request_id=r.request_id))
        await decode.settled(timeout_s=10)


async def test_a_pod_over_two_machines(model_dir: Path, llm: LLM, tmp_path: Path) -> None:
    """The rank of the second machine is a `baton worker`. It starts first, serves health, and ends with the pod.

    Both have certificates, so the channels of the group are TLS.
    """
    authority, certificates = Authority.create(), {role: tmp_path / role for role in ("both", "worker", "gateway")}
    for role, directory in certificates.items():
        authority.issue(directory, role, role, days=1)
    worker_tls = TlsFiles.of_directory(certificates["worker"], "worker")
    leases = PortLease(), PortLease()
    master, health = (lease.port for lease in leases)
    argv = [sys.executable, "-m", "cli", "worker", f"--tensor-parallel-master=127.0.0.1:{master}"]
    argv.append(f"--tls-dir={certificates['worker']}")
    worker = ChildProcess("worker", [*argv, f"--port={health}"], log=tmp_path / "worker.log", env=dict(os.environ))
    worker.start()
    try:
        two = {**TWO, "tensor_parallel_nodes": 2, "tensor_parallel_master": f"127.0.0.1:{master}"}
        two |= {"tls_dir": str(certificates["both"]), "gateway_tls": str(certificates["gateway"])}
        async with Cluster.start(model_dir, prefill=0, role=Role.BOTH, decode_config=two, own_backend=True) as cluster:
            r = request(prompt_of(21, seed=4), 5)
            assert (await cluster.generate(r)).ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
            assert await trouble(f"grpc://127.0.0.1:{health}", 60.0, worker_tls) is None
            assert await trouble(f"grpc://127.0.0.1:{health}/live", 60.0, worker_tls) is None
            worker.send(signal.SIGTERM)  # the worker drains, but waits for the pod
            await until(lambda: "draining" in "".join(worker.tail()))
            r = request(prompt_of(22, seed=5), 5)
            assert (await cluster.generate(r)).ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
            assert worker.alive
        assert await asyncio.to_thread(worker.wait, 120) == 0
    finally:
        worker.kill()
        for lease in leases:
            lease.close()
