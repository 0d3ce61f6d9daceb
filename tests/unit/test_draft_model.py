"""The drafts of a separate draft model equal those that the model computes from the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.types import SamplingParams
from engine.engine import Engine
from engine.llm import LLM
from engine.sampling.sampler import SampleRow, sample
from engine.schedule.sequence import DraftState
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.controller import AlwaysDraft, DraftController
from engine.speculation.draft_loop import ModelProposer
from engine.speculation.proposer import DraftBatch
from engine.speculation.speculator import MAX_DRAFT_LAG
from tests.rigs.engine.draft_models import disturbed, tiny_target

BLOCK = 4


class Recorder(ModelProposer):
    """Records each proposal with the tokens before it and its child, and the lags that were caught up."""

    def __init__(self, engine: Engine) -> None:
        assert engine.runner.draft_loop is not None
        super().__init__(engine.runner.draft_loop, engine.scheduler.reserve_for_drafts)
        self.proposals: list[tuple[list[int], list[int], int]] = []
        self.caught_up: list[int] = []

    def catch_up(self, seqs: Sequence[EngineSequence]) -> None:
        self.caught_up += [seq.draft_lag for seq in seqs]
        super().catch_up(seqs)

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = super().propose(seqs, states, limits)
        for seq, row, length in zip(seqs, drafts.tokens.tolist(), drafts.lengths.tolist(), strict=True):
            if length:
                self.proposals.append((list(seq.tokens), row[:length], seq.child))
        return drafts


class DraftsLater(DraftController):
    """Gives no drafts before `after` output tokens."""

    def __init__(self, max_drafts: int, after: int) -> None:
        super().__init__(max_drafts, pads_steps=False)
        self.after = after

    def limits(self, states: Sequence[tuple[DraftState, int]]) -> list[int]:
        return [self.max_drafts if output >= self.after else 0 for _, output in states]


class ReferenceModel:
    """The draft model in transformers, without cache, batch or blocks."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.no_grad()
    def drafts(
        self, tokens: Sequence[int], count: int, params: SamplingParams, *, prompt_len: int = 0, child: int = 0
    ) -> list[int]:
        """Its drafts after these tokens, sampled with the parameters and noise of the target."""
        said: list[int] = []
        for _ in range(count):
            logits = self._model(torch.tensor([[*tokens, *said]])).logits[0, -1:]
            said.append(int(sample(logits, [SampleRow(params, tokens, prompt_len, child, drafts=said)]).tokens))
        return said


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    target = tiny_target(root / "target")
    return target, disturbed(target, root / "draft")


def engine(dirs: tuple[Path, Path], **config: Any) -> LLM:
    return LLM(
        dirs[0],
        speculation="draft_model",
        speculation_model=dirs[1],
        speculation_tokens=3,
        block_size=BLOCK,
        num_blocks=300,
        chunk_tokens=64,
        threads=1,
        **config,
    )


@pytest.mark.parametrize(
    ("controller", "overlap"),
    [
        (AlwaysDraft(3), False),
        (DraftsLater(3, 5), True),
        (DraftsLater(3, MAX_DRAFT_LAG + 20), False),
        (DraftsLater(3, MAX_DRAFT_LAG + 20), True),
    ],
)
def test_drafts_equal_those_of_the_whole_text(
    controller: DraftController, overlap: bool, dirs: tuple[Path, Path]
) -> None:
    reference = ReferenceModel(dirs[1])
    llm = engine(dirs, overlap=overlap)
    recorder = Recorder(llm.engine)
    llm.engine.set_proposer(recorder, controller)
    prompts = [[5], [9, 30, 7], [(7 * i) % 45 + 3 for i in range(21)]]
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_DRAFT_LAG + 40)
    answers = llm.generate(prompts, greedy, ignore_eos=True, show_progress=False)
    assert len(recorder.proposals) > 12
    for tokens, drafts, _ in recorder.proposals:
        assert reference.drafts(tokens, len(drafts), greedy) == drafts
    if isinstance(controller, DraftsLater):
        assert (max(recorder.caught_up, default=0) >= MAX_DRAFT_LAG) == (controller.after > MAX_DRAFT_LAG)
    # Published blocks have complete draft KV, and nearly all blocks are published.
    for prompt, answer in zip(prompts, answers, strict=True):
        said = [*prompt, *answer.ids]
        recorder.proposals.clear()
        (again,) = llm.generate([said], greedy, ignore_eos=True, show_progress=False)
        assert again.cached_tokens > len(said) - MAX_DRAFT_LAG - 2 * BLOCK
        tokens, drafts, _ = recorder.proposals[0]
        assert reference.drafts(tokens, len(drafts), greedy) == drafts
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.failures == 0
    llm.engine.pool.check_integrity()


def test_children_share_the_prompt_but_no_drafts(dirs: tuple[Path, Path]) -> None:
    """The children share the last block of the prompt until they write to it; drafts are writes too."""
    llm = engine(dirs)
    recorder, reference = Recorder(llm.engine), ReferenceModel(dirs[1])
    llm.engine.set_proposer(recorder, AlwaysDraft(3))
    prompt = [(5 * i) % 44 + 3 for i in range(2 * BLOCK + 1)]
    params = SamplingParams(temperature=0.8, seed=6, max_tokens=12, n=4)
    answers = llm.generate([prompt], params, ignore_eos=True, show_progress=False)
    assert len({tuple(answer.ids) for answer in answers}) == 4
    assert {child for *_, child in recorder.proposals} == set(range(4))
    for tokens, drafts, child in recorder.proposals:
        assert reference.drafts(tokens, len(drafts), params, prompt_len=len(prompt), child=child) == drafts
    assert llm.engine.speculator is not None
    assert 0 < llm.engine.speculator.stats.accepted < llm.engine.speculator.stats.proposed


def test_a_model_with_another_vocabulary_is_refused(dirs: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny_target(tmp_path / "other", vocab=2000)
    with pytest.raises(ConfigError, match="another vocabulary") as caught:
        engine((dirs[0], other))
    assert caught.value.field == "speculation_model"


def test_a_padded_vocabulary_is_served(dirs: tuple[Path, Path], tmp_path: Path) -> None:
    """Models of one family pad their vocabularies differently. Tokens of only one vocabulary are never drafted."""
    for vocab in (40, 64):
        llm = engine((dirs[0], tiny_target(tmp_path / f"v{vocab}", vocab=vocab)))
        llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(3))
        params = SamplingParams(temperature=1.5, seed=4, max_tokens=24)
        plain = LLM(dirs[0], block_size=BLOCK, num_blocks=300, chunk_tokens=64, threads=1)
        prompts = [[47, 46, 45], [3]]
        wanted = plain.generate(prompts, params, ignore_eos=True, show_progress=False)
        got = llm.generate(prompts, params, ignore_eos=True, show_progress=False)
        assert [c.ids for c in got] == [c.ids for c in wanted]
        assert llm.engine.speculator is not None
        assert llm.engine.speculator.stats.proposed > 0
        assert llm.engine.speculator.stats.failures == 0
