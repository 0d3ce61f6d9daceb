"""Static steps with the device sampler and overlap give the tokens of plain CPU steps.

On a GPU the steps are CUDA graphs. The load has all kinds of sampling, prompts in chunks, preemptions and prefix hits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from common.kv_groups import split_layers
from common.kv_layout import KVLayout
from common.types import FinishReason, SamplingParams, Token, ValidRequest
from engine.attention.grouped import make_attention
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.cuda_graphs import batch_buckets
from engine.kernels.decode_inputs import DecodeInputs, blocks_touched, decode_inputs, packed_width
from engine.kv.blocks import BlockPool
from engine.kv.groups.grouped_blocks import make_block_pool
from engine.kv.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec, parse_spec
from engine.sampling.device_sampler import DeviceSampler
from engine.schedule.limits import SchedulerConfig
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import BlockTables, Sequence
from engine.schedule.stepper import Stepper
from engine.speculation.controller import AlwaysDraft
from engine.speculation.draft_loop import ModelProposer
from engine.speculation.draft_model import AttentionClass, BuildDraftModel
from engine.speculation.speculator import Speculator
from engine.step.prompt_step import PromptBucket
from engine.step.runner import ModelRunner
from tests.rigs.engine.known_answer_proposer import Guesses

VOCAB, BLOCK, SEQS, LIMIT, DRAFTS = 48, 4, 4, 32, 3
SPEC = parse_spec(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
)


def weights(spec: ModelSpec) -> list[torch.Tensor]:
    model = Decoder(spec, 64, torch.device("cpu"), torch.float32, fused=False)
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(p.shape, generator=generator) * 0.3 + (p.ndim == 1) for p in model.parameters()]


class Rig:
    """A stepper with scheduler, pool, runner and a small random model."""

    def __init__(
        self,
        device: torch.device,
        *,
        fused: bool,
        overlap: bool,
        graphs: bool = False,
        blocks: int = 60,
        budget: int = 12,
        guesses: Guesses | None = None,
        draft: Callable[[Decoder], tuple[dict[str, int], BuildDraftModel]] | None = None,
        spec: ModelSpec = SPEC,
    ):
        model = Decoder(spec, 64, device, torch.float32, fused=fused)
        for parameter, values in zip(model.parameters(), weights(spec), strict=True):
            parameter.copy_(values)
        draft_layout, make_draft = ({}, None) if draft is None else draft(model)
        layout = KVLayout(
            "m",
            "r",
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            BLOCK,
            "float32",
            groups=split_layers(spec.windows),
            **draft_layout,
        )
        kv = KVPool(layout, blocks, device)
        if fused:
            kv.data[:blocks] = 0xFF  # NaN until it is written
        attention: AttentionClass = TritonAttention if fused else TorchAttention
        backend = make_attention(
            layout, spec.windows, lambda windows: attention(kv.layers(), spec.num_heads, windows, kv.dummy_block)
        )
        self.runner = ModelRunner(
            model,
            kv,
            backend,
            max_seqs=SEQS,
            max_blocks=LIMIT // BLOCK + 1,
            max_step_tokens=budget,
            use_cuda_graphs=fused,
            sampler=DeviceSampler(SEQS, VOCAB, device, max_drafts=SEQS * DRAFTS) if fused else None,
            max_seq_drafts=DRAFTS,
            max_drafts=SEQS * DRAFTS,
            draft_model=None if make_draft is None else make_draft(kv, attention),
        )
        if graphs:
            self.runner.capture()
        self.pool = make_block_pool(layout, blocks, host_cache=0)
        self.scheduler = Scheduler(SchedulerConfig(chunk_tokens=budget, max_seqs=SEQS, max_model_len=LIMIT), self.pool)
        self.speculator = None if guesses is None else Speculator(guesses, AlwaysDraft(DRAFTS), max_seqs=SEQS)
        if self.runner.draft_loop is not None:
            proposer = ModelProposer(self.runner.draft_loop, self.scheduler.reserve_for_drafts)
            self.speculator = Speculator(proposer, AlwaysDraft(DRAFTS), max_seqs=SEQS)
        self.stepper = Stepper(
            self.scheduler,
            self.pool,
            self.runner,
            max_model_len=LIMIT,
            overlap=overlap,
            speculator=self.speculator,
            draft_model_lags=self.runner.draft_model_lags,
        )

    def add(self, name: str, ids: tuple[int, ...], params: SamplingParams) -> Sequence:
        seq = Sequence(ValidRequest(name, "m", ids, params), fingerprint="00" * 16, block_size=BLOCK)
        self.scheduler.add(seq)
        return seq

    def run(self) -> dict[str, list[Token]]:
        tokens: dict[str, list[Token]] = {}
        while self.stepper.has_work:
            for output in self.stepper.step().outputs:
                assert output.error is None
                tokens.setdefault(output.seq.request_id, []).extend(output.tokens)
        self.pool.check_integrity()
        assert self.pool.counts().leased == 0
        return tokens


def load() -> list[tuple[str, tuple[int, ...], SamplingParams]]:
    """Returns six requests for four slots. The first two have the same prompt, and some stop early."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
        {"temperature": 1.1, "top_k": 7, "logprobs": 0},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, VOCAB, 5))},
        {"temperature": 0.0, "logit_bias": ((5, 4.0),), "min_tokens": 3, "stop_token_ids": (5, 6, 7)},
    ]
    lengths = (9, 9, 1, 13, 3, 6)
    requests = []
    for i, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        ids = tuple((7 * j + 3 * max(i, 1)) % VOCAB for j in range(length))
        requests.append((f"r{i}", ids, SamplingParams(**({"max_tokens": 4 + i % 2, "seed": i} | kind))))
    return requests


