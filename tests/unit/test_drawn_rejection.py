"""Rejection sampling of drafts, from drawing them to verifying them: for SmolLM2 with a draft model or a look-up, and
for whole engines with every proposer.

The output has the distribution of the target, the share of accepted drafts equals the overlap of the distributions of
target and draft, and the same test fails with a broken rule.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.support.shapes import SMOLLM2_LAYERS, without_layers
from common.types import SamplingParams
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.kv.kv_pool import LayerKV
from engine.llm import LLM
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.loader import open_model
from engine.sampling.sampler import Sampled, SampleRow, sample, token_probs
from engine.schedule.sequence import DraftTokens
from engine.speculation import acceptance
from engine.speculation.acceptance import accepted_tokens, rejection_sample
from engine.speculation.controller import AlwaysDraft
from engine.speculation.draft_loop import draw_drafts
from engine.step import step_sampler
from tests.rigs.engine.comparisons import chi_square_p
from tests.rigs.engine.draft_models import draft_settings, tiny_target

pytestmark = pytest.mark.long  # test_rejection.py tests the rule itself

DRAWS, AT_ONCE = 20_000, 1_000
KNOWN = 192  # most likely tokens of target and draft; the others are left out
PROMPT = [504, 1592, 5354, 282, 253, 1165, 2837, 314]  # "The best part of a good ... is"
SAMPLING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.8,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
}


def params(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**(SAMPLING | {"seed": seed} | more))


@torch.inference_mode()
def last_logits(directory: Path, prompts: list[list[int]]) -> Tensor:
    """float32 [prompts, vocab], logits after each prompt; the prompts have one length."""
    source = open_model(directory)
    model = source.load(64, torch.device("cpu"), torch.float32)
    assert isinstance(model, Decoder)
    spec, (count, length) = model.spec, (len(prompts), len(prompts[0]))
    cache = [
        LayerKV(torch.zeros(count + 1, 2, spec.num_kv_heads, length, spec.head_dim)) for _ in range(spec.num_layers)
    ]
    backend = TorchAttention(cache, spec.num_heads, spec.windows, count)
    metadata = backend.prepare(StepShape([0] * count, [length] * count, [[row] for row in range(count)]))
    positions = torch.arange(length).repeat(count)
    ends = torch.arange(1, count + 1) * length - 1
    context = ForwardContext(cache, backend, metadata)
    return model.logits(model.forward(torch.tensor(prompts).flatten(), positions, context, ends))


class Pair:
    """Logits of SmolLM2 and of SmolLM2 without layers 12 and 18, after PROMPT and after PROMPT and one more token.

    Tokens are indices into `ids`, 0 ... KNOWN - 1.
    """

    def __init__(self, target_dir: Path, draft_dir: Path) -> None:
        torch.set_num_threads(1)
        firsts = [last_logits(directory, [PROMPT])[0] for directory in (target_dir, draft_dir)]
        likely = torch.stack(firsts).softmax(-1).sum(0).topk(KNOWN).indices
        self.ids = likely
        row = SampleRow(params(0), [], 0)
        reach = [int(t) for t in sum(token_probs(first[likely][None], [row])[0] for first in firsts).nonzero()]
        self.second = {}
        seconds = [
            last_logits(directory, [[*PROMPT, int(likely[t])] for t in reach]) for directory in (target_dir, draft_dir)
        ]
        self.firsts = [first[likely] for first in firsts]
        for place, token in enumerate(reach):
            self.second[token] = [second[place][likely] for second in seconds]

    def logits(self, model: int, context: tuple[int, ...]) -> Tensor:
        """float32 [KNOWN] of target (0) or draft (1)."""
        return self.firsts[model] if not context else self.second[context[0]][model]


@pytest.fixture(scope="module")
def pair(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    draft_dir = without_layers(smollm2_dir, tmp_path_factory.mktemp("pair") / "draft", SMOLLM2_LAYERS)
    return Pair(smollm2_dir, draft_dir)


def looked_up(pair: Pair, context: tuple[int, ...]) -> int:
    """The draft of a look-up, which depends on the tokens before it only: here the second choice of the target."""
    row = SampleRow(params(0), [], 0, drafts=context)
    return int(token_probs(pair.logits(0, context)[None], [row])[0].topk(2).indices[1])


def run(pair: Pair, draws: int, *, drawn: bool) -> tuple[Counter[tuple[int, int]], float, int]:
    """Counts of the first two tokens, the share of accepted first drafts, and the number of accepted drafts.

    drawn: drafts are drawn from the draft model; False: drafts of a look-up.
    """
    counts: Counter[tuple[int, int]] = Counter()
    right = accepted = 0
    for begin in range(0, draws, AT_ONCE):
        seeds = range(begin, begin + AT_ONCE)
        context: list[tuple[int, ...]] = [()] * AT_ONCE
        probs: list[Tensor] = []
        if not drawn:
            first = looked_up(pair, ())
            context = [(first, looked_up(pair, (first,)))] * AT_ONCE
        for _ in range(2 if drawn else 0):
            rows = [SampleRow(params(s), [], 0, drafts=d) for s, d in zip(seeds, context, strict=True)]
            tokens, finite, chances = draw_drafts(
                torch.stack([pair.logits(1, d) for d in context]), rows, rejection=True
            )
            assert chances is not None
            assert bool(finite.all())
            probs.append(chances)
            context = [(*d, int(t)) for d, t in zip(context, tokens, strict=True)]
        drawn_from = torch.stack(probs, dim=1) if drawn else [None] * AT_ONCE
        chains = [DraftTokens(d, p) for d, p in zip(context, drawn_from, strict=True)]
        rows = [
            SampleRow(params(s), [], 0, drafts=d[:n]) for s, d in zip(seeds, context, strict=True) for n in range(3)
        ]
        # The token after the second draft is not used.
        raw = torch.stack([pair.logits(0, d[:n]) for d in context for n in (0, 1, 1)])
        sampled = rejection_sample(raw, rows, chains).tokens.tolist()
        rejected: list[tuple[int, int]] = []
        for row, (seed, draft) in enumerate(zip(seeds, context, strict=True)):
            accepted_run = accepted_tokens(draft, sampled[3 * row : 3 * row + 3])
            right, accepted = right + (len(accepted_run) > 1), accepted + len(accepted_run) - 1
            if len(accepted_run) == 1:
                rejected.append((seed, accepted_run[0]))
            else:
                counts[accepted_run[0], accepted_run[1]] += 1
        if not rejected:  # a broken rule accepts all drafts
            continue
        raw = torch.stack([pair.logits(0, (token,)) for _, token in rejected])
        seconds = sample(raw, [SampleRow(params(s), [t], 0) for s, t in rejected]).tokens.tolist()
        counts.update((token, second) for (_, token), second in zip(rejected, seconds, strict=True))
    return counts, right / draws, accepted


def expected(pair: Pair, *, drawn: bool) -> tuple[dict[tuple[int, int], float], float]:
    """Probability of each pair, and the overlap of target and draft distribution for the first token."""
    first, guess = (token_probs(pair.logits(m, ())[None], [SampleRow(params(0), [], 0)])[0] for m in (0, 1))
    if not drawn:
        guess = torch.zeros(KNOWN).index_fill_(0, torch.tensor(looked_up(pair, ())), 1.0)
    chances = {}
    for token in first.nonzero().flatten().tolist():
        row = SampleRow(params(0), [], 0, drafts=(token,))
        second = token_probs(pair.logits(0, (token,))[None], [row])[0]
        chances |= {(token, t): float(first[token] * second[t]) for t in second.nonzero().flatten().tolist()}
    return chances, float(torch.minimum(first, guess).sum())


@pytest.mark.parametrize("drawn", [True, False])
def test_first_tokens_of_smollm2_have_the_target_distribution(drawn: bool, pair: Pair) -> None:
    counts, right, accepted = run(pair, DRAWS, drawn=drawn)
    chances, overlap = expected(pair, drawn=drawn)
    assert sum(counts.values()) == DRAWS
    assert set(counts) <= set(chances), "a token outside top-p"
    assert chi_square_p(counts, chances) > 0.01
    assert 0 < accepted < 2 * DRAWS
    assert right == pytest.approx(overlap, abs=0.02)
    assert len([c for c in chances.values() if c * DRAWS >= 8]) > 30, "enough cells to tell distributions apart"


BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "always accepts": ("uniform", lambda seed, child, position, stream: torch.zeros(len(seed))),
    "ignores q": ("_draft_probs", lambda chain, like: torch.ones(len(chain.tokens), like.shape[1])),
    "replaces from p": ("_residual", lambda target, proposed: target),
}


@pytest.mark.parametrize(
    ("broken", "drawn"), [*((broken, True) for broken in BROKEN), ("always accepts", False), ("replaces from p", False)]
)
def test_a_broken_rule_fails_the_distribution_test(
    broken: str, drawn: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, *BROKEN[broken])
    counts, _, _ = run(pair, DRAWS // 5, drawn=drawn)
    assert chi_square_p(counts, expected(pair, drawn=drawn)[0]) < 1e-6


# -- whole engines ----------------------------------------------------------------------------------------------------

VOCAB, OUTPUT = 12, 3
ALLOWED, STOPS = tuple(range(1, VOCAB)), (4, 7, 9)
REPEATS = [3, 4, 3, 5, 3, 6, 3, 7, 3, 8, 3, 9, 3, 10, 3]  # any next token has probably followed a 3 before


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("tiny"), vocab=VOCAB, length=32, scale=0.2)


@pytest.fixture(scope="module")
def drafting(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return draft_settings(tiny_dir, tmp_path_factory.mktemp("drafts"), vocab=VOCAB, noise=0.1)


def chances_of(tiny_dir: Path, **more: Any) -> dict[tuple[int, ...], float]:
    """Probability of each output of OUTPUT tokens, or of fewer if a stop token ends it."""
    own = params(0, **more)
    words = np.zeros(1, dtype=np.int32)
    for token in own.allowed_token_ids or range(VOCAB):
        words[0] |= 1 << token
    found: dict[tuple[int, ...], float] = {(): 1.0}
    ended: dict[tuple[int, ...], float] = {}
    for _ in range(OUTPUT):
        context = list(found)
        logits = last_logits(tiny_dir, [[*REPEATS, *tokens] for tokens in context])
        rows = [SampleRow(own, [*REPEATS, *tokens], len(REPEATS), allowed_mask=words) for tokens in context]
        longer = {
            (*tokens, token): found[tokens] * float(row[token])
            for tokens, row in zip(context, token_probs(logits, rows), strict=True)
            for token in row.nonzero().flatten().tolist()
        }
        ended |= {tokens: chance for tokens, chance in longer.items() if tokens[-1] in own.stop_token_ids}
        found = {tokens: chance for tokens, chance in longer.items() if tokens not in ended}
    return found | ended


@pytest.fixture(scope="module")
def chances(tiny_dir: Path) -> dict[tuple[int, ...], float]:
    return chances_of(tiny_dir)


class Overlap:
    """Wraps `rejection_sample` and counts accepted first drafts and their expected number."""

    def __init__(self) -> None:
        self.chains, self.accepted, self.expected = 0, 0, 0.0

    def __call__(self, raw: Tensor, rows: Sequence[SampleRow], chains: Sequence[DraftTokens]) -> Sampled:
        sampled = rejection_sample(raw, rows, chains)
        ends = list(itertools.accumulate(len(chain.tokens) + 1 for chain in chains))
        tested = [(end - len(c.tokens) - 1, c) for end, c in zip(ends, chains, strict=True) if c.tokens]
        target = token_probs(raw[[at for at, _ in tested]], [rows[at] for at, _ in tested])
        for (at, chain), chance in zip(tested, target, strict=True):
            draft = chain.tokens[0]
            self.expected += float(
                chance[draft] if chain.probs is None else torch.minimum(chance, chain.probs[0]).sum()
            )
            self.accepted += int(sampled.tokens[at]) == draft
        self.chains += len(tested)
        return sampled


def outputs(
    tiny_dir: Path, settings: dict[str, Any], requests: int, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> tuple[Counter[tuple[int, ...]], Overlap]:
    """Counts of the outputs of an engine that always drafts."""
    llm = LLM(
        tiny_dir,
        **settings,
        speculation_tokens=2,
        speculation_accept="rejection",
        block_size=4,
        num_blocks=4096,
        chunk_tokens=1024,
        max_seqs=256,
        threads=1,
    )
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(2))
    overlap = Overlap()
    monkeypatch.setattr(step_sampler, "rejection_sample", overlap)
    # The last token of a request is never drafted.
    sampling = [params(seed, max_tokens=OUTPUT + 1, **more) for seed in range(requests)]
    answers = llm.generate([REPEATS] * requests, sampling, ignore_eos=True, show_progress=False)
    assert llm.engine.speculator is not None
    stats = llm.engine.speculator.stats
    assert 0 < stats.accepted < stats.proposed
    assert stats.failures == 0
    return Counter(tuple(answer.ids[:OUTPUT]) for answer in answers), overlap


@pytest.mark.parametrize("kind", ["ngram", "suffix", "draft_model", "eagle", "eagle3"])
def test_engine_outputs_have_the_target_distribution(
    kind: str,
    tiny_dir: Path,
    drafting: dict[str, dict[str, Any]],
    chances: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20,000 tokens of requests with OUTPUT tokens each. A broken rule does not pass."""
    counts, overlap = outputs(tiny_dir, drafting[kind], -(-DRAWS // OUTPUT), monkeypatch)
    assert set(counts) <= set(chances), "a token outside top-p"
    assert chi_square_p(counts, chances) > 0.01
    assert overlap.chains > 4000
    assert overlap.accepted / overlap.chains == pytest.approx(overlap.expected / overlap.chains, abs=0.02)
    monkeypatch.setattr(acceptance, *BROKEN["always accepts"])
    counts, _ = outputs(tiny_dir, drafting[kind], 1000, monkeypatch)
    assert chi_square_p(counts, chances) < 1e-6


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle3"])
def test_drafted_stop_tokens_are_verified_like_any_draft(
    kind: str, tiny_dir: Path, drafting: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a constraint, which trims drafts. Without drafted stop tokens, outputs would end too rarely."""
    more = {"allowed_token_ids": ALLOWED, "stop_token_ids": STOPS}
    chances = chances_of(tiny_dir, **more)
    ending = sum(chance for tokens, chance in chances.items() if 1 < len(tokens) < OUTPUT)
    assert 0.1 < ending < 0.9, "drafts matter for the end"
    counts, overlap = outputs(tiny_dir, drafting[kind], -(-DRAWS // OUTPUT), monkeypatch, **more)
    assert set(counts) <= set(chances)
    assert chi_square_p(counts, chances) > 0.01
    assert overlap.accepted / overlap.chains == pytest.approx(overlap.expected / overlap.chains, abs=0.02)
