"""An engine without a prefix cache: the same tokens, whatever samples, preemptions and policies do to its blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.types import SamplingParams, ValidRequest
from engine.llm import LLM
from tests.rigs.engine.draft_models import tiny_target

BLOCK = 4
PROMPTS = [tuple(range(10, 10 + length)) for length in (BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("model"))


def answers(path: Path, **config: object) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Returns the tokens of three samples of each prompt, asked for twice, and the cached tokens."""
    engine = LLM(path, device="cpu", threads=1, block_size=BLOCK, **config).engine
    found: dict[tuple[str, int], list[int]] = {}
    cached = 0
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=1.0, seed=number, n=3, max_tokens=9)
            request = ValidRequest(f"r{turn}-{number}", "m", prompt, params, cache_priority=2 * turn - 1)
            engine.add(engine.new_sequence(request))
        for _ in range(1000):
            if not engine.has_work:
                break
            for output in engine.step().outputs:
                assert output.error is None, output.error
                cached = max(cached, output.seq.cached_tokens)
                ids = found.setdefault((output.seq.request_id, output.seq.child), [])
                ids += [token.id for token in output.tokens]
        assert not engine.has_work
        engine.pool.check_integrity()
    return found, cached


def test_the_tokens_are_those_of_an_engine_with_a_cache(directory: Path) -> None:
    wanted, cached = answers(directory, num_blocks=256)
    assert cached > 0
    assert len(wanted) == 2 * 3 * len(PROMPTS)
    assert {len(ids) for ids in wanted.values()} == {9}
    for blocks in (256, 12):
        assert answers(directory, num_blocks=blocks, prefix_cache=False) == (wanted, 0)
    for policy in ("gdsf", "s3fifo"):
        tokens, cached = answers(directory, num_blocks=12, cache_policy=policy, cache_pin=65536)
        assert tokens == wanted
        assert cached > 0
