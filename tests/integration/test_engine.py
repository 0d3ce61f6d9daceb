"""The engine on a CPU: against transformers, and against itself with other batches, chunks, caches and memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from common.errors import BatonError, ConfigError, InvalidRequest, Unavailable
from common.types import FinishReason, SamplingParams, ValidRequest
from engine.config import EngineConfig
from engine.engine import Engine
from engine.llm import LLM
from engine.loop import EngineLoop
from engine.schedule.outputs import StepResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
BLOCK, CHUNK, VOCAB = 4, 16, 160
WAIT_S = 30.0


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3: QK norm, grouped heads, untied embeddings."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(directory)
    return directory


def make(directory: Path, **config: Any) -> LLM:
    defaults: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 200, "chunk_tokens": CHUNK, "threads": 1}
    return LLM(directory, **(defaults | config))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def clean(engine: Engine) -> None:
    """Asserts that no block is in use and that the pool is consistent."""
    engine.pool.check_integrity()
    counts = engine.pool.counts()
    assert counts.leased == counts.quarantined == 0


@pytest.fixture
def llm(tiny_dir: Path) -> Iterator[LLM]:
    made = make(tiny_dir)
    yield made
    clean(made.engine)


def test_smollm2_equals_transformers(smollm2_dir: Path) -> None:
    text = torch.Generator().manual_seed(1)
    prompts = [torch.randint(100, 40000, (n,), generator=text).tolist() for n in (1, 17, 70)]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    llm = LLM(smollm2_dir, kv_memory=64 << 20, chunk_tokens=48, max_model_len=256, threads=1)
    got = llm.generate(prompts, params)
    clean(llm.engine)
    del llm
    reference: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    for ids, completion in zip(prompts, got, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + completion.ids])).logits[0, len(ids) - 1 : -1]
        best = logits.topk(2, dim=-1)
        for i, token in enumerate(completion.tokens):
            near_tie = float(best.values[i, 0] - best.values[i, 1]) < 1e-4
            assert token.id == int(best.indices[i, 0]) or near_tie
            assert token.logprob == pytest.approx(float(logits[i].log_softmax(-1)[token.id]), abs=1e-3)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 3])
def test_chunked_equals_unchunked_equals_cached(tiny_dir: Path, llm: LLM, length: int) -> None:
    whole = make(tiny_dir, chunk_tokens=256).generate([prompt(length)], GREEDY)[0]
    chunked = llm.generate([prompt(length)], GREEDY)[0]
    assert chunked.ids == whole.ids
    assert chunked.cached_tokens == 0
    before = llm.engine.counters.prompt_tokens
    again = llm.generate([prompt(length)], GREEDY)[0]
    assert again.ids == whole.ids
    assert again.cached_tokens == (length - 1) // BLOCK * BLOCK
    assert llm.engine.counters.prompt_tokens - before == length - again.cached_tokens
    for a, b in zip(again.tokens, whole.tokens, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_salts_do_not_share(llm: LLM) -> None:
    llm.generate([prompt(40)], GREEDY, cache_salt="a")
    assert llm.generate([prompt(40)], GREEDY, cache_salt="b")[0].cached_tokens == 0
    assert llm.generate([prompt(40)], GREEDY, cache_salt="a")[0].cached_tokens == 36


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """16 requests with different lengths and kinds of sampling."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 8, "min_p": 0.05, "logprobs": 1},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 0.0, "logit_bias": ((5, 3.0),), "min_tokens": 5, "stop_token_ids": tuple(range(3, 90))},
    ]
    prompts = [prompt(length, seed=length) for length in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 50, 64, 90)]
    return prompts, [SamplingParams(**({"max_tokens": 14, "seed": 7 * i} | kinds[i % 6])) for i in range(16)]


def test_batch_equals_one_at_a_time(tiny_dir: Path, llm: LLM) -> None:
    """Other requests, order and cache change no token, also with seeded sampling."""
    prompts, params = mixed()
    together = [c.ids for c in llm.generate(prompts, params)]
    alone = make(tiny_dir)
    assert [alone.generate([p], q)[0].ids for p, q in zip(prompts, params, strict=True)] == together
    assert [c.ids for c in llm.generate(prompts[::-1], params[::-1])][::-1] == together
    reseeded = [replace(q, seed=q.seed + 1) for q in params]
    assert [c.ids for c in llm.generate(prompts, reseeded)] != together


