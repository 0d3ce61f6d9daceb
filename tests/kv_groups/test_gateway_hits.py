"""A gateway, an index and pods over NIXL, with windows or recurrent states: routing expects the hits that pods have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli.stack.valkey import EmbeddedValkey
from common.types import Role, SamplingParams, ValidRequest
from kv_transfer.backend.nixl import NixlBackend
from prefill_service import prefix_pull
from prefix_index import publisher
from tests.kv_groups.families import BLOCK, check_tokens, prompt, save
from tests.rigs.engine.hybrid_models import save_hybrid
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.harness import VOCAB, Cluster, Pod, request
from tests.rigs.waiting import until

NEW = 9  # Tokens of an answer


def usable_hit(pod: Pod, prompt_ids: list[int]) -> int:
    """Returns the cached tokens of a prompt that a pod can use."""
    return pod.runtime.engine.pool.match_prefix(pod.runtime.prompt_hashes(request(prompt_ids, 1))) * BLOCK


async def expected_hits(gw: Rig, pods: Cluster, pod: Pod, prompt_ids: list[int]) -> int:
    """Returns the cached tokens of a prompt that routing expects on a pod, once the index is up to date."""
    await gw.settled()
    await asyncio.gather(*(each.settled() for each in pods.pods))
    indexes = [each.runtime._index for each in pods.pods]
    await until(lambda: all(index is not None and index.up_to_date for index in indexes))
    asked = ValidRequest("r", "tiny", tuple(prompt_ids), SamplingParams(max_tokens=1))
    plan = await gw.gateway.models.first.router.plan(asked, "")
    assert plan.index_answered
    return plan.prompts[pod.runtime.engine.layout.fingerprint].device_hits.get(pod.runtime.name, 0)


async def ask(gw: Rig, reference: Any, prompt_ids: list[int]) -> tuple[list[int], int]:
    """Checks an answer; returns its tokens and the cached tokens of the prompt."""
    ids = list(prompt_ids)
    with torch.inference_mode():
        for _ in range(NEW):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = reference(torch.tensor([ids])).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    sampling = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = await gw.complete(model="tiny", prompt=prompt_ids, **sampling)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    greedy = [float(row[token]) for row, token in zip(logprobs, ids[len(prompt_ids) :], strict=True)]
    assert found["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(greedy, abs=5e-4)
    await gw.settled()
    return ids[len(prompt_ids) :], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("family", [pytest.param("qwen2-window", marks=pytest.mark.long), "qwen3.5"])
async def test_routing_expects_the_hits_that_pods_have(
    family: str, tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.05)
    for limit in ("UNKNOWN_TIME_S", "MIN_TIME_S", "MAX_TIME_S"):
        monkeypatch.setattr(prefix_pull, limit, 20.0)
    (path := tmp_path / "model").mkdir()
    reference = save(path, family) if family == "qwen2-window" else save_hybrid(path, family, vocab_size=VOCAB)
    (path / "tokenizer.json").write_text("{}")
    valkey = EmbeddedValkey(port=0, directory=tmp_path)
    url = await valkey.start()
    config: dict[str, Any] = {"redis": url, "kv_groups": True, "num_blocks": 400, "snapshot_blocks": 4, "pull": "off"}
    try:
        options = {"prefill_config": config, "decode_config": {**config, "local_prefill": "off"}}
        async with Cluster.start(path, backend=lambda _: NixlBackend(), **options) as pods:
            addresses = tuple(pod.runtime.address for pod in pods.pods)
            fakes: Any = SimpleNamespace(addresses=addresses, decodes=pods.decodes, all_idle=lambda: True)
            async with rig(fakes, smollm2_dir, models=(f"tiny={smollm2_dir}",), redis=url) as gw:
                await until(lambda: gw.gateway.pod_table.index_up)
                await check_conversation(gw, pods, reference, windows=family == "qwen2-window")
            puller = await pods.add(Role.PREFILL, **{**config, "pull": "push"})
            r = request([*prompt(50, seed=3)[:48], 9, 9, 9], NEW, logprobs=0)
            hint = pods.prefill.holds(12)
            answer = await pods.generate(r, prefill=puller, pull=hint, remote_only=True)
            check_tokens(reference, r.prompt_ids, answer.tokens)
            assert answer.cached_tokens == 48
            assert puller.counted("pulls") == {("done", "all"): 1}
    finally:
        await valkey.stop()


async def check_conversation(gw: Rig, pods: Cluster, reference: Any, *, windows: bool) -> None:
    """Prompts that go on where a cached one ended, and prompts that leave it between two usable boundaries."""
    first = prompt(50, seed=3)
    answer, cached = await ask(gw, reference, first)
    assert cached == 0
    turn = first + answer + prompt(5, seed=4)
    branches = [(first[:41] + prompt(9, seed=seed), exact) for seed, exact in ((5, False), (6, True))]
    for prompt_ids, exact in ((turn, True), (first[:48] + prompt(9, seed=7), True), (turn, True), *branches):
        expected = await expected_hits(gw, pods, pods.prefill, prompt_ids)
        usable = usable_hit(pods.prefill, prompt_ids)
        _, cached = await ask(gw, reference, prompt_ids)
        assert cached == usable
        assert expected == usable if exact else usable <= expected <= 40
    # After a short answer the decode pod has the blocks of the prompt, and a hybrid model has no snapshot there.
    short = prompt(49, seed=11)
    assert (await gw.complete(model="tiny", prompt=short, max_tokens=2)).status_code == 200
    for pod, hit in ((pods.prefill, 48), (pods.decode, 48 if windows else 0)):
        assert await expected_hits(gw, pods, pod, short) == usable_hit(pod, short) == hit
