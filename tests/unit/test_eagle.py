"""Drafts of EAGLE heads against a forward pass written here from the papers.

The drafts come from the real loop over the paged pool, after chunked prompts, prefix hits and partly accepted drafts.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from common.errors import ConfigError
from common.types import SamplingParams
from engine.engine import Engine
from engine.llm import LLM
from engine.models.eagle import parse_eagle_spec
from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.controller import AlwaysDraft
from engine.speculation.draft_loop import ModelProposer
from engine.speculation.proposer import DraftBatch
from tests.rigs.engine.draft_models import eagle_head, tiny_target

VOCAB, HIDDEN, LAYERS = 48, 32, 6
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle, bias and rope": {"bias": True, "rope_theta": 500.0, "suffix": "safetensors"},
    "eagle3": {"fuses": True},
    "eagle3, own vocabulary": {"fuses": True, "draft_vocab": 24, "architectures": ["LlamaForCausalLMEagle3"]},
    "eagle3, normed residual": {
        "fuses": True,
        "draft_vocab": 16,
        "norm_before_residual": True,
        "suffix": "safetensors",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
    },
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab=VOCAB, layers=LAYERS)


class Reference:
    """Target and head over the whole text at once, with plain matrices."""

    def __init__(self, target_dir: Path, head_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
        self._config = json.loads((head_dir / "config.json").read_text())
        single = head_dir / "model.safetensors"
        tensors = load_file(single) if single.is_file() else torch.load(head_dir / "pytorch_model.bin")
        self._w: dict[str, Tensor] = tensors
        self._fuses = "draft_vocab_size" in self._config

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Greedy drafts after the tokens."""
        pre_norm: list[Tensor] = []
        hook = self._target.model.norm.register_forward_pre_hook(lambda _, args: pre_norm.append(args[0][0]))
        out = self._target(torch.tensor([list(tokens)]), output_hidden_states=True)
        hook.remove()
        states = [state[0] for state in out.hidden_states]  # [i]: before layer i; the last one is normed
        if self._fuses:
            aux = self._config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
            layer_ids = [i + 1 for i in aux] if aux else [2, LAYERS // 2, LAYERS - 3]
            features = (
                torch.cat([states[i] if i < LAYERS else pre_norm[0] for i in layer_ids], dim=-1)
                @ self._w["fc.weight"].T
            )
        else:
            features = states[-1]
        known, drafted = list(tokens), []
        features = features[: len(known) - 1]  # the newest token has no state yet
        for _ in range(count):
            out_states, logits = self._head(known[1:], features)
            draft = int(logits[-1].argmax())
            drafted.append(draft)
            known.append(draft)
            features = torch.cat([features, out_states[-1:]])
        return drafted

    def _head(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """States and logits for the pairs (features[i], tokens[i]) at positions 0, 1, ..."""
        w, at = self._w, "midlayer." if self._fuses else "layers.0."
        embedded = self._target.get_input_embeddings().weight[tokens]
        if self._fuses:
            normed = self._norm(features, at + "hidden_norm.weight")
            x = normed if self._config.get("norm_before_residual") else features
            inner = torch.cat([self._norm(embedded, at + "input_layernorm.weight"), normed], dim=-1)
        else:
            x = inner = F.linear(torch.cat([embedded, features], dim=-1), w["fc.weight"], w.get("fc.bias"))
        q, k, v = (inner @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        dim, length = HIDDEN // 2, len(tokens)
        q = self._rotate(q.view(length, 2, dim))
        k, v = self._rotate(k.view(length, 1, dim)), v.view(length, 1, dim)
        scores = torch.einsum("qhd,khd->hqk", q, k.expand(-1, 2, -1)) / dim**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.expand(-1, 2, -1)).reshape(length, HIDDEN)
        x = x + attended @ w[at + "self_attn.o_proj.weight"].T
        inner = self._norm(x, at + "post_attention_layernorm.weight")
        gated = F.silu(inner @ w[at + "mlp.gate_proj.weight"].T) * (inner @ w[at + "mlp.up_proj.weight"].T)
        x = x + gated @ w[at + "mlp.down_proj.weight"].T
        if not self._fuses:
            return x, x @ self._target.lm_head.weight.T
        own = self._norm(x, "norm.weight") @ w["lm_head.weight"].T
        if "d2t" not in w:
            return x, own
        logits = torch.full((length, VOCAB), float("-inf"))
        logits[:, torch.arange(len(w["d2t"])) + w["d2t"]] = own
        return x, logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"]) * self._w[name]

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self._config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


class Recorder(ModelProposer):
    """Records each proposal with the tokens before it.

    Args:
        answers: expected output by prompt. In two of three proposals its tokens replace the first drafts, so that runs
            of all lengths are accepted although the head is random.
    """

    def __init__(self, engine: Engine, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        assert engine.runner.draft_loop is not None
        super().__init__(engine.runner.draft_loop, engine.scheduler.reserve_for_drafts)
        self._answers = answers
        self.proposals: list[tuple[list[int], list[int]]] = []

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = super().propose(seqs, states, limits)
        for seq, row, length in zip(seqs, drafts.tokens, drafts.lengths.tolist(), strict=True):
            if length:
                self.proposals.append((list(seq.tokens), row[:length].tolist()))
            right = min(length, len(self.proposals) % 3 * 2)
            row[:right] = self._answers[seq.request.prompt_ids][seq.num_output :][:right]
        return drafts


def engine(target_dir: Path, head_dir: Path, **config: Any) -> LLM:
    return LLM(
        target_dir,
        speculation="eagle",
        speculation_model=head_dir,
        speculation_tokens=3,
        block_size=4,
        num_blocks=200,
        chunk_tokens=24,
        threads=1,
        **config,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_those_of_the_papers(kind: str, target_dir: Path, tmp_path: Path) -> None:
    head_dir = eagle_head(tmp_path / "head", vocab=VOCAB, hidden=HIDDEN, **KINDS[kind])
    reference = Reference(target_dir, head_dir)
    shared = [(7 * i) % 45 + 3 for i in range(17)]
    prompts = [[5], [9, 30], shared, [*shared[:13], 8, 9, 10], [(3 * i) % 44 + 3 for i in range(40)]]
    params = SamplingParams(temperature=0.0, max_tokens=22)
    plain = LLM(target_dir, block_size=4, num_blocks=200, chunk_tokens=24, threads=1)
    wanted = [answer.ids for answer in plain.generate(prompts, params, ignore_eos=True, show_progress=False)]
    llm = engine(target_dir, head_dir)
    recorder = Recorder(llm.engine, {tuple(p): ids for p, ids in zip(prompts, wanted, strict=True)})
    llm.engine.set_proposer(recorder, AlwaysDraft(3))
    got = []
    for batch in (prompts[:3], prompts[3:]):  # the second batch has prefix hits on the first
        got += [answer.ids for answer in llm.generate(batch, params, ignore_eos=True, show_progress=False)]
    assert got == wanted
    assert llm.engine.speculator is not None
    stats = llm.engine.speculator.stats
    assert stats.failures == 0
    assert stats.accepted_at[2] > 0
    assert stats.accepted < stats.proposed
    assert len(recorder.proposals) > 30
    lengths = {len(tokens) for tokens, _ in recorder.proposals}
    assert {2, 3, 18, 41} <= lengths
    wrong = [(t, d) for t, d in recorder.proposals if reference.drafts(t, len(d)) != d]
    assert not wrong, f"{len(wrong)} of {len(recorder.proposals)}: {wrong[0]}"
    llm.engine.pool.check_integrity()


def test_aux_layers_in_both_conventions() -> None:
    base = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "intermediate_size": 40,
        "vocab_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    }
    assert parse_eagle_spec(base).aux_layers_of(32) == (2, 16, 29)
    outputs = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
    inputs = {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}
    assert (
        parse_eagle_spec(base | outputs).aux_layers_of(32)
        == parse_eagle_spec(base | inputs).aux_layers_of(32)
        == (2, 16, 29)
    )
    nested = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": 24, "transformer_layer_config": base}
    assert parse_eagle_spec(nested).draft_vocab == 24
    with pytest.raises(ConfigError, match="three layers"):
        parse_eagle_spec(base | {"eagle_aux_hidden_state_layer_ids": [2]})
    with pytest.raises(ConfigError, match="states of layers"):
        parse_eagle_spec(base | {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}).aux_layers_of(4)
    with pytest.raises(ConfigError, match="2 layers"):
        parse_eagle_spec(base | {"num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("config", "message"),
    [({"hidden": 16}, "hidden size"), ({"vocab": 40}, "40 tokens"), ({"fuses": True, "qk": True}, "does not use")],
)
def test_a_head_that_does_not_fit_is_refused(
    config: dict[str, Any], message: str, target_dir: Path, tmp_path: Path
) -> None:
    head_dir = eagle_head(tmp_path / "head", **{k: v for k, v in config.items() if k != "qk"})
    if "qk" in config:
        path = head_dir / "pytorch_model.bin"
        torch.save(torch.load(path) | {"midlayer.self_attn.q_norm.weight": torch.ones(16)}, path)
    with pytest.raises(ConfigError, match=message) as caught:
        engine(target_dir, head_dir)
    assert caught.value.field == "speculation_model"


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing of the kind",
        pickle.dumps({"fc.weight": Path("x")}),
        saved([torch.zeros(1)]),
        saved({"state_dict": {"fc.weight": torch.zeros(1)}, "step": 3}),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused(content: bytes, target_dir: Path, tmp_path: Path) -> None:
    head_dir = eagle_head(tmp_path / "head", vocab=VOCAB)
    (head_dir / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        engine(target_dir, head_dir)
    assert caught.value.field == "speculation_model"


def test_dummy_heads_need_no_checkpoint(target_dir: Path, tmp_path: Path) -> None:
    head_dir = eagle_head(tmp_path / "head", fuses=True, draft_vocab=24)
    (head_dir / "pytorch_model.bin").unlink()
    llm = engine(target_dir, head_dir, load_format="dummy")
    (answer,) = llm.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=6), show_progress=False)
    assert answer.error is None
    assert llm.engine.layout.draft_state == HIDDEN
    other = engine(target_dir, head_dir, load_format="dummy", weights_seed=1)
    assert llm.engine.layout.fingerprint != other.engine.layout.fingerprint