def test_preemption_changes_nothing(tiny_dir: Path, llm: LLM) -> None:
    prompts, params = mixed()
    expected = [c.ids for c in llm.generate(prompts, params)]
    small = make(tiny_dir, num_blocks=29)
    assert [c.ids for c in small.generate(prompts, params)] == expected
    assert small.engine.scheduler.stats().preemptions > 0
    assert small.engine.counters.recomputed_tokens > 0
    clean(small.engine)


@pytest.mark.parametrize("blocks", [200, 29])
def test_overlap_changes_nothing(tiny_dir: Path, llm: LLM, blocks: int) -> None:
    """Tokens and log-probabilities are equal, also with sampling, stop tokens and preemptions."""
    prompts, params = mixed()
    params[3] = replace(params[3], stop_token_ids=tuple(range(0, VOCAB, 3)))
    expected = llm.generate(prompts, params, ignore_eos=True)
    ahead = make(tiny_dir, overlap=True, num_blocks=blocks)
    got = ahead.generate(prompts, params, ignore_eos=True)
    assert [c.ids for c in got] == [c.ids for c in expected]
    assert [c.finish for c in got] == [c.finish for c in expected]
    for a, b in zip(got, expected, strict=True):
        assert [t.logprob for t in a.tokens] == pytest.approx([t.logprob for t in b.tokens], abs=1e-4)
    assert ahead.engine.counters.discarded_sequences > 0
    assert (ahead.engine.scheduler.stats().preemptions > 0) == (blocks == 29)
    clean(ahead.engine)


def test_stop_length_and_context_limit(tiny_dir: Path, llm: LLM) -> None:
    ids = llm.generate([prompt(9)], GREEDY)[0].ids
    stop = llm.generate([prompt(9)], replace(GREEDY, stop_token_ids=(ids[4],)))[0]
    assert (stop.ids, stop.finish) == (ids[: ids.index(ids[4]) + 1], FinishReason.STOP)
    one = llm.generate([prompt(9)], replace(GREEDY, max_tokens=1))[0]
    assert (one.ids, one.finish) == (ids[:1], FinishReason.LENGTH)
    first_is_stop = llm.generate([prompt(9)], replace(GREEDY, max_tokens=1, stop_token_ids=(ids[0],)))[0]
    assert first_is_stop.finish is FinishReason.STOP
    limited = make(tiny_dir, max_model_len=21)
    assert limited.generate([prompt(9)], GREEDY)[0].ids == ids
    for length, field in ((10, "max_tokens"), (21, "prompt")):
        with pytest.raises(InvalidRequest) as refused:
            limited.generate([prompt(length)], GREEDY)
        assert refused.value.field == field
    clean(limited.engine)


