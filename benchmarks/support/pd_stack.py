"""A whole Baton with random weights, and a client that records token times, for the benchmarks of the hand-over.

The model has the shape of Llama-3.1-8B with 49,152 tokens. `tiny` checks on a CPU that a benchmark works. `small` has
heads that the GPU kernels support. The tokenizer is synthetic: prompts are token ids and requests have ignore_eos, so
only its size matters. Requests go through the real gateway by gRPC. All times are from the client's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.support import local_stack, report
from benchmarks.support.local_stack import connections
from benchmarks.support.shapes import LLAMA_8B, SHAPES, WINDOWED, llama
from cli.stack.stack import Stack
from common.pb import inference_pb2, inference_pb2_grpc
from common.settings.up import UpConfig

MODEL = "bench"
FLAGS = {"local-prefill": "off"}  # Flags of the pods: decode pods compute no prompt.
PACKAGES = ("torch", "triton", "nixl-cu13", "grpcio")
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_8B | {"vocab_size": 49152},
    "tiny": SHAPES["tiny"].config | {"max_position_embeddings": 4096},
    "windowed": WINDOWED,
    "windowed-tiny": WINDOWED
    | {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "sliding_window": 32}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "max_window_layers": 2},
    "small": llama(1024, 512, 1024, layers=4, heads=8, kv_heads=2, context=8192, torch_dtype="float32"),
}


def arguments(description: str | None, metrics: str, shapes: Iterable[str]) -> argparse.ArgumentParser:
    """Returns a parser with --out and the options of `running`."""
    parser = report.arguments(description, metrics)
    parser.add_argument("--shape", choices=shapes, default="llama-3.1-8b")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--allow-tcp", action="store_true", help="accept TCP as transport of the KV")
    flags_help = "flags of the pods, for example chunk-tokens=4096"
    parser.add_argument("--flags", nargs="+", default=[], metavar="NAME=VALUE", help=flags_help)
    return parser


def make_model(directory: Path, shape: str) -> None:
    """Writes config.json and a byte-level tokenizer in which every token is a word."""
    config = CONFIGS[shape]
    (directory / "config.json").write_text(json.dumps(config))
    vocab = {f"Ġ{_word(number)}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


def _word(number: int) -> str:
    rest, letter = divmod(number, 26)
    return chr(ord("a") + letter) + (_word(rest) if rest else "")


def prompts(shape: str, count: int, length: int, seed: int | str) -> list[list[int]]:
    """Returns unique random prompts. Prompts of different seeds differ too."""
    rng, size = random.Random(f"{seed}-{length}"), CONFIGS[shape]["vocab_size"]
    return [rng.choices(range(size), k=length) for _ in range(count)]


@dataclass(slots=True)
class TimedAnswer:
    """An answer with the time of each token. Times are from time.perf_counter()."""

    request_id: str
    due: float  # When the request was to be sent.
    at: list[float] = field(default_factory=list)  # When each token arrived. The first token comes from prefill.
    ids: list[int] = field(default_factory=list)  # The tokens.
    sent_late_s: float = 0.0  # Delay of sending after `due`.

    @property
    def ttft_s(self) -> float:
        return self.at[0] - self.due

    @property
    def gap12_s(self) -> float:
        """Time from token 1 to token 2: the hand-over and the first decode step."""
        return self.at[1] - self.at[0]

    @property
    def gaps_s(self) -> list[float]:
        """Times between all later tokens."""
        return [b - a for a, b in zip(self.at[1:], self.at[2:], strict=False)]


class StackClient:
    def __init__(self, stack: Stack) -> None:
        self.answers: list[TimedAnswer] = []  # All answers, running ones included.
        options = [(f"grpc.max_{kind}_message_length", 64 << 20) for kind in ("send", "receive")]
        self._channel = grpc.aio.insecure_channel(stack.grpc_address, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._debug = httpx.AsyncClient(base_url=stack.base_url.removesuffix("/v1"))

    async def ask(self, prompt: Sequence[int], tokens: int, *, due: float | None = None) -> TimedAnswer:
        """Requests a greedy answer of `tokens` tokens at the time `due` (None: now). RuntimeError if it fails."""
        ids = inference_pb2.TokenPrompt(ids=prompt)
        request = inference_pb2.GenerateRequest(model=MODEL, tokens=ids, max_tokens=tokens, temperature=0.0)
        request.ignore_eos = True
        if due is not None:
            await asyncio.sleep(due - time.perf_counter())
        now = time.perf_counter()
        answer = TimedAnswer("", now if due is None else due, sent_late_s=0.0 if due is None else now - due)
        self.answers.append(answer)
        try:
            async for message in self._stub.Generate(request):
                now = time.perf_counter()
                answer.request_id = message.request_id
                answer.at += [now] * len(message.tokens)
                answer.ids += [token.id for token in message.tokens]
        except grpc.aio.AioRpcError as e:
            raise RuntimeError(f"a request failed: {e.code().name}: {e.details()}") from e
        if len(answer.at) != tokens:
            raise RuntimeError(f"an answer has {len(answer.at)} tokens, expected {tokens}")
        return answer

    async def timeline(self, answer: TimedAnswer) -> dict[str, dict[str, Any]]:
        """Returns the gateway's events of the request by name; the last one if a name occurs several times."""
        timeline = (await self._debug.get(f"/debug/requests/{answer.request_id}")).raise_for_status().json()
        return {event["event"]: event for event in timeline["events"]}

    async def close(self) -> None:
        await self._channel.close()
        await self._debug.aclose()


@contextlib.asynccontextmanager
async def running(
    shape: str,
    device: str,
    *,
    aggregated: bool = False,
    allow_tcp: bool = False,
    dtype: str = "auto",
    flags: dict[str, str] | None = None,
) -> AsyncIterator[tuple[Stack, StackClient]]:
    """Runs one prefill and one decode pod (aggregated: two pods with both roles), each on its own GPU, and a client."""
    with tempfile.TemporaryDirectory(prefix="baton-model-") as folder:
        directory = Path(folder)
        make_model(directory, shape)
        config = UpConfig(
            model=str(directory),
            served_name=MODEL,
            port=0,
            device=device,
            dtype=dtype,
            load_format="dummy",
            max_model_len=min(CONFIGS[shape]["max_position_embeddings"], 20480),
            allow_tcp=allow_tcp,
            host_cache=0,
            log_level="info",
            drain_s=2.0,
        )
        pod_flags = {**(flags or {}), **({"role": "both"} if aggregated else {})}
        async with local_stack.running(config, directory, start_s=300.0, pod_flags=pod_flags) as stack:
            client = StackClient(stack)
            try:
                yield stack, client
            finally:
                await client.close()


def transport_of(stack: Stack) -> list[str]:
    """Returns the pods' log lines about their connections."""
    return [line for spec in stack.specs for line in connections(spec.process)]
