"""Measures the 4-bit codec of cold KV blocks: the error of the logits after a decoded prefix, and its rate.

The model is --model or that of the demo, SmolLM2-135M. The text is benchmarks/support/quality_texts.txt. transformers
computes the KV of a prefix. Each block of it is encoded and decoded, and the model reads the next tokens of the text
after the exact and after the decoded prefix. It needs no GPU.

    python benchmarks/cold_codec.py --out benchmarks/results/cold_codec.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.disk_tier import H200_BYTES, h200_prefill_s
from benchmarks.quality import texts_of
from benchmarks.support import report
from cli.demo.model import demo_model
from common.kv_layout import KVLayout
from engine.kv.tiers.cold_codec import INT4, BlockCodec

METRICS = """
Metrics of the answer, 64 tokens of the text after each prefix, over all prefixes:

- codec_logit_error_max, codec_logit_error_mean: absolute difference of the log-probabilities of the whole vocabulary.
- codec_answer_error_max, codec_answer_error_mean: the same of the answer's own tokens.
- codec_kl_mean: KL divergence from the exact distribution of a token to that after the decoded prefix, in nats.
- codec_agreement: share of positions with the same most likely token.
- codec_perplexity, exact_perplexity: of the answers.

Rows have the figures for each length of the prefix, for a pool in float32 and one in bfloat16. With bfloat16 the exact
prefix is rounded to bfloat16 too. The metrics are those of bfloat16, as on a GPU.

- codec_ratio: bytes of a block of the 8B shape in bfloat16 over those in a file; codec_ratio_64 with 64 tokens a block.
- codec_encode_gb_per_s, codec_decode_gb_per_s: bytes of the pool per second of one core, 8B shape, bfloat16, median.
- codec_decode_cores: cores that decode 2,048 tokens of an 8B model as fast as an H200 computes them (docs/tuning.md).
"""
BLOCK, ANSWER = 16, 64
PREFIXES = (64, 256, 768)
WINDOWS = 2  # Prefixes of each length, spread over the text
REPEATS = 15
LLAMA_8B = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}


def decoded(codec: BlockCodec, kv: torch.Tensor) -> torch.Tensor:
    """Returns keys and values [layers, 2, heads, tokens, head_dim] after the codec, in blocks as in the pool."""
    result = kv.clone()
    for first in range(0, kv.shape[3], BLOCK):
        part = kv[:, :, :, first : first + BLOCK].contiguous()
        raw = np.zeros(codec.block_bytes, np.uint8)
        raw[: part.nbytes] = part.view(torch.uint8).numpy().ravel()
        encoded = codec.encode(memoryview(raw))
        assert encoded is not None
        codec.decode(encoded, memoryview(raw))
        back = torch.from_numpy(raw[: part.nbytes]).view(kv.dtype)
        result[:, :, :, first : first + BLOCK] = back.reshape(part.shape)
    return result


def answer_logprobs(model: Any, kv: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities [answer, vocabulary] after a prefix with this KV; row i predicts token i + 1."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, layer in enumerate(kv.float()):
        cache.update(layer[0][None], layer[1][None], number)
    return model(answer[None], past_key_values=cache).logits[0].double().log_softmax(-1)


def compare(exact: torch.Tensor, other: torch.Tensor, answer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the differences of two results of `answer_logprobs`."""
    own = answer[1:, None]
    exact, other = exact[:-1], other[:-1]
    return {
        "logit_error": (exact - other).abs().flatten(),
        "answer_error": (exact.gather(1, own) - other.gather(1, own)).abs().flatten(),
        "kl": (exact.exp() * (exact - other)).sum(1),
        "agreement": (exact.argmax(1) == other.argmax(1)).double(),
        "logprob": other.gather(1, own).flatten(),
        "exact_logprob": exact.gather(1, own).flatten(),
    }