@pytest.mark.parametrize(
    ("ids", "change", "field"),
    [
        ([5, VOCAB], {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ([], {}, "prompt"),
        ([5], {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ([5], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(llm: LLM, ids: list[int], change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([prompt(5), ids], replace(GREEDY, **change))
    assert refused.value.field == field
    assert not llm.engine.has_work


def request(name: str, ids: list[int], params: SamplingParams = GREEDY) -> ValidRequest:
    return ValidRequest(name, "tiny", tuple(ids), params)


def test_nan_in_kv_fails_only_its_sequence_and_does_not_spread(llm: LLM) -> None:
    expected = llm.generate([prompt(10, 1), prompt(10, 2)], GREEDY)
    llm.engine.pool.reset_prefix_cache()
    seqs = [llm.engine.new_sequence(request(f"r{i}", prompt(10, i))) for i in (1, 2)]
    for seq in seqs:
        llm.engine.add(seq)
    outputs = [o for _ in range(3) for o in llm.engine.step().outputs]
    assert seqs[0].lease is not None
    llm.engine.kv.segment_view("kv")[seqs[0].lease.blocks[0], 0, 0, 0, 1] = float("nan")
    while llm.engine.has_work:
        outputs += llm.engine.step().outputs
    bad = [o for o in outputs if o.error is not None]
    assert [o.seq.request_id for o in bad] == ["r1"]
    assert bad[0].finish_reason is FinishReason.ERROR
    assert seqs[1].output == expected[1].ids
    assert llm.engine.counters.failed_sequences == 1
    # The NaN is only in a cached block of that prompt; the block is clean when it is used again.
    llm.engine.pool.reset_prefix_cache()
    assert llm.generate([prompt(10, 1)], GREEDY)[0].ids == expected[0].ids


def test_unwritten_slots_of_a_reused_block_do_not_leak(llm: LLM) -> None:
    expected = llm.generate([prompt(6)], GREEDY)[0].ids
    llm.engine.pool.reset_prefix_cache()
    llm.engine.kv.segment_view("kv")[: llm.engine.kv.num_blocks] = float("nan")
    assert llm.generate([prompt(6)], GREEDY)[0].ids == expected


def test_hand_off_between_two_engines(tiny_dir: Path, llm: LLM) -> None:
    """The first engine computes the prompt, its blocks are copied, and the second continues without prompt tokens."""
    ids = prompt(3 * CHUNK + 2)
    expected = llm.generate([ids], GREEDY)[0].ids
    prefill, decode = make(tiny_dir).engine, make(tiny_dir).engine
    assert prefill.layout.fingerprint == decode.layout.fingerprint
    lease = decode.pool.lease([], decode.layout.blocks_for(len(ids)) + 1)
    assert lease is not None
    seq = prefill.new_sequence(request("r", ids), hand_off=True)
    prefill.add(seq)
    copied: list[int] = []
    ends: list[StepResult] = []

    def push(result: StepResult) -> None:
        (output,) = result.outputs
        assert output.chunk_done
        assert seq.lease is not None
        assert not seq.lease.finished
        full = len(ids) if output.handed_off else output.computed // BLOCK * BLOCK
        for block in range(len(copied), prefill.layout.blocks_for(full)):
            decode.kv.write_block(lease.blocks[block], prefill.kv.read_block(seq.lease.blocks[block]))
            copied.append(block)
        ends.append(result)

    while prefill.has_work:
        prefill.step(push)
    assert len(ends) == 4
    assert ends[-1].outputs[0].handed_off
    assert ends[-1].outputs[0].finish_reason is None
    clean(prefill)
    first = ends[-1].outputs[0].tokens[0]
    moved = decode.new_sequence(request("r", ids), lease=lease, computed=len(ids), output=[first.id])
    decode.add(moved)
    indices: list[int] = []
    while decode.has_work:
        indices += [t.index for o in decode.step().outputs for t in o.tokens]
    assert moved.output == expected
    assert indices == list(range(1, 12))
    assert decode.counters.prompt_tokens == decode.counters.recomputed_tokens == 0
    clean(decode)


class Recorder:
    """Collects the outputs of each request and signals their ends."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.changed = threading.Condition()

    def __call__(self, result: StepResult) -> None:
        with self.changed:
            for output in result.outputs:
                name = output.seq.request_id
                self.tokens.setdefault(name, []).extend(t.id for t in output.tokens)
                if output.finish_reason is not None:
                    assert name not in self.finish
                    self.finish[name] = output.finish_reason
            self.changed.notify_all()

    def wait(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(n in self.finish for n in names), WAIT_S)


def refused(error: BatonError) -> None:
    raise AssertionError(error)


def test_the_loop_adds_aborts_pauses_and_refuses(llm: LLM) -> None:
    expected = llm.generate([prompt(20)], GREEDY)[0].ids
    recorder, engine = Recorder(), llm.engine
    loop = EngineLoop(engine, recorder)
    loop.start()
    loop.add(engine.new_sequence(request("a", prompt(20))), refused)
    recorder.wait("a")
    assert recorder.tokens["a"] == expected
    # Abort: exactly one end; an abort after the end does nothing.
    endless = SamplingParams(temperature=0.0, max_tokens=200)
    loop.add(engine.new_sequence(request("b", prompt(20), endless)), refused)
    loop.abort("b")
    loop.abort("b")
    loop.abort("a")
    recorder.wait("b")
    assert recorder.finish["b"] is FinishReason.ABORT
    # Paused: no tokens until it is resumed.
    loop.call(lambda: None).result(WAIT_S)
    loop.add(engine.new_sequence(request("c", prompt(20))), refused)
    loop.set_paused(["c", "unknown"], True)
    held = loop.call(lambda: len(recorder.tokens.get("c", []))).result(WAIT_S)
    for _ in range(3):
        assert loop.call(lambda: len(recorder.tokens.get("c", []))).result(WAIT_S) == held
    loop.set_paused(["c"], False)
    recorder.wait("c")
    assert recorder.tokens["c"] == expected
    # Refused: on_refused is called.
    errors: list[BatonError] = []
    loop.add(engine.new_sequence(request("d", [])), errors.append)
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0).result(WAIT_S)
    assert isinstance(errors[0], InvalidRequest)
    # Stop: running sequences are aborted and reported, later ones are refused.
    loop.add(engine.new_sequence(request("e", prompt(20), endless)), refused)
    loop.call(lambda: None).result(WAIT_S)
    loop.stop(WAIT_S)
    assert recorder.finish["e"] is FinishReason.ABORT
    loop.add(engine.new_sequence(request("f", prompt(5))), errors.append)
    assert isinstance(errors[1], Unavailable)
    with pytest.raises(Unavailable):
        loop.call(lambda: None).result(WAIT_S)


def test_a_failing_step_and_a_failing_on_step_do_not_end_the_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate([prompt(20)], GREEDY)[0].ids
    recorder, engine = Recorder(), llm.engine
    failures = iter(["on_step"])

    def on_step(result: StepResult) -> None:
        recorder(result)
        if next(failures, None):
            raise RuntimeError("on_step broke")

    loop = EngineLoop(engine, on_step)
    launch = engine.runner.launch
    broken = threading.Event()

    def launch_or_fail(items: Any, *more: Any) -> Any:
        if any(item.seq.request_id == "bad" for item in items) and not broken.is_set():
            broken.set()
            raise RuntimeError("the device broke")
        return launch(items, *more)

    monkeypatch.setattr(engine.runner, "launch", launch_or_fail)
    loop.start()
    try:
        loop.add(engine.new_sequence(request("bad", prompt(20))), refused)
        recorder.wait("bad")
        assert recorder.finish["bad"] is FinishReason.ERROR
        loop.add(engine.new_sequence(request("good", prompt(20))), refused)
        recorder.wait("good")
        assert recorder.tokens["good"] == expected
    finally:
        loop.stop(WAIT_S)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:63"}, "device"),
        ({"dtype": "float8"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"kv_memory": 100}, "kv_memory"),
        ({"kv_memory": 1 << 20, "num_blocks": 7}, "num_blocks"),
        ({"threads": -1}, "threads"),
        ({"chunk_tokens": -1}, "chunk_tokens"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization"),
        ({"speculation": "medusa"}, "speculation"),
        ({"speculation_accept": "always"}, "speculation_accept"),
        ({"speculation_tokens": 0}, "speculation_tokens"),
        ({"speculation_tokens": 8}, "speculation_tokens"),
        ({"model_dir": Path("/nonexistent")}, "model"),
    ],
)
def test_wrong_configuration_names_the_field(tiny_dir: Path, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Engine(EngineConfig(**({"model_dir": tiny_dir} | change)))
    assert refusal.value.field == field


def test_constraints_hold_with_overlap_and_preemptions(tiny_dir: Path, llm: LLM) -> None:
    """Deferred sampling gives the tokens of an engine without overlap, also for other requests in the batch."""
    prompts = [prompt(20, i) for i in range(8)]
    each = [
        SamplingParams(
            temperature=float(i % 2),
            seed=i,
            max_tokens=12,
            logprobs=1,
            frequency_penalty=0.4 * (i % 3),
            allowed_token_ids=tuple(range(3, 40)) if i % 4 == 0 else (),
            bad_words=((5,), (7, 8), *((t, u) for t in range(3, 40) for u in range(10, 20))) if i % 4 < 2 else (),
        )
        for i in range(8)
    ]
    waits = llm.generate(prompts, each, ignore_eos=True, show_progress=False)
    ahead = make(tiny_dir, overlap=True, num_blocks=30)
    found = ahead.generate(prompts, each, ignore_eos=True, show_progress=False)
    assert [c.ids for c in found] == [c.ids for c in waits]
    for a, b in zip(found, waits, strict=True):
        assert [t.logprob for t in a.tokens] == pytest.approx([t.logprob for t in b.tokens], abs=1e-4)
    assert ahead.engine.scheduler.stats().preemptions > 0
    for i, completion in enumerate(found):
        said = [*prompts[i], *completion.ids]
        assert len(completion.ids) == 12
        if i % 4 == 0:
            assert set(completion.ids) <= set(range(3, 40))
        if i % 4 < 2:
            assert 5 not in completion.ids
            assert not any(3 <= t < 40 and 10 <= u < 20 for t, u in itertools.pairwise(said[len(prompts[i]) - 1 :]))
    clean(ahead.engine)


def test_a_request_without_any_allowed_token_fails_alone(llm: LLM) -> None:
    nothing = SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=(9,), bad_words=((9, 9),))
    stuck, fine = llm.generate(
        [prompt(6, 1), prompt(6, 2)], [nothing, SamplingParams(temperature=0.0, max_tokens=4)], show_progress=False
    )
    assert stuck.finish is FinishReason.ERROR
    assert isinstance(stuck.error, InvalidRequest)
    assert len(fine.ids) == 4
    clean(llm.engine)
