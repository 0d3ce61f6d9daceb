"""GPU pods of one machine in their own PID and IPC namespaces, as in containers: cuda_ipc does not connect them.

Their KV goes through host memory, which both pin, and the tokens are those of one engine in fp32.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.local_stack import BarePod, running_pods
from benchmarks.support.pd_stack import make_model
from common.types import Role
from engine.llm import LLM
from tests.rigs.pods.harness import GatewayStream, PlayedGateway, PodClient, gateway_channel, prompt_of, request

UNSHARE = shutil.which("unshare") or ""
NAMESPACES = [UNSHARE, "--pid", "--ipc", "--mount-proc", "--fork", "--kill-child=KILL"]
BLOCK = 16
EVERY = {
    "served-name": "tiny",
    "dtype": "float32",
    "load-format": "dummy",
    "max-seqs": "16",
    "block-size": str(BLOCK),
    "kv-memory": "256M",
    "checksums": "",
    "no-cuda-graphs": "",  # a quick start
}
PODS = {
    "prefill": {"role": "prefill", **EVERY},
    "decode": {"role": "decode", "local-prefill": "off", **EVERY},
}


def _can_unshare() -> bool:
    return (
        bool(UNSHARE) and subprocess.run([*NAMESPACES, "/bin/true"], capture_output=True, check=False).returncode == 0
    )


pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.geteuid() != 0 or not _can_unshare(), reason="needs root and unshare(1)"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, "small")
    return directory


@pytest.fixture(scope="module")
def processes(model: Path) -> Iterator[dict[str, BarePod]]:
    with running_pods(model, PODS, device="cuda", within=NAMESPACES) as pods:
        yield pods


@pytest.mark.timeout(300)
async def test_pods_in_containers_of_one_node_hand_over_through_shared_memory(
    model: Path, processes: dict[str, BarePod]
) -> None:
    namespaces = {os.readlink(f"/proc/{pod.process.pid}/ns/pid_for_children") for pod in processes.values()}
    assert len(namespaces) == len(processes), "the pods share a PID namespace"
    lengths = (1, BLOCK, 100, 1000, 1001, 3000)
    requests, together = ([request(prompt_of(n, seed=n + turn), 24) for n in lengths] for turn in (0, 7))
    played: PlayedGateway[PodClient] = PlayedGateway()
    try:
        for role, pods in ((Role.PREFILL, played.prefills), (Role.DECODE, played.decodes)):
            bare = processes[role.value]
            pods.append(PodClient(gateway_channel(bare.address, bare.name, "gw", secret=bare.secret)))
        played.streams.append(await GatewayStream(played.decode, "gw").open())
        answers = [await played.generate(r, remote_only=True) for r in requests]
        answers += await asyncio.gather(*(played.generate(r, remote_only=True) for r in together))
        (pair,) = (await played.prefill.info()).pairs
    finally:
        for stream in played.streams:
            await stream.close()
        for pod in played.pods:
            await pod.channel.close()
    requests += together
    options: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "kv_memory": 1 << 28, "cuda_graphs": False}
    llm = LLM(model, device="cuda", max_model_len=8192, **options)
    try:
        expected = llm.generate([r.prompt_ids for r in requests], [r.sampling for r in requests], ignore_eos=True)
    finally:
        llm.engine.close()
    assert {a.handed_off.transport for a in answers if a.handed_off is not None} == {"staged_shm"}
    assert pair.transport == "staged_shm"
    assert [a.ids for a in answers] == [one.ids for one in expected]
