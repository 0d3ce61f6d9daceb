"""What a card does with a model: pool, largest batch and step times, from bytes, operations and a card's rates.

    step = layers x overhead + (weights / bandwidth, products / rate) + KV / bandwidth + rows x layers x row time

Reading weights and computing overlap in part: their times are joined by a power mean, which lies between the larger one
and the sum. The constants are fitted to the steps of this engine on an H200 (engine-h200.json, moe-h200.json);
tests/unit/test_plan_fit.py compares the result with the measured ones, also with those of an H100.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.fit.cards import Card
from common.errors import ConfigError

if TYPE_CHECKING:  # it loads torch
    from engine.model_size import ModelSize

READ_OVER_COPY = 1.057  # A kernel that only reads is faster than a copy: 4.50 against 4.26 TB/s on an H200.
PRODUCT_OVERHEAD = 1.16  # Products of a prompt step take this multiple of one large product.
JOIN = 1.5  # Exponent of the power mean.
LAYER_S, MOE_LAYER_S = 20e-6, 31e-6  # Seconds of a decode step per layer beside reading and computing.
BATCH_LAYER_S = 6e-6  # More per layer with more than one row: products of one row have kernels of their own.
ROW_LAYER_S = 0.16e-6  # Seconds of a decode step per row and layer: attention, norms, sampling.
PROMPT_S = 1.5e-3  # Seconds of a prompt step beside its products and attention.
ALL_REDUCE_S = 12e-6  # Seconds of one all-reduce of a few rows over NVLink; a layer has two. Not measured.
ALL_REDUCE_BYTE_S = 150e9  # Bytes per second of a long one. Not measured.
CPU_LAYER_S, CPU_ROW_LAYER_S = 60e-6, 20e-6  # On a CPU, where a step is plain torch.

GPU_STEP_TOKENS, CPU_STEP_TOKENS = 16384, 256  # Largest step: a prompt that is alone.
DRIVER_BYTES = 700 << 20  # Driver, CUDA libraries and what they reserve.
RESERVED_BYTES = 256 << 20
GRAPH_BYTES = 1 << 30  # Captured graphs with the default of --max-seqs.
DEFAULT_SHARE = 0.9  # Of --gpu-memory-utilization.
DEFAULT_MAX_SEQS = {"cuda": 256, "cpu": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """What the pod is to serve."""

    context: int  # Longest prompt and answer together, in tokens.
    prompt: int  # Tokens of a prompt.
    users: int  # Answers at the same time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One way to serve a model on a card, and what to expect of it."""

    flags: tuple[str, ...]  # Settings that differ from the defaults.
    ranks: int
    weight_bytes: float  # Per card.
    adapter_bytes: float  # Of the slots for adapters, per card.
    num_states: int  # Slots for recurrent states; 0 if the model has none.
    state_bytes: float  # Of these slots.
    kv_token_bytes: float  # Per token and card.
    pool_bytes: float  # Per card; negative if the weights do not fit.
    pool_tokens: int
    largest_batch: int  # Sequences of `context` tokens that the pool holds.
    batch: int  # Sequences of the steps below: the users, or fewer if they do not fit.
    ttft_s: float  # First token of one prompt on an idle pod.
    itl_s: float  # Time between tokens with `batch` answers at full context.
    idle_itl_s: float  # Time between the tokens of a single answer.
    prompts_s: float  # Prompts per second that one pod computes, without cache hits.
    fits: bool  # Whether the pool holds all users at full context.


def decode_s(size: ModelSize, card: Card, rows: int, context: float) -> float:
    """Returns the seconds of a step that decodes one token for each of `rows` sequences of `context` tokens."""
    read = card.copy_byte_s * READ_OVER_COPY
    weights = _join(
        size.read_bytes(rows) / read, 2 * rows * (size.token_weights + size.head_weights) / _rate(size, card)
    )
    kv = rows * size.kv_read_bytes(context) / read
    layers = size.shape.num_layers
    if card.device == "cpu":
        fixed = layers * (CPU_LAYER_S + rows * CPU_ROW_LAYER_S)
    else:
        fixed = (layers - size.moe_layers) * LAYER_S + size.moe_layers * MOE_LAYER_S
        fixed += layers * (rows * ROW_LAYER_S + (BATCH_LAYER_S if rows > 1 else 0.0))
    return fixed + weights + kv + _all_reduce_s(size, rows)


def prompt_s(size: ModelSize, card: Card, tokens: int) -> float:
    """Returns the seconds to the first token of one prompt on an idle pod."""
    read = card.copy_byte_s * READ_OVER_COPY
    largest = CPU_STEP_TOKENS if card.device == "cpu" else GPU_STEP_TOKENS
    seconds, left = 0.0, tokens
    while left > 0:
        step = min(left, largest)
        products = 2 * step * size.token_weights * PRODUCT_OVERHEAD / _rate(size, card)
        seconds += PROMPT_S + _join(size.read_bytes(step) / read, products) + _all_reduce_s(size, step)
        left -= step
    shape = size.shape
    widths = shape.head_dim + (shape.latent_dim or shape.head_dim)  # Of a key and a value
    attention = 2 * shape.num_heads * widths * size.attended_pairs(tokens)
    return seconds + attention / card.attention_flop_s


def _rate(size: ModelSize, card: Card) -> float:
    return card.fp8_flop_s if size.fp8_products and card.fp8_flop_s else card.product_flop_s


def _join(first: float, second: float) -> float:
    return float((first**JOIN + second**JOIN) ** (1 / JOIN))