def summary(found: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Returns the figures of some comparisons together."""
    joined = {name: torch.cat([one[name] for one in found]) for name in found[0]}
    return {
        "logit_error_max": float(joined["logit_error"].max()),
        "logit_error_mean": float(joined["logit_error"].mean()),
        "answer_error_max": float(joined["answer_error"].max()),
        "answer_error_mean": float(joined["answer_error"].mean()),
        "kl_mean": float(joined["kl"].mean()),
        "agreement": float(joined["agreement"].mean()),
        "perplexity": float((-joined["logprob"].mean()).exp()),
        "exact_perplexity": float((-joined["exact_logprob"].mean()).exp()),
    }


@torch.inference_mode()
def quality(table: report.MetricTable, directory: Path) -> None:
    """Adds the errors of a model."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([token for text in texts_of(directory) for token in text])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    shape = {"num_layers": config.num_hidden_layers, "num_kv_heads": config.num_key_value_heads}
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: dict[str, dict[int, list[dict[str, torch.Tensor]]]] = {"float32": {}, "bfloat16": {}}
    for length in PREFIXES:
        starts = np.linspace(0, len(ids) - length - ANSWER, WINDOWS).astype(int)
        for start in starts:
            prefix, answer = ids[start : start + length], ids[start + length : start + length + ANSWER]
            cache = model(prefix[None], use_cache=True, logits_to_keep=1).past_key_values
            exact = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
            for dtype, results in found.items():
                layout = KVLayout("m", "", head_dim=dim, block_size=BLOCK, dtype=dtype, disk_codec=INT4, **shape)
                kv = exact.to(getattr(torch, dtype))
                pair = (answer_logprobs(model, one, answer) for one in (kv, decoded(BlockCodec(layout), kv)))
                results.setdefault(length, []).append(compare(*pair, answer))
    for dtype, results in found.items():
        for length, one in results.items():
            figures = {key: round(value, 5) for key, value in summary(one).items()}
            row = {"name": f"{dtype}_prefix_{length}", "value": figures["kl_mean"], **figures}
            table.rows.append(row)
            print(row, flush=True)
    for name, value in summary([one for part in found["bfloat16"].values() for one in part]).items():
        table.add(name if name.startswith("exact") else f"codec_{name}", value)


def rates(table: report.MetricTable) -> None:
    """Adds size and rate for the shape of an 8B model."""
    layout = KVLayout("m", "", block_size=BLOCK, dtype="bfloat16", disk_codec=INT4, **LLAMA_8B)
    long = KVLayout("m", "", block_size=64, dtype="bfloat16", disk_codec=INT4, **LLAMA_8B)
    codec = BlockCodec(layout)
    numbers = torch.randn(layout.block_bytes // 2, generator=torch.Generator().manual_seed(28)).bfloat16()
    block = memoryview(numbers.view(torch.uint8).numpy())
    encoded = codec.encode(block)
    assert encoded is not None
    target = memoryview(bytearray(layout.block_bytes))
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(REPEATS):
        for name, call in (("encode", lambda: codec.encode(block)), ("decode", lambda: codec.decode(encoded, target))):
            began = time.thread_time()  # of this core, also on a busy machine
            call()
            seconds[name].append(time.thread_time() - began)
    table.add("codec_ratio", layout.block_bytes / codec.encoded_bytes, f"{codec.encoded_bytes} bytes in a file")
    table.add("codec_ratio_64", long.block_bytes / BlockCodec(long).encoded_bytes)
    rate = {name: layout.block_bytes / float(np.median(times)) / 1e9 for name, times in seconds.items()}
    table.add("codec_encode_gb_per_s", rate["encode"])
    table.add("codec_decode_gb_per_s", rate["decode"])
    needed = 2_048 * H200_BYTES["bf16"] / h200_prefill_s(2_048) / 1e9
    table.add("codec_decode_cores", needed / rate["decode"], f"for {needed:.1f} GB/s")


def main() -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model")
    args = parser.parse_args()
    table = report.MetricTable()
    torch.set_num_threads(1)
    rates(table)
    quality(table, args.model or demo_model())
    report.write(args.out, "cold_codec", table.metrics, "torch", rows=table.rows)


if __name__ == "__main__":
    main()
