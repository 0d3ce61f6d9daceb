"""The decoder with fused kernels gives the results of plain torch: all architectures, prompts, chunks, one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.attention.base import StepShape
from engine.attention.fixed_order import FixedOrderAttention, RowWiseAttention
from engine.attention.latent import LatentAttentionBackend
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.kv.kv_pool import LayerKV
from engine.models import decoder
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec, parse_spec
from tests.rigs.engine.paged import error

VOCAB, BLOCK, BLOCKS = 39, 4, 24
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
WIDE: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT: dict[str, Any] = EXPERTS | {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "llama-biases-head-dim-80": WIDE | {"attention_bias": True, "mlp_bias": True, "head_dim": 80, "hidden_size": 36},
    "mistral-window-mha": {"architectures": ["MistralForCausalLM"], "sliding_window": 5, "num_key_value_heads": 4},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3-bias-tied-head-dim-96": WIDE
    | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 96, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3-moe": EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True},
    "olmoe": EXPERTS | {"architectures": ["OlmoeForCausalLM"]},
    "glm4-moe-shared-expert": EXPERTS
    | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2}
    | {"first_k_dense_replace": 0, "routed_scaling_factor": 1.5, "use_qk_norm": True},
    "deepseek-v2": LATENT | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None},
    "deepseek-v3": LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 20, "rope_interleave": False},
    "granite-moe": EXPERTS
    | {"architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 6, "intermediate_size": 20}
    | {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "gpt-oss-mxfp4": EXPERTS
    | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "intermediate_size": 32, "sliding_window": 6}
    | {"quantization_config": {"quant_method": "mxfp4"}, "rope_scaling": None},
    "gpt-oss": EXPERTS
    | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "intermediate_size": 32, "sliding_window": 6}
    | {"layer_types": ["full_attention"], "rope_scaling": None},
}
#: Models whose attention is that of another model: the selection of rows is tested with that one.
SAME_ATTENTION = {"qwen3-moe", "olmoe", "glm4-moe-shared-expert", "granite-moe", "gpt-oss-mxfp4"}
VARIANTS = [
    (name, selected) for name in CASES for selected in (False, True) if not (selected and name in SAME_ATTENTION)
]
Step = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
TABLES = [[7, 2], [0, 5], [12, 10, 3]]
STEPS: list[Step] = [  # rows, starts, new tokens: whole prompts, a few rows, one row
    ((0, 1, 2), (0, 0, 0), (5, 3, 9)),
    ((1, 2), (3, 9), (1, 2)),
    ((1,), (4,), (1,)),
]


def decoders(spec: ModelSpec, dtype: torch.dtype, device: torch.device, deterministic: bool) -> tuple[Decoder, Decoder]:
    """Returns a fused and a plain decoder with the same random weights."""
    pair = [Decoder(spec, 64, device, dtype, fused=fused, deterministic=deterministic) for fused in (True, False)]
    torch.manual_seed(5)
    for a, b in zip(*(model.parameters() for model in pair), strict=True):
        if a.dtype == torch.uint8:  # numbers of MXFP4, or scales from 2^-4 to 2^-2
            a.random_(0, 256) if a.shape[-1] > 1 else a.random_(123, 126)
        else:
            a.normal_(0.0, 0.2).add_(1.0 if a.ndim == 1 else 0.0)
        b.copy_(a)
    return pair[0], pair[1]


class Rig:
    """Both decoders, each with its own pool. The fused decoder's pool is NaN where no token was written."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        models: tuple[Decoder, Decoder] | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.models = models or decoders(spec, dtype, device, deterministic)
        kinds = (FixedOrderAttention, RowWiseAttention) if deterministic else (TritonAttention, TorchAttention)
        if spec.latent_dim:
            kinds = (LatentAttentionBackend, TorchAttention)
        vectors = 1 if spec.latent_dim else 2
        shape = (BLOCKS, spec.num_layers, vectors, spec.num_kv_heads, BLOCK, spec.head_dim)
        caches = [torch.full(shape, fill, dtype=dtype, device=device) for fill in (float("nan"), 0.0)]
        layers, rest = range(spec.num_layers), (spec.num_heads, spec.windows, BLOCKS - 1)
        self.pools = [tuple(LayerKV(cache[:, i], None, spec.latent_dim) for i in layers) for cache in caches]
        self.backends = [kind(pool, *rest, scale=spec.scale) for kind, pool in zip(kinds, self.pools, strict=True)]
        self.device = device

    def call(self, which: int, step: Step) -> Callable[[], Tensor]:
        """Prepares a step. The result computes the logits [R, vocab] of the last token of each row."""
        rows, starts, counts = step
        tokens = torch.randint(0, VOCAB, (sum(counts),), generator=torch.Generator().manual_seed(sum(starts)))
        positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        last = torch.tensor(counts).cumsum(0).to(self.device) - 1 if sum(counts) > len(counts) else None
        model, pool, backend = self.models[which], self.pools[which], self.backends[which]
        metadata = backend.prepare(StepShape(starts, counts, [TABLES[r] for r in rows]))

        def run() -> Tensor:
            hidden = model.forward(tokens, positions, ForwardContext(pool, backend, metadata), last)
            assert len(hidden) == len(rows)
            return model.logits(hidden)

        return run


@pytest.mark.parametrize(
    ("name", "selected"), VARIANTS, ids=[f"{name}-{'last-tokens-only' if few else 'all'}" for name, few in VARIANTS]
)
@torch.inference_mode()
def test_fused_equals_plain(name: str, selected: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer attends for all tokens, or (selected) for the last token of each row only."""
    rig = Rig(parse_spec(BASE | CASES[name]), torch.float32, device)
    for step in STEPS:
        plain = rig.call(1, step)()
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "MIN_TOKENS_PER_ROW", 1 if selected else 1000)
            fused = rig.call(0, step)()
        assert fused.dtype == torch.float32
        assert error(fused, plain.double()) < 2e-5


@pytest.mark.parametrize("name", ["llama-biases-head-dim-80", "mistral-window-mha", "qwen3-bias-tied-head-dim-96"])
@torch.inference_mode()
def test_the_fixed_order_computes_the_same_model(name: str, device: torch.device) -> None:
    """The operations of the deterministic mode, fused and in torch, and the normal ones in torch."""
    spec = parse_spec(BASE | CASES[name])
    fixed, usual = Rig(spec, torch.float32, device, deterministic=True), Rig(spec, torch.float32, device)
    for step in STEPS:
        expected = usual.call(1, step)().double()
        assert error(fixed.call(0, step)(), expected) < 2e-5
        assert error(fixed.call(1, step)(), expected) < 2e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_in_a_graph_and_in_half_precision(name: str, device: torch.device) -> None:
    """A captured step equals an eager step, and fused bf16 is as close to fp32 as plain bf16."""
    spec = parse_spec(BASE | CASES[name])
    half, full = Rig(spec, torch.bfloat16, device), Rig(spec, torch.float32, device)
    for a, b in zip(full.models[1].parameters(), half.models[1].parameters(), strict=True):
        a.copy_(b)
    errors = []
    for step in STEPS:
        exact = full.call(1, step)().double()
        run = half.call(0, step)
        eager = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        assert torch.equal(captured, eager)
        errors.append((error(eager, exact), error(half.call(1, step)(), exact)))
    fused, plain = (sum(e[i] for e in errors) for i in (0, 1))
    assert fused < 1.1 * plain
