"""A transformers model over the Triton kernels, with strided queries, its own scale, a softcap and windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from engine.attention.triton_backend import TritonAttention
from engine.models.loader import open_model


def test_a_transformers_model_passes_its_check_over_the_triton_backend(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading compares the model with transformers' own attention. Here the check uses the Triton backend."""
    torch.manual_seed(1)
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        sliding_window=8,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path)
    backends: list[TritonAttention] = []

    def triton(*args: object, **kwargs: object) -> TritonAttention:
        backends.append(TritonAttention(*args, **kwargs))  # type: ignore[arg-type]
        return backends[-1]

    monkeypatch.setattr("engine.models.hf.model.TorchAttention", triton)
    open_model(tmp_path).load(64, device, torch.float32)
    assert len(backends) == 1
