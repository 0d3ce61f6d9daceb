"""The deterministic mode on a CPU: every cause that changes the steps of an answer leaves its bits as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.bit_proof import CAUSES, Proof, make_jobs
from common.errors import ConfigError
from engine.config import EngineConfig
from engine.engine import Engine
from tests.rigs.engine.bare_model import GPT2, LLAMA, bare_model

JOBS, WIDTH = 10, 5
#: Large enough that torch's products sum in another order for other numbers of rows.
SHAPE = LLAMA | {
    "vocab_size": 160,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make(directory: Path, **settings: Any) -> Engine:
    defaults = {"load_format": "dummy", "dtype": "bfloat16", "block_size": 4, "num_blocks": 200, "threads": 1}
    return Engine(EngineConfig(model_dir=directory, **(defaults | settings)))


def begin(directory: Path, **settings: Any) -> Proof:
    first = make(directory, chunk_tokens=64, **settings)
    second = make(directory, chunk_tokens=8, speculation="ngram", speculation_tokens=3, **settings)
    proof = Proof(first, second, make_jobs(JOBS, SHAPE["vocab_size"], (3, 17, 30), (5, 9)), WIDTH)
    proof.run_reference()
    return proof


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_model(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.fixture(scope="module")
def proof(model_dir: Path) -> Proof:
    return begin(model_dir, deterministic=True)


def run(proof: Proof, cause: str) -> None:
    names = list(proof.jobs)
    work: dict[str, Callable[[], None]] = {
        "batch": proof.run_batch,
        "chunk": lambda: proof.run_chunks(names),
        "hit": lambda: proof.run_hits(names),
        "preemption": lambda: proof.run_preemptions(names),
        "hand_off": lambda: proof.run_hand_offs(names),
        "migration": lambda: proof.run_migrations(names),
        "drafts": lambda: proof.run_drafts(names),
    }
    work[cause]()


@pytest.mark.parametrize("cause", CAUSES)
def test_no_bit_changes(proof: Proof, cause: str) -> None:
    run(proof, cause)
    assert proof.causes[cause] >= 3, "the cause did not happen"
    assert not proof.mismatches
    for engine in (proof.first, proof.second):
        engine.pool.check_integrity()
        assert engine.pool.counts().leased == 0


def test_bits_change_without_the_mode(model_dir: Path) -> None:
    """So the comparison can fail."""
    proof = begin(model_dir, deterministic=False)
    run(proof, "batch")
    run(proof, "chunk")
    assert proof.mismatches


def test_pods_with_and_without_the_mode_exchange_no_kv(model_dir: Path, proof: Proof) -> None:
    assert make(model_dir).layout.fingerprint != proof.first.layout.fingerprint


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype"),
        ({"weights": "int8"}, "weights"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculation": "ngram", "speculation_accept": "rejection"}, "speculation_accept"),
    ],
)
def test_settings_without_a_fixed_order_are_refused(model_dir: Path, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with deterministic") as error:
        make(model_dir, deterministic=True, **settings)
    assert error.value.field == field


def test_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transformers") as error:
        make(bare_model(tmp_path / "gpt2", GPT2), deterministic=True)
    assert error.value.field == "deterministic"
