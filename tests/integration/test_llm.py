"""LLM: arguments and results, and that nothing of a call stays in the engine."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.engine
import engine.kv.tiers.host_copier
import engine.loop
from common.errors import ConfigError, InvalidRequest
from common.model.directory import smollm2_dir as known_dir
from common.types import FinishReason, SamplingParams
from engine.llm import LLM
from engine.loop import EngineLoop
from tests.rigs.engine.bare_model import LLAMA, bare_model

torch.set_num_threads(1)
README = Path(__file__).parents[2] / "README.md"
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path) -> LLM:
    return LLM(smollm2_dir, kv_memory=64 << 20, max_model_len=256, threads=1)


SETTINGS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_blocks": 32, "block_size": 4, "threads": 1}
SMALL = LLAMA | {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "max_position_embeddings": 128, "eos_token_id": 9}


@pytest.fixture
def tiny(tmp_path: Path) -> LLM:
    """Random weights, no tokenizer; only max_tokens ends an output."""
    return LLM(bare_model(tmp_path, SMALL), **SETTINGS)


def at_rest(llm: LLM) -> None:
    assert not llm.engine.has_work
    counts = llm.engine.pool.counts()
    assert counts.leased == counts.quarantined == 0
    llm.engine.pool.check_integrity()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_texts_and_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "The capital of France is"
    by_text, by_ids = llm.generate([text, list(llm.encode(text))], GREEDY)
    assert by_text.ids == by_ids.ids
    assert "Paris" in by_text.text
    assert by_text.text == by_ids.text
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    assert by_text.prompt_ids == by_ids.prompt_ids == llm.encode(text)
    assert llm.generate(text, GREEDY)[0].ids == by_text.ids
    at_rest(llm)


def test_a_conversation_goes_through_the_template_and_ends_by_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    answer, second = llm.chat([messages, [*messages, {"role": "assistant", "content": "Rome."}, messages[0]]], params)
    assert "Paris" in answer.text
    assert answer.finish is FinishReason.STOP
    assert answer.ids[-1] in llm.engine.eos_token_ids
    assert "<|im_end|>" not in answer.text
    assert answer.prompt is not None
    assert answer.prompt.startswith("<|im_start|>")
    assert second.prompt is not None
    assert "Rome." in second.prompt
    assert llm.chat(messages, params)[0].ids == answer.ids
    assert len(llm.chat(messages, params, ignore_eos=True)[0].ids) == 12


def test_the_example_of_the_readme_runs(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.read_text().split("The engine also runs without services")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    example = code[1].replace('LLM("Qwen/Qwen3-0.6B")', 'LLM("smollm2")')  # tests have no network
    assert example != code[1]
    assert smollm2_dir.resolve() == known_dir().resolve()
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(example, {})
    lines = out.getvalue()
    assert "The capital of France is ->  Paris" in lines
    assert "Token(index=0" in lines


def test_logprobs_cached_tokens_and_params_per_prompt(tiny: LLM) -> None:
    prompt = list(range(10, 30))
    each = [SamplingParams(temperature=0.0, max_tokens=3, logprobs=2), SamplingParams(seed=5, max_tokens=7)]
    first, second = tiny.generate([prompt, prompt[:7]], each, ignore_eos=True)
    assert [len(first.ids), len(second.ids)] == [3, 7]
    assert all(token.logprob is not None and len(token.top) == 2 for token in first.tokens)
    assert all(token.logprob is None for token in second.tokens)
    assert first.cached_tokens == 0
    again = tiny.generate([prompt], each[0], ignore_eos=True)[0]
    assert again.cached_tokens == 16
    assert again.ids == first.ids
    assert tiny.generate([prompt], each[0], ignore_eos=True, cache_salt="other")[0].cached_tokens == 0
    at_rest(tiny)


def test_the_model_s_stop_token_ends_it_unless_ignored(tiny: LLM) -> None:
    certain = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=((9, 100.0),))
    assert [c.ids for c in tiny.generate([[1, 2]], certain)] == [[9]]
    assert [c.ids for c in tiny.generate([[1, 2]], certain, ignore_eos=True)] == [[9, 9, 9, 9]]


def test_without_a_tokenizer_texts_are_refused_and_ids_are_not(tiny: LLM) -> None:
    with pytest.raises(ConfigError, match="pass prompts as token ids"):
        tiny.generate(["x"], GREEDY)
    done = tiny.generate([[1]], GREEDY)[0]
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        _ = done.text
    assert tiny.generate([]) == []


def test_a_prompt_that_can_never_run_runs_nothing(tiny: LLM) -> None:
    for bad in ([], [1] * 127, [64]):
        with pytest.raises(InvalidRequest):
            tiny.generate([[1, 2, 3], bad], GREEDY)
        at_rest(tiny)
    with pytest.raises(InvalidRequest, match="put the token ids of one prompt in a list"):
        tiny.generate([1, 2, 3], GREEDY)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="2 prompts but 1 params"):
        tiny.generate([[1], [2]], [GREEDY])
    assert tiny.engine.counters.decode_tokens == 0


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Ctrl-C while the call waits, after some steps."""

    def install() -> None:
        original: Any = threading.Event.wait

        def wait(self: threading.Event, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread() and timeout == 1.0:
                original(self, 0.05)
                raise KeyboardInterrupt
            return bool(original(self, timeout))

        monkeypatch.setattr(threading.Event, "wait", wait)

    yield install
    monkeypatch.undo()


def test_an_interrupted_call_leaves_no_sequence_in_the_engine(
    tiny: LLM, interrupted: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted()
    with pytest.raises(KeyboardInterrupt):
        tiny.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=100), ignore_eos=True)
    monkeypatch.undo()
    at_rest(tiny)
    assert len(tiny.generate([[1, 2, 3]], GREEDY, ignore_eos=True)[0].ids) == 5


