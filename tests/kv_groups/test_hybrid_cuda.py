"""Pods of a hybrid model on one card: hand-off, hits, a pull and samples, with the graphs and kernels of the card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prefill_service import prefix_pull
from tests.kv_groups.families import check_tokens, prompt
from tests.rigs.engine.hybrid_models import save_hybrid
from tests.rigs.pods.harness import VOCAB, Cluster, request
from tests.rigs.pods.samples import Samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


@pytest.mark.timeout(240)
async def test_states_move_between_pods_of_one_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("UNKNOWN_TIME_S", "MIN_TIME_S", "MAX_TIME_S"):
        monkeypatch.setattr(prefix_pull, limit, 20.0)
    reference = save_hybrid(tmp_path, "qwen3.5", vocab_size=VOCAB, **SIZES)
    (tmp_path / "tokenizer.json").write_text("{}")
    config: dict[str, Any] = {"kv_groups": True, "num_blocks": 400, "device": "cuda", "snapshot_blocks": 3}
    pods = {"prefill_config": config, "decode_config": {**config, "local_prefill": "off"}}
    async with Cluster.start(tmp_path, prefill=2, **pods) as cluster:
        holder, puller = cluster.prefills
        for length in (1, 4, 33, 50):
            r = request(prompt(length, seed=length), 9, logprobs=0)
            for number in range(2):
                again = replace(r, request_id=f"{length}-{number}")
                answer = await cluster.generate(again, prefill=holder, remote_only=True)
                check_tokens(reference, r.prompt_ids, answer.tokens)
        r = request([*prompt(50, seed=50)[:48], 9, 9, 9], 9, logprobs=0)
        answer = await cluster.generate(r, prefill=puller, pull=holder.holds(12), remote_only=True)
        check_tokens(reference, r.prompt_ids, answer.tokens)
        assert answer.cached_tokens == 48
        assert puller.counted("pulls") == {("done", "all"): 1}
        sampled = request(prompt(21, seed=7), 9, temperature=0.0, n=3)
        samples = await Samples().run(cluster, sampled)
        assert samples.ids(0) == samples.ids(1) == samples.ids(2)
