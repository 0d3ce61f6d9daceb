"""Steps of one token on a CPU: the same log-probabilities as those of the whole text in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.types import SamplingParams, ValidRequest
from engine.kernels.cpu.compiled import is_available
from engine.llm import LLM
from engine.models.cpu_weights import can_pack
from engine.models.decoder import Decoder
from engine.models.loader import open_model
from engine.schedule.outputs import StepResult
from tests.rigs.engine.bare_model import LLAMA, bare_model

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no packed products")
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 96}
QWEN3 = WIDE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
OUTPUT = 10


def logprobs(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[list[int], list[float], list[float]]:
    """Returns the answer to a prompt, its log-probabilities, and those of the prompt if `params` ask for them."""
    engine = llm.engine
    tokens: list[int] = []
    chosen: list[float] = []
    of_prompt: list[float] = []

    def on_step(result: StepResult) -> None:
        for output in result.outputs:
            assert output.error is None
            tokens.extend(token.id for token in output.tokens)
            chosen.extend(token.logprob for token in output.tokens if token.logprob is not None)
            of_prompt.extend(() if output.prompt_logprobs is None else output.prompt_logprobs.logprobs)

    engine.add(engine.new_sequence(ValidRequest("request", engine.layout.model, tuple(ids), params)))
    while engine.has_work:
        engine.step(on_step)
    return tokens, chosen, of_prompt


def use_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles the kernels for the smallest models too."""
    if not is_available():
        pytest.skip("numba is not installed")
    monkeypatch.setattr("engine.models.decoder.MIN_COMPILED_WEIGHTS", 0)
    monkeypatch.setattr("engine.attention.torch_backend.MIN_COMPILED_BYTES", 0)
    monkeypatch.setattr("engine.attention.torch_backend.MIN_SPLIT_BYTES", 1024)


@pytest.mark.parametrize(
    ("config", "weights", "tolerance"),
    [
        (WIDE, "auto", 1e-4),
        (WIDE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, "auto", 1e-4),
        (QWEN3, "auto", 1e-4),
        (WIDE, "int8", 2e-2),
    ],
    ids=["llama", "biases", "qk-norm", "int8"],
)
@pytest.mark.parametrize(("threads", "numba"), [(1, False), (2, False), (1, True), (2, True)])
def test_single_tokens_score_like_a_whole_text(
    config: dict[str, Any],
    weights: str,
    tolerance: float,
    threads: int,
    numba: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if numba:
        use_numba(monkeypatch)
    directory = bare_model(tmp_path, config)
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 32, "load_format": "dummy"}
    llm = LLM(directory, **settings, threads=threads, weights=weights)
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT, logprobs=0)
    prompt = [(7 * i) % 96 for i in range(20)]
    answer, found, _ = logprobs(llm, prompt, greedy)
    assert len(found) == OUTPUT
    *_, expected = logprobs(llm, prompt + answer, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert found == pytest.approx(expected[-OUTPUT:], abs=tolerance)
    assert torch.get_num_threads() == threads


def test_a_batch_of_tokens_answers_like_single_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = bare_model(tmp_path, QWEN3)
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "load_format": "dummy", "threads": 2}
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    prompts = [[(7 * i + length) % 96 for i in range(length)] for length in (1, 15, 16, 17, 40)]
    plain = LLM(directory, **settings)
    expected = [plain.generate([prompt], greedy, ignore_eos=True)[0].tokens for prompt in prompts]
    use_numba(monkeypatch)
    found = LLM(directory, **settings).generate(prompts, greedy, ignore_eos=True)
    assert [completion.tokens for completion in found] == expected


def test_a_large_model_keeps_one_form_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (
        open_model(bare_model(tmp_path, WIDE), "dummy").load(64, torch.device("cpu"), torch.float32) for _ in range(2)
    )
    assert isinstance(small, Decoder)
    assert isinstance(large, Decoder)
    small.pack(keep_head=False)
    monkeypatch.setattr("engine.models.cpu_weights.MAX_BOTH_FORMS_BYTES", 1000)
    large.pack(keep_head=False)
    assert small.layer_list[0].mlp.down.row_weight is not None
    assert large.layer_list[0].mlp.down.row_weight is None
    assert large.layer_list[0].mlp.down.packed is not None