def _all_reduce_s(size: ModelSize, rows: int) -> float:
    if size.ranks == 1:
        return 0.0
    each = ALL_REDUCE_S + 2 * rows * size.hidden_size * 2 / ALL_REDUCE_BYTE_S
    return 2 * size.shape.num_layers * each


def pool_bytes(size: ModelSize, card: Card, share: float) -> float:
    """Returns the bytes that are left for KV beside weights, adapters, activations and graphs; negative if none are."""
    on_cpu = card.device == "cpu"
    itemsize = 4 if on_cpu else 2
    tokens = CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS
    activations = tokens * itemsize * (4 * size.hidden_size + 1.5 * size.widest)
    activations += 3 * 4 * DEFAULT_MAX_SEQS[card.device] * size.shape.vocab_size
    room = share * card.memory_bytes if on_cpu else min(share * card.memory_bytes, card.memory_bytes - DRIVER_BYTES)
    return room - size.weight_bytes - size.adapter_bytes - activations - (0 if on_cpu else GRAPH_BYTES + RESERVED_BYTES)


def fit(size: ModelSize, card: Card, load: PlannedLoad, share: float, flags: tuple[str, ...]) -> Fit:
    """Returns what to expect of one setup."""
    pool = pool_bytes(size, card, share)
    states = size.num_states(max(0, pool), max(load.users, DEFAULT_MAX_SEQS[card.device]))
    pool -= states * size.state_bytes
    tokens = max(0, int(pool / size.kv_bytes))
    largest = tokens // load.context
    if states:
        largest = min(largest, states)
    batch = min(load.users, largest)
    ttft = prompt_s(size, card, load.prompt)
    return Fit(
        flags=flags,
        ranks=size.ranks,
        weight_bytes=size.weight_bytes,
        adapter_bytes=size.adapter_bytes,
        num_states=states,
        state_bytes=states * size.state_bytes,
        kv_token_bytes=size.kv_bytes,
        pool_bytes=pool,
        pool_tokens=tokens,
        largest_batch=largest,
        batch=batch,
        ttft_s=ttft,
        itl_s=decode_s(size, card, max(1, batch), load.context),
        idle_itl_s=decode_s(size, card, 1, load.context),
        prompts_s=1 / ttft,
        fits=largest >= load.users,
    )


#: Settings to try, the least change first. Each is (kv_dtype, weights).
FORMS = (("auto", "auto"), ("fp8_e4m3", "auto"), ("auto", "fp8"), ("fp8_e4m3", "fp8"))
MAX_RANKS = 16


def candidates(
    sizes: Callable[..., ModelSize], card: Card, load: PlannedLoad, share: float, ranks: int | None = None
) -> list[Fit]:
    """Returns the setups worth a look: on one card, then on 2, 4, ... until all users fit; the first that fits is best.

    `sizes(kv_dtype=, weights=, ranks=)` returns the model's size and raises ConfigError for settings that it refuses;
    the error is raised if every setup is refused.
    """
    found, refused = list[Fit](), list[ConfigError]()
    most = 1 if card.device == "cpu" else MAX_RANKS  # ranks on CPUs share one memory
    counts = [ranks] if ranks else [2**power for power in range(most.bit_length())]
    for count in counts:
        for kv_dtype, weights in FORMS:
            if "fp8" in kv_dtype + weights and not card.fp8_flop_s:
                continue
            try:
                size = sizes(kv_dtype="float8_e4m3" if "fp8" in kv_dtype else "auto", weights=weights, ranks=count)
            except ConfigError as error:
                refused.append(error)
                continue
            flags = (
                *_flags(kv_dtype, weights, count, load, card),
                *_adapter_flags(size),
                *(["--kv-groups"] if size.state_bytes else []),  # pods refuse the model without it
                *_pool_flags(size, card, share),
            )
            found.append(fit(size, card, load, share, flags))
        if any(setup.fits for setup in found):
            break
    if not found:
        raise refused[0]
    return found


def best_of(found: list[Fit]) -> Fit:
    """Returns the first setup that holds all users, else the one that holds the most."""
    holding = [setup for setup in found if setup.fits]
    return holding[0] if holding else max(found, key=lambda setup: (setup.largest_batch, setup.pool_bytes))


def _flags(kv_dtype: str, weights: str, ranks: int, load: PlannedLoad, card: Card) -> tuple[str, ...]:
    flags = [f"--max-model-len {load.context}"]
    flags += [f"--tensor-parallel-size {ranks}"] if ranks > 1 else []
    flags += [f"--kv-dtype {kv_dtype}"] if kv_dtype != "auto" else []
    flags += [f"--weights {weights}"] if weights != "auto" else []
    flags += [f"--max-seqs {load.users}"] if load.users > DEFAULT_MAX_SEQS[card.device] else []
    return tuple(flags)


def _adapter_flags(size: ModelSize) -> tuple[str, ...]:
    if not size.max_adapters:
        return ()
    return f"--max-adapters {size.max_adapters}", f"--max-adapter-rank {size.max_adapter_rank}"


def _pool_flags(size: ModelSize, card: Card, share: float) -> tuple[str, ...]:
    """Returns the setting with which a pod takes the pool that the estimate has."""
    if card.device == "cpu":
        pool = pool_bytes(size, card, share)
        return (f"--kv-memory {int(pool) >> 20}MiB",) if pool > 0 else ()
    return (f"--gpu-memory-utilization {share:g}",) if share != DEFAULT_SHARE else ()


def sizes_of(
    model_size: Callable[..., ModelSize], model_dir: object, dtype: str, **options: int
) -> Callable[..., ModelSize]:
    """Returns the function that `candidates` takes, for a model directory; each size is computed once."""
    return functools.cache(functools.partial(model_size, model_dir, dtype=dtype, **options))
