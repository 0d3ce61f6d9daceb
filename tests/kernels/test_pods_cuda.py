"""Pods on GPUs (they share one if there is only one): pulls, local prefill on a decode pod, and the host tier.

In fp32 the tokens are those of one engine. The pods are processes, and their KV goes over cuda_ipc.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.support.local_stack import BarePod, running_pods
from benchmarks.support.pd_stack import make_model
from common.pb import prefill_pb2
from common.types import ValidRequest
from engine.llm import LLM
from tests.rigs.pods.harness import Answer, GatewayStream, PlayedGateway, PodClient, gateway_channel, prompt_of, request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE, TRANSPORT = "cuda", "cuda_ipc"
BLOCK, BLOCK_BYTES = 16, 64 << 10
#: Prompt tokens that the pod decode-local computes itself.
LOCAL = 64
#: Device blocks of the pods with a host tier.
TIER = 96
MEMORY = {"kv-memory": "256M", "host-cache": "0"}
TIERED = {"kv-memory": str((TIER + 2) * BLOCK_BYTES), "host-cache": "64M", "max-model-len": "1024"}
PODS = {
    "holder": {"role": "prefill", **MEMORY},
    "puller": {"role": "prefill", **MEMORY},
    "prefill-tier": {"role": "prefill", **TIERED},
    "decode-local": {"role": "decode", "local-prefill": str(LOCAL), **MEMORY},
    "decode-far": {"role": "decode", "local-prefill": "off", **MEMORY},
    "decode-tier": {"role": "decode", "local-prefill": "off", **TIERED},
}
EVERY = {"served-name": "tiny", "dtype": "float32", "load-format": "dummy", "max-seqs": "16", "block-size": str(BLOCK)}


@dataclass
class ProcessPod(PodClient):
    """A pod in its own process."""

    bare: BarePod
    generation: int

    def holds(self, blocks: int) -> prefill_pb2.PullHint:
        return prefill_pb2.PullHint(
            pod=self.bare.name, generation=self.generation, address=self.bare.address, blocks=blocks
        )


class Pods(PlayedGateway[ProcessPod]):
    """All pods, by name."""

    def __getitem__(self, name: str) -> ProcessPod:
        return next(pod for pod in self.pods if pod.bare.name == name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, "small")
    return directory


@pytest.fixture(scope="module")
def processes(model: Path) -> Iterator[dict[str, BarePod]]:
    with running_pods(model, {name: EVERY | flags for name, flags in PODS.items()}, device=DEVICE) as pods:
        yield pods


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """One engine with enough memory for all requests, as the reference."""
    reference = LLM(model, device=DEVICE, dtype="float32", load_format="dummy", kv_memory=1 << 30, max_model_len=8192)
    yield reference
    reference.engine.close()


@contextlib.asynccontextmanager
async def driving(processes: dict[str, BarePod]) -> AsyncIterator[Pods]:
    """Connects to the pods. After the block it waits until no pod has leased or quarantined blocks."""
    pods = Pods()
    try:
        for name, bare in processes.items():
            pod = ProcessPod(gateway_channel(bare.address, name, f"gw-{name}", secret=bare.secret), bare, 0)
            pod.generation = (await pod.info()).generation
            (pods.decodes if name.startswith("decode") else pods.prefills).append(pod)
            if name.startswith("decode"):
                pods.streams.append(await GatewayStream(pod, f"gw-{name}").open())
        yield pods
        async with asyncio.timeout(30):
            for pod in pods.pods:
                while (counts := (await pod.info()).blocks).leased or counts.quarantined:
                    await asyncio.sleep(0.02)
    finally:
        for stream in pods.streams:
            await stream.close()
        for pod in pods.pods:
            await pod.channel.close()


def expected(llm: LLM, requests: Sequence[ValidRequest]) -> list[list[int]]:
    done = llm.generate([r.prompt_ids for r in requests], [r.sampling for r in requests], ignore_eos=True)
    return [one.ids for one in done]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_prefix_is_pulled_from_another_pod(processes: dict[str, BarePod], llm: LLM, kind: str) -> None:
    """The decode pod has no block of the prefix: all its KV comes from the pod that pulled it."""
    sizes = (1, 63, 400)
    prefixes = [prompt_of(n * BLOCK, seed=1 + (kind == "decode")) for n in sizes]
    follow_ups = [request([*prefix, *prompt_of(33, seed=5)], 24) for prefix in prefixes]
    async with driving(processes) as pods:
        puller, holder = pods["puller"], pods["holder" if kind == "prefill" else "decode-local"]
        for prefix in prefixes:
            first = request([*prefix, 7], 2)
            await pods.generate(first, prefill=pods["holder"], decode=pods["decode-local"], remote_only=True)
        await connected(pods, puller, holder)
        before = await puller.info()
        answers: list[Answer] = []
        for r, n in zip(follow_ups, sizes, strict=True):
            answers.append(
                await pods.generate(
                    r, prefill=puller, decode=pods["decode-far"], remote_only=True, pull=holder.holds(n)
                )
            )
        after = await puller.info()
        assert [a.cached_tokens for a in answers] == [n * BLOCK for n in sizes]
        assert after.computed.prefill - before.computed.prefill == 33 * len(sizes)
        assert {a.handed_off.transport for a in answers if a.handed_off is not None} == {TRANSPORT}
        pair = next(p for p in (await holder.info()).pairs if p.pod == puller.bare.name)
        assert pair.transport == TRANSPORT
        assert pair.pulled_blocks >= sum(sizes)
    assert [a.ids for a in answers] == expected(llm, follow_ups)


async def connected(pods: Pods, puller: ProcessPod, holder: ProcessPod) -> None:
    """Pulls until a pull succeeds. A pod without a measured compute rate may give the first one too little time."""
    for seed in range(10):
        prefix = prompt_of(BLOCK, seed=100 + seed)
        for first, prefill, hint in ((True, pods["holder"], None), (False, puller, holder.holds(1))):
            r = request([*prefix, 7 + first], 2)
            decode = pods["decode-local" if first else "decode-far"]
            answer = await pods.generate(r, prefill=prefill, decode=decode, remote_only=True, pull=hint)
        if answer.cached_tokens:
            return
    pytest.fail(f"{puller.bare.name} does not pull from {holder.bare.name}")


async def test_a_decode_pod_computes_the_end_of_a_prompt_while_it_decodes(
    processes: dict[str, BarePod], llm: LLM
) -> None:
    conversation = prompt_of(40 * BLOCK, seed=21)
    batch = [request(prompt_of(300 + n, seed=22), 512) for n in range(4)]
    rests = (1, 40, LOCAL)
    follow_ups = [request([*conversation, *prompt_of(n, seed=23)], 24) for n in rests]
    async with driving(processes) as pods:
        decode = pods["decode-local"]
        first = request([*conversation, 7], 2)
        await pods.generate(first, prefill=pods["holder"], decode=decode, remote_only=True)
        started = [asyncio.Event() for _ in batch]
        running = [
            asyncio.create_task(
                pods.generate(
                    r,
                    prefill=pods["holder"],
                    decode=decode,
                    remote_only=True,
                    on_event=lambda kind, e=event: e.set() if kind == "tokens" else None,
                )
            )
            for r, event in zip(batch, started, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        before = (await decode.info()).computed.local
        # Requests of the batch that were running when each follow-up got its first token.
        decoding: list[dict[str, int]] = [{} for _ in follow_ups]

        def note(at: dict[str, int], kind: str) -> None:
            at.setdefault(kind, sum(not task.done() for task in running))

        local = await asyncio.gather(
            *(
                pods.generate(r, decode=decode, on_event=functools.partial(note, at))
                for r, at in zip(follow_ups, decoding, strict=True)
            )
        )
        assert decoding == [{"tokens": len(batch)}] * len(follow_ups), "the batch ended before the follow-ups"
        assert all(answer.events[0] == "local" for answer in local)
        assert (await decode.info()).computed.local - before == sum(rests)
        answers = await asyncio.gather(*running)
    assert [a.ids for a in local] == expected(llm, follow_ups)
    assert [a.ids for a in answers] == expected(llm, batch)


async def test_prefixes_are_loaded_from_host_memory_and_not_computed_again(
    processes: dict[str, BarePod], llm: LLM
) -> None:
    """All prompts need five times the pool. Both pods save blocks to host memory while KV moves between them."""
    prefixes = [prompt_of(40 * BLOCK, seed=30 + n) for n in range(12)]
    two = asyncio.Semaphore(2)  # the pool of the decode pod has room for two requests
    async with driving(processes) as pods:
        tier = pods["prefill-tier"]

        async def ask(r: ValidRequest) -> Answer:
            async with two:
                return await pods.generate(r, prefill=tier, decode=pods["decode-tier"], remote_only=True)

        for round_ in range(3):
            requests = [request([*prefix, *prompt_of(17, seed=50 + round_)], 24) for prefix in prefixes]
            before = (await tier.info()).computed
            answers = await asyncio.gather(*(ask(r) for r in requests))
            assert [a.ids for a in answers] == expected(llm, requests)
            after = (await tier.info()).computed
            if round_:
                assert [a.cached_tokens for a in answers] == [len(prefix) for prefix in prefixes]
                assert after.prefill - before.prefill == 17 * len(prefixes)
            assert after.recompute == 0


async def test_a_preempted_sequence_resumes_from_host_memory(processes: dict[str, BarePod], llm: LLM) -> None:
    requests = [request(prompt_of(200 + n, seed=60), 300) for n in range(6)]  # 13 blocks each, 32 at the end
    async with driving(processes) as pods:
        decode = pods["decode-tier"]
        before = await decode.info()
        answers = await asyncio.gather(
            *(pods.generate(r, prefill=pods["prefill-tier"], decode=decode, remote_only=True) for r in requests)
        )
        after = await decode.info()
        assert after.activity.preemptions > before.activity.preemptions
        assert after.computed.recompute == 0
    assert [a.ids for a in answers] == expected(llm, requests)
