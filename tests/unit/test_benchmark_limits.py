"""The limits of the engine benchmark equal those computed by hand for one H100."""

from __future__ import annotations

import pytest

from benchmarks.support.limits import Ceilings, StepCost
from benchmarks.support.shapes import SHAPES

LLAMA = SHAPES["llama-3.1-8b"]
H100 = Ceilings(copy_gb_s=3028, matmul_tflop_s=707, attention_tflop_s=600)
COST = StepCost(LLAMA.config, itemsize=2, kv_bytes_per_token=131072)


@pytest.mark.parametrize(("rows", "context", "ms"), [(1, 128, 4.96), (16, 1024, 5.67), (64, 2048, 10.6)])
def test_a_decode_step_reads_all_weights_and_the_kv(rows: int, context: int, ms: float) -> None:
    assert COST.decode_s(rows * context, H100) * 1e3 == pytest.approx(ms, rel=0.01)


@pytest.mark.parametrize(("length", "ms"), [(2048, 42), (4096, 86), (8192, 191), (15000, 390)])
def test_a_prefill_computes_its_matrix_products_and_its_attention(length: int, ms: float) -> None:
    assert COST.prefill_s(length, H100) * 1e3 == pytest.approx(ms, rel=0.05)
