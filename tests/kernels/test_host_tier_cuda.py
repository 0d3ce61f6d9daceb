"""The host tier on a GPU: page-locked memory, copies on their own stream beside the steps, unchanged bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.kv_layout import KVLayout
from common.types import SamplingParams
from engine.kv.kv_pool import KVPool
from engine.kv.tiers.host_copier import HostKVPool
from engine.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYOUT = KVLayout("m", "r", num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")


def test_saved_blocks_are_loaded_unchanged_while_the_gpu_computes() -> None:
    device = torch.device("cuda")
    kv, slots = KVPool(LAYOUT, 300, device), 200
    memory = HostKVPool(kv, slots)
    try:
        kv.data.random_(0, 256)
        before = kv.data.cpu()
        work = torch.randn(4096, 4096, device=device)
        rng = random.Random(1)
        saved = rng.sample(range(300), slots)
        places = rng.sample(range(slots), slots)
        for at in range(0, slots, 32):
            work = work @ work * 1e-3  # keeps the steps' stream busy; copies do not wait for it
            memory.save(saved[at : at + 32], places[at : at + 32])
        memory.wait()
        assert torch.equal(memory.data[places], before[saved])
        targets = rng.sample(range(300), slots)
        for at in range(0, slots, 32):
            work = work @ work * 1e-3
            memory.load(places[at : at + 32], targets[at : at + 32])
        memory.wait()
        torch.cuda.synchronize()
        assert torch.equal(kv.data[targets].cpu(), before[saved])
        assert torch.isfinite(work).any()
    finally:
        memory.close()


def test_eviction_and_preemption_change_no_token(tmp_path: Path) -> None:
    torch.manual_seed(3)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    rng = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 512, (n,), generator=rng).tolist() for n in (15, 17, 64, 65, 130, 200, 250, 33)]
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=120)
    common = {"device": "cuda", "dtype": "float32", "block_size": 16, "chunk_tokens": 64}
    expected = [c.ids for c in LLM(tmp_path, num_blocks=400, **common).generate(prompts, params)]  # type: ignore[arg-type]
    llm = LLM(tmp_path, num_blocks=40, host_cache=64 << 20, checksums=True, **common)  # type: ignore[arg-type]
    for _ in range(2):
        assert [c.ids for c in llm.generate(prompts, params)] == expected
    stats, host = llm.engine.scheduler.stats(), llm.engine.pool.host_stats()
    assert stats.preemptions > 0
    assert (stats.partly_recomputed, llm.engine.counters.recomputed_tokens) == (0, 0)
    assert host is not None
    assert host.loaded > 0
    assert host.damaged == 0
    assert llm.engine.pool.host_tier is not None
    assert llm.engine.pool.host_tier.wait_idle(20.0)
    llm.engine.pool.check_integrity()
    llm.engine.close()


def test_a_restarted_engine_reads_its_blocks_from_the_disk(tmp_path: Path) -> None:
    torch.manual_seed(4)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    rng = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 512, (400,), generator=rng).tolist() for _ in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    common = {"device": "cuda", "dtype": "float32", "block_size": 16, "chunk_tokens": 128}
    expected = [c.ids for c in LLM(tmp_path, num_blocks=400, **common).generate(prompts, params)]  # type: ignore[arg-type]
    disk = {"num_blocks": 60, "host_cache": 64 << 20, "disk_cache": str(tmp_path / "disk"), **common}
    for loaded in (False, True):
        llm = LLM(tmp_path, **disk)  # type: ignore[arg-type]
        tier = llm.engine.pool.disk_tier
        assert tier is not None
        assert tier.wait_idle(60.0)
        assert [llm.generate([prompt], params)[0].ids for prompt in prompts] == expected
        assert tier.wait_idle(60.0)
        assert (tier.stats().loaded > 0) == loaded
        assert tier.stats().damaged == tier.stats().failures == 0
        llm.engine.pool.check_integrity()
        llm.engine.close()