@pytest.mark.parametrize("overlap", [False, True])
@torch.inference_mode()
def test_static_steps_give_the_tokens_of_plain_ones(overlap: bool, device: torch.device) -> None:
    if device.type == "cpu" and not overlap:
        pytest.skip("the interpreter is slow")
    plain, fused = (
        Rig(torch.device("cpu"), fused=False, overlap=False),
        Rig(device, fused=True, overlap=overlap, graphs=device.type == "cuda", blocks=24),
    )
    for rig in (plain, fused):
        for request in load():
            rig.add(*request)
    expected, got = plain.run(), fused.run()
    for name, tokens in expected.items():
        assert [t.id for t in got[name]] == [t.id for t in tokens], name
        assert [t.index for t in got[name]] == list(range(len(tokens)))
        for a, b in zip(got[name], tokens, strict=True):
            assert (a.logprob is None) == (b.logprob is None)
            assert a.logprob is None or a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [x.token for x in a.top] == [x.token for x in b.top]


@torch.inference_mode()
def test_steps_with_prompts_are_static(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few prompts alone, and chunks beside rows that decode; a prompt that begins with a cached prefix."""
    answers, buckets = [], list[PromptBucket]()
    for fused in (False, True):
        rig = Rig(device if fused else torch.device("cpu"), fused=fused, overlap=True, blocks=40)
        if (prompt_step := rig.runner.prompt_step) is not None:

            def run(bucket: PromptBucket, run: Callable[[PromptBucket], Any] = prompt_step.run) -> Any:
                buckets.append(bucket)
                return run(bucket)

            monkeypatch.setattr(prompt_step, "run", run)
            monkeypatch.setattr(rig.runner, "_forward", None)  # no step runs layer by layer
        params = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, max_tokens=5)
        tokens = list[dict[str, list[Token]]]()
        for names in ("a", "bcd"):
            for i, name in enumerate(names):
                rig.add(name, tuple((5 * j + 3 * (j > 12) * i) % VOCAB for j in range(14 + 3 * i)), params)
            tokens.append(rig.run())
        answers.append([{name: [t.id for t in ids] for name, ids in each.items()} for each in tokens])
    assert answers[0] == answers[1]
    assert {bucket.decodes for bucket in buckets} == {False, True}


@torch.inference_mode()
def test_a_preempted_sequence_continues_with_the_same_tokens(device: torch.device) -> None:
    params = SamplingParams(temperature=0.7, repetition_penalty=1.2, max_tokens=7)
    answers = []
    for fused in (False, True):
        rig = Rig(device if fused else torch.device("cpu"), fused=fused, overlap=True, blocks=5)
        for name in "ab":
            rig.add(name, (3, 1, 4, 1, 5, 9, ord(name) - 95), params)
        answers.append({name: [t.id for t in tokens] for name, tokens in rig.run().items()})
        assert rig.scheduler.stats().preemptions > 0
    assert answers[0] == answers[1]


@torch.inference_mode()
def test_a_row_with_nan_fails_alone(device: torch.device) -> None:
    rig = Rig(device, fused=True, overlap=True, graphs=device.type == "cuda")
    params = SamplingParams(temperature=0.0, max_tokens=5)
    seqs = [rig.add(name, tuple(range(3 + i, 8 + i)), params) for i, name in enumerate("ab")]
    while min(seq.num_output for seq in seqs) < 2:
        rig.stepper.step()
    lease = seqs[1].lease
    assert lease is not None
    rig.runner._kv.segment_view("kv")[lease.blocks[0], 0, 0, 0, 1] = float("nan")
    outputs = []
    while rig.stepper.has_work:
        outputs += rig.stepper.step().outputs
    assert [o.seq.request_id for o in outputs if o.error is not None] == ["b"]
    assert seqs[1].finish_reason is FinishReason.ERROR
    assert len(seqs[0].output) == 5
    rig.pool.check_integrity()


@pytest.mark.parametrize("budget", [12, 64])
@torch.inference_mode()
def test_drafts_change_no_token(budget: int, device: torch.device) -> None:
    """Right and wrong drafts, in static steps and in steps with prompt chunks, with penalties, stops and few blocks."""
    if device.type == "cpu" and budget == 64:
        pytest.skip("the interpreter is slow")
    plain = Rig(torch.device("cpu"), fused=False, overlap=False)
    for request in load():
        plain.add(*request)
    expected = plain.run()
    guesses = Guesses({name: [t.id for t in tokens] for name, tokens in expected.items()}, vocab=VOCAB)
    rig = Rig(device, fused=True, overlap=True, graphs=device.type == "cuda", blocks=24, budget=budget, guesses=guesses)
    for request in load():
        rig.add(*request)
    got = rig.run()
    for name, tokens in expected.items():
        assert [t.id for t in got[name]] == [t.id for t in tokens], name
        for a, b in zip(got[name], tokens, strict=True):
            assert a.logprob is None or a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert rig.speculator is not None
    assert 0 < rig.speculator.stats.accepted < rig.speculator.stats.proposed


@pytest.mark.parametrize(("query", "size"), [(1, 16), (1, 1), (5, 16), (5, 4), (8, 1), (4, 3)])
def test_blocks_touched_is_exact(query: int, size: int) -> None:
    most = max((start + query - 1) // size - start // size + 1 for start in range(3 * size))
    assert blocks_touched(query, size) == most


def test_decode_inputs(device: torch.device) -> None:
    """Tokens of rows, padding tokens, and block tables with leading blocks that are already on the device."""
    query, size, rows = 3, 4, 4
    packed = torch.zeros(rows, packed_width(query, size), dtype=torch.int32)
    #             slot start first new | tokens    | blocks
    for row, line in enumerate(([2, 7, 0, 3, 11, 12, -1, 8, 9], [0, 0, 3, 1, -1, 0, 0, 5, 0])):
        packed[row, : len(line)] = torch.tensor(line)
    packed[2:, 0] = 4
    packed[2:, 2] = 4
    tables = torch.full((5, 6), -7, dtype=torch.int32)
    tables[2, 0] = 3
    last = torch.tensor([21, 22, 23, 24, 25])
    out = DecodeInputs.empty(6, 24, 6, device).slice_for(rows, query)
    for tensor in (out.tokens, out.positions, out.slot_mapping, out.cu_q, out.seq_lens, out.tables):
        tensor.fill_(-99)
    slot_tables = tables.to(device)
    decode_inputs(packed.to(device), slot_tables, last.to(device), out, query=query, block_size=size)
    assert out.tokens.tolist() == [11, 12, 23, 21] + [0] * 8
    assert out.positions.tolist() == [7, 8, 9, 0] + [0] * 8
    assert out.slot_mapping.tolist() == [8 * 4 + 3, 9 * 4, 9 * 4 + 1, 5 * 4] + [-1] * 8
    assert out.cu_q.tolist() == [0, 3, 4, 4, 4]
    assert out.seq_lens.tolist() == [10, 1, 0, 0]
    assert out.row_slots.tolist() == [2, 0, 4, 4]
    assert out.token_slots.tolist() == [2, 2, 2, 0] + [4] * 8
    assert out.sample_positions.tolist() == [8, 9, 10, 1] + [0] * 8
    assert out.offsets.tolist() == [0, 1, 2, 0] + [0] * 8
    assert out.tables[0, :3].tolist() == [3, 8, 9]
    assert out.tables[1, 0].item() == 5
    assert slot_tables[2].tolist() == [3, 8, 9, -7, -7, -7]
    assert slot_tables[0].tolist() == [5, -7, -7, -7, -7, -7]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 63, 64, 65, 128, 200, 256, 300, 512])
def test_batch_buckets_pad_little(most: int) -> None:
    buckets = batch_buckets(most)
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    for rows in range(1, most + 1):
        bucket = next(size for size in buckets if size >= rows)
        assert bucket - rows < max(4, bucket // 8 + 8 if bucket < 64 else bucket // 4)
    assert 1 in buckets


def test_block_tables_follow_their_leases() -> None:
    pool = BlockPool(40, BLOCK)
    tables = BlockTables(2, 10)
    seqs = []
    for name in "ab":
        request = ValidRequest(name, "m", tuple(range(8)), SamplingParams())
        seq = Sequence(request, fingerprint="00" * 16, block_size=BLOCK, lease=pool.lease([], 2), computed=8)
        seq.slot = len(seqs)
        seqs.append(seq)
    for seq in seqs:
        assert seq.lease is not None
        assert tables.row(seq).tolist() == seq.lease.blocks
        tables.num_on_device[seq.slot] = 2
        seq.lease.grow(3)
        assert tables.row(seq).tolist() == seq.lease.blocks
        assert tables.num_on_device[seq.slot] == 2
    seqs[0].publish()
    seqs[1].publish()  # the same tokens: its blocks are replaced by those of the first sequence
    for seq, copied in zip(seqs, (2, 0), strict=True):
        assert seq.lease is not None
        assert tables.row(seq).tolist() == seq.lease.blocks
        assert tables.num_on_device[seq.slot] == copied
    seqs[0].slot, seqs[1].slot = 1, 0
    assert [tables.row(seq).tolist() for seq in seqs] == [seq.lease.blocks for seq in seqs if seq.lease]


def test_table_entries_on_the_device_are_invalid_after_trim() -> None:
    """Blocks for drafts are trimmed and leased by another request. The sequence then grows by other blocks."""
    pool = BlockPool(40, BLOCK)
    tables = BlockTables(1, 10)
    request = ValidRequest("a", "m", tuple(range(8)), SamplingParams())
    lease = pool.lease([], 2)
    seq = Sequence(request, fingerprint="00" * 16, block_size=BLOCK, lease=lease, computed=8)
    seq.slot = 0
    lease.grow(3)
    tables.row(seq)
    tables.num_on_device[0] = 3
    drafted = lease.blocks[2]
    lease.trim(2)
    pool.lease([], 30)
    lease.grow(3)
    assert lease.blocks[2] != drafted
    assert tables.row(seq).tolist() == lease.blocks
    assert tables.num_on_device[0] == 2
