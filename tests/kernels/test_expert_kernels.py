"""The kernels of a mixture of experts against float64: routing, the order of copies, few rows and many rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.kernels.experts import vector
from engine.kernels.experts.grouped import many_rows
from engine.kernels.experts.layer import mixture
from engine.kernels.experts.routing import RoutingRule, max_block_count, route, sort_copies
from engine.kernels.experts.weight import mxfp4_weight, unpack_pairs
from tests.rigs.engine.experts import E2M1, ExpertCase, choose
from tests.rigs.engine.paged import error

RULES = {
    "softmax": RoutingRule(3),
    "not normalised": RoutingRule(2, normalize=False, scale=2.5),
    "sigmoid": RoutingRule(4, sigmoid=True, scale=1.5),
    "groups": RoutingRule(3, sigmoid=True, groups=4, top_groups=2),
    "one": RoutingRule(1),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("experts", [8, 12, 160])
@pytest.mark.parametrize("corrected", [False, True])
def test_route(name, experts, corrected, device, gen):
    rule = RULES[name]
    logits = torch.randn(7, experts, generator=gen, device=device) * 3
    correction = torch.randn(experts, generator=gen, device=device) if corrected else None
    weights, chosen = route(logits, rule, correction)
    want_weights, want = choose(logits.double(), rule, correction)
    assert torch.equal(chosen.long(), want)
    assert error(weights, want_weights) < 1e-5


def test_route_of_equal_and_undefined_logits_names_every_expert_once(device):
    logits = torch.zeros(3, 20, device=device)
    logits[1] = float("nan")
    logits[2, 5] = float("nan")
    chosen = route(logits, RoutingRule(4))[1]
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block"), [(1, 8, 128, 16), (40, 4, 5, 16), (300, 4, 33, 32)])
@pytest.mark.parametrize("spread", ["even", "one", "two"])
def test_sort_copies(tokens, top_k, experts, block, spread, device, gen):
    most = {"even": experts, "one": 1, "two": 2}[spread]
    chosen = torch.randint(0, most, (tokens, top_k), generator=gen, device=device, dtype=torch.int32)
    check_order(chosen, experts, block, 0)


def test_sort_copies_leaves_out_experts_of_other_ranks(device, gen):
    chosen = torch.randint(0, 24, (50, 3), generator=gen, device=device, dtype=torch.int32)
    check_order(chosen, 7, 16, 9)
    check_order(torch.full_like(chosen, 3), 7, 16, 9)


def check_order(chosen, local, block, first):
    order, blocks, most, _ = sort_copies(chosen, local, block, first)
    flat = [e - first for e in chosen.flatten().tolist()]
    want = sorted((c for c, e in enumerate(flat) if 0 <= e < local), key=lambda c: flat[c])
    assert order.tolist()[: len(want)] == want
    count = int(blocks[0])
    assert count <= most == max_block_count(len(flat), local, block)
    seen = []
    for expert, begin, rows in blocks[1:].view(-1, 3).tolist()[:count]:
        assert 0 < rows <= block
        assert all(flat[c] == expert for c in want[begin : begin + rows])
        seen += range(begin, begin + rows)
    assert seen == list(range(len(want)))
    assert count == sum(-(-n // block) for n in Counter(flat[c] for c in want).values())


@triton.jit
def _unpack_kernel(words, out, N: tl.constexpr):
    i = tl.arange(0, N)
    p0, p1, p2, p3 = unpack_pairs(tl.load(words + i))
    tl.store(out + 4 * i, p0)
    tl.store(out + 4 * i + 1, p1)
    tl.store(out + 4 * i + 2, p2)
    tl.store(out + 4 * i + 3, p3)


def test_every_mxfp4_byte_is_unpacked_at_every_place(device):
    codes = torch.stack([torch.arange(256, dtype=torch.uint8).roll(shift) for shift in range(4)], 1).to(device)
    codes = codes.view(1, 8, 128)
    words = mxfp4_weight(codes, torch.full((1, 8, 8), 127, dtype=torch.uint8, device=device)).numbers
    pairs = torch.empty(words.numel(), 4, dtype=torch.int32, device=device)
    _unpack_kernel[(1,)](words, pairs, words.numel())
    numbers = torch.stack((pairs << 16, pairs & -65536), -1).view(torch.float32).double() * 2.0**126
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=device)
    assert torch.equal(numbers.flatten(), table[torch.stack((codes & 15, codes >> 4), -1).long()].flatten())


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Gives the programs of tiny shapes more rows in the interpreter, which takes as long for few rows."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(vector, "_tiles", lambda kind: ((32, 4), (64, 4)))


KINDS = ["plain", "fp8", "fp8_block", "mxfp4", "int4", "int4_zeros"]
FOUR_BITS = ["mxfp4", "int4", "int4_zeros"]


def make(kind, device, gen, **options):
    sizes = {"experts": 5, "hidden": 160, "inner": 32} if kind in FOUR_BITS or kind == "fp8_block" else None
    sizes = sizes or {"experts": 7, "hidden": 36, "inner": 21}
    return ExpertCase.make(kind, options.pop("rule", RoutingRule(3)), device, gen, **(sizes | options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize(("tokens", "max_few"), [(1, 99), (2, 99), (4, 0)])
def test_mixture(kind, gpt_oss, tokens, max_few, device, gen):
    case = make(kind, device, gen, gpt_oss=gpt_oss)
    hidden = len(case.norm)
    x = torch.randn(tokens, hidden + 3, generator=gen, device=device)[:, :hidden]
    out = torch.full((tokens, hidden), float("nan"), device=device)
    got = mixture(x, case.layer, case.norm, case.eps, residual=x, out=out, max_few=max_few)
    assert got is out
    assert error(got, x.double() + case.expected(x)) < 5e-6


@pytest.mark.parametrize("max_few", [99, 0])
def test_mxfp4_in_float16(max_few, device, gen):
    """Numbers that are scaled down for the range of bfloat16 would all be zero."""
    case = make("mxfp4", device, gen, dtype=torch.float16)
    x = torch.randn(2, len(case.norm), generator=gen, device=device).half()
    assert error(mixture(x, case.layer, case.norm, case.eps, max_few=max_few), case.expected(x)) < 2e-3


@pytest.mark.parametrize(
    ("kind", "max_tile"), [*((kind, 2048) for kind in KINDS), ("plain", 64), ("fp8_block", 64), ("int4_zeros", 64)]
)
def test_inputs_of_few_rows_are_cut_in_tiles(kind, max_tile, device, gen, monkeypatch):
    """Several full tiles and a rest, and blocks of FP8 whose 128 inputs are a part of a tile."""
    monkeypatch.setattr(vector, "MAX_TILE", max_tile)
    case = ExpertCase.make(kind, RoutingRule(3), device, gen, experts=4, hidden=288, inner=160)
    x = torch.randn(1, 288, generator=gen, device=device)
    assert error(mixture(x, case.layer, case.norm, case.eps), case.expected(x)) < 5e-6


@pytest.mark.parametrize("max_few", [99, 0])
@pytest.mark.parametrize("rule", [RULES["not normalised"], RULES["sigmoid"]])
def test_rules_reach_the_products(rule, max_few, device, gen):
    case = make("plain", device, gen, rule=rule, corrected=rule.sigmoid)
    x = torch.randn(2, len(case.norm), generator=gen, device=device)
    assert error(mixture(x, case.layer, case.norm, case.eps, max_few=max_few), case.expected(x)) < 5e-6


@pytest.mark.parametrize("max_few", [99, 0])
@pytest.mark.parametrize("kind", ["plain", "mxfp4", "int4_zeros"])
def test_parts_of_the_experts_add_up(kind, max_few, device, gen):
    case = make(kind, device, gen, gpt_oss=True)
    x = torch.randn(4, len(case.norm), generator=gen, device=device)
    total = torch.zeros(4, len(case.norm), dtype=torch.float64, device=device)
    for first, count in ((0, 2), (2, len(case.gate_up) - 2)):
        part = case.part(first, count)
        got = mixture(x, part.layer, case.norm, case.eps, max_few=max_few).double()
        assert error(got, part.expected(x)) < 5e-6
        total += got
    assert error(total, case.expected(x)) < 5e-6


def test_all_tokens_of_one_expert_and_repeated_runs(device, gen):
    case = make("plain", device, gen, rule=RoutingRule(1))
    case.layer.router[2] = 50 * case.norm
    case.layer.router[3:] *= -1
    x = case.norm.expand(40, -1) + torch.randn(40, len(case.norm), generator=gen, device=device) / 9
    got = mixture(x, case.layer, case.norm, case.eps)
    assert error(got, case.expected(x)) < 5e-6
    assert torch.equal(got, mixture(x, case.layer, case.norm, case.eps))


@pytest.mark.parametrize("block", [16, 32])
def test_blocks_of_any_size_give_the_same(block, device, gen):
    case = make("plain", device, gen)
    x = torch.randn(20, len(case.norm), generator=gen, device=device)
    normed = case.normed(x).float()
    weights, experts = route((normed @ case.layer.router.T), case.layer.rule)
    copies = sort_copies(experts, len(case.gate_up), block)
    tiles = ((block, 16, 16, 2, 4),) * 2
    got = many_rows(normed, weights, experts, copies, case.layer.gate_up, case.layer.down, tiles=tiles)
    assert error(got, case.expected(x)) < 5e-6
