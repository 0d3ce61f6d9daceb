"""Draft models in static steps (on a GPU: CUDA graphs) give the tokens and the drafts of plain CPU steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from common.types import SamplingParams
from engine.models.decoder import Decoder
from engine.models.eagle import EagleHead, parse_eagle_spec
from engine.speculation.draft_model import BuildDraftModel, EagleDraftModel, SeparateDraftModel

from .test_attention_kernels import PagedCase, decode
from .test_decode_step import SPEC, VOCAB, Rig, load, weights

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "bias": True,
}
EAGLE3 = {"draft_vocab_size": 24, "eagle_aux_hidden_state_layer_ids": [0, 0, 1]}


def disturbed(target: Decoder) -> tuple[dict[str, int], BuildDraftModel]:
    """Returns a draft model that is the target with noise on its weights, and its part of the KV layout."""
    device = target.embedding.weight.device
    model = Decoder(SPEC, 64, device, torch.float32, fused=target.capturable)
    generator = torch.Generator().manual_seed(2)
    for parameter, values in zip(model.parameters(), weights(SPEC), strict=True):
        parameter.copy_(values + 0.03 * torch.randn(values.shape, generator=generator))
    layout = {"draft_layers": SPEC.num_layers, "draft_kv_heads": SPEC.num_kv_heads, "draft_head_dim": SPEC.head_dim}
    return layout, lambda kv, attention: SeparateDraftModel(model, SPEC, VOCAB, kv, attention)


def random_head(target: Decoder, *, eagle3: bool) -> tuple[dict[str, int], BuildDraftModel]:
    """Returns a random EAGLE head and its part of the KV layout."""
    spec = parse_eagle_spec(HEAD | (EAGLE3 if eagle3 else {}))
    head = EagleHead(
        spec,
        target,
        64,
        target.embedding.weight.device,
        torch.float32,
        own_embedding=False,
        own_head=eagle3,
        fc_bias=not eagle3,
        fused=target.capturable,
    )
    generator = torch.Generator().manual_seed(4)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1))
    if head.token_ids is not None:
        head.token_ids = head.token_ids * 2
    layout = {"draft_layers": 1, "draft_kv_heads": 1, "draft_head_dim": 16, "draft_state": 32}
    return layout, lambda kv, attention: EagleDraftModel(head, target, kv, attention)


KINDS = {
    "draft_model": disturbed,
    "eagle": lambda target: random_head(target, eagle3=False),
    "eagle3": lambda target: random_head(target, eagle3=True),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_static_steps_make_the_drafts_of_plain_ones(kind: str, device: torch.device) -> None:
    """Without overlap the steps and all counts are the same."""
    if kind == "eagle" and device.type == "cpu":
        pytest.skip("the interpreter is slow")
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.4}]
    requests = [
        (f"r{i}", tuple(range(3 + i, 9 - i)), SamplingParams(max_tokens=4 + i, seed=i, **more))
        for i, more in enumerate(kinds)
    ]
    found = []
    for fused in (False, True):
        on = device if fused else torch.device("cpu")
        rig = Rig(on, fused=fused, overlap=False, graphs=fused and device.type == "cuda", draft=KINDS[kind])
        for request in requests:
            rig.add(*request)
        answers = {name: [t.id for t in tokens] for name, tokens in rig.run().items()}
        assert rig.speculator is not None
        assert (rig.runner.draft_graphs is not None) == fused
        stats = rig.speculator.stats
        assert stats.failures == 0
        found.append((answers, stats.proposed_at, stats.accepted_at))
    assert found[0] == found[1]
    assert sum(found[0][1]) > 0


def test_memory_is_freed_without_the_garbage_collector(device: torch.device) -> None:
    """The objects of an engine on a GPU are frozen (gc.freeze), so a reference cycle would never be collected."""
    gc.disable()
    try:
        rig = Rig(device, fused=True, overlap=True, draft=KINDS["draft_model"])
        refs = [weakref.ref(rig.runner), weakref.ref(rig.runner.draft_graphs), weakref.ref(rig.runner.decode_step)]
        del rig
        assert [ref() for ref in refs] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter is slow")
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_overlap_and_preemption_change_no_token(kind: str, device: torch.device) -> None:
    answers = []
    for rig in (
        Rig(torch.device("cpu"), fused=False, overlap=False),
        Rig(device, fused=True, overlap=True, graphs=True, blocks=24, draft=KINDS[kind]),
    ):
        for request in load():
            rig.add(*request)
        answers.append({name: [t.id for t in tokens] for name, tokens in rig.run().items()})
    assert answers[0] == answers[1]
    assert rig.speculator is not None
    assert rig.speculator.stats.proposed > 0
    assert rig.speculator.stats.failures == 0


@pytest.mark.parametrize("first", [1, 3])
def test_keys_before_the_first_position_are_not_seen(first: int, device: torch.device, gen: torch.Generator) -> None:
    case = PagedCase(
        [70, 9, 5], [2, 1, 1], heads=4, kv_heads=2, dim=32, block_size=8, dtype=torch.float32, device=device, gen=gen
    )
    row = 0
    got = decode(case, 4, 2, first=first)
    for i, (length, queries) in enumerate(zip(case.lens, case.queries, strict=True)):
        keys, values = (x.double().repeat_interleave(2, 0)[:, first:] for x in case.dense(i))
        for j in range(queries):
            end = length - queries + j + 1 - first
            query = case.q[row].double()[:, None]
            scores = (query @ keys[:, :end].transpose(1, 2)) * case.scale
            want = (scores.softmax(-1) @ values[:, :end])[:, 0]
            assert torch.allclose(got[row].double(), want, atol=1e-5)
            row += 1