def test_calls_of_several_threads_take_turns(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[bool] = []
    original = EngineLoop.start

    def start(self: EngineLoop) -> None:
        at_once.append(any(thread.name == "engine" for thread in threading.enumerate()))
        original(self)

    monkeypatch.setattr(EngineLoop, "start", start)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: tiny.generate([[1, 2, 3]], params, ignore_eos=True)[0].ids, range(4)))
    assert done == [done[0]] * 4
    assert at_once == [False] * 4
    at_rest(tiny)


def test_every_thread_that_computes_is_on_the_engine_s_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches kernels on the current device of the calling thread."""
    seen: set[tuple[str, torch.device]] = set()
    for module in (engine.engine, engine.loop, engine.kv.tiers.host_copier):
        monkeypatch.setattr(module, "make_current", lambda device: seen.add((threading.current_thread().name, device)))
    llm = LLM(bare_model(tmp_path, SMALL), **SETTINGS, host_cache=1 << 20)
    llm.generate([[1]], GREEDY)
    llm.engine.close()
    here = threading.current_thread().name
    assert seen == {(name, torch.device("cpu")) for name in (here, "engine", "host-tier")}


def test_generate_runs_the_loop_of_the_pods(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineLoop] = []
    original = EngineLoop.start
    monkeypatch.setattr(EngineLoop, "start", lambda self: (started.append(self), original(self))[1])
    tiny.generate([[1]], GREEDY)
    assert len(started) == 1


def test_a_length_beyond_the_model_is_refused_and_beyond_the_pool_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 129 is more than the 128 tokens that the model supports"):
        LLM(bare_model(tmp_path, SMALL), **SETTINGS, max_model_len=129)
    assert LLM(bare_model(tmp_path, SMALL), **SETTINGS, max_model_len=128).engine.max_model_len == 128
    assert "max_model_len" not in caplog.text
    assert (
        LLM(bare_model(tmp_path, SMALL), **{**SETTINGS, "num_blocks": 16}, max_model_len=100).engine.max_model_len == 64
    )
    assert "max_model_len is 100, but the KV pool has room for 64 tokens" in caplog.text
    assert "raise num_blocks" in caplog.text
    caplog.clear()
    assert LLM(bare_model(tmp_path, SMALL), **{**SETTINGS, "num_blocks": 16}).engine.max_model_len == 64
    assert "max_model_len" not in caplog.text


def test_default_params_are_those_of_the_models_file(tmp_path: Path) -> None:
    own = {"temperature": 0.5, "top_k": 5, "max_new_tokens": 3}
    (bare_model(tmp_path, SMALL) / "generation_config.json").write_text(json.dumps({**own, "eos_token_id": [7]}))
    llm = LLM(tmp_path, **SETTINGS)
    assert llm.engine.eos_token_ids == (7, 9)
    assert llm.default_params() == SamplingParams(temperature=0.5, top_k=5, max_tokens=3)
    assert llm.default_params(temperature=1.0, max_tokens=9) == SamplingParams(temperature=1.0, top_k=5, max_tokens=9)
    assert len(llm.generate([[1]], llm.default_params(seed=1), ignore_eos=True)[0].ids) == 3


def test_known_names_and_unknown_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        LLM("no-such-model")
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        LLM(tmp_path)
