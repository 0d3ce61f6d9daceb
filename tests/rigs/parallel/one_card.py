"""Two ranks as two processes on one GPU: `python -m tests.rigs.parallel.one_card CONFIG_DIR '{"cuda_graphs": true}'`.

NCCL refuses two ranks on one GPU, so sums and broadcasts use the one-shot kernel over CUDA IPC memory of the same card;
vectors that are too long for it go over gloo, which a CUDA graph cannot capture. The kernels of two processes take
turns: a kernel that waits for the other rank uses up its time slice. A sum then takes milliseconds, and times mean
nothing. The program prints a JSON object (`Result`). A hanging kernel ends only with the process, so tests run it as a
child with a time limit.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
from torch import Tensor

from common.types import SamplingParams
from engine.engine import Engine
from engine.llm import LLM
from engine.parallel import rank as ranks
from engine.parallel.collectives import Collectives
from engine.parallel.leader import TensorParallelBuilder
from engine.parallel.one_shot import OneShotReduce
from engine.parallel.rank_group import RankGroup

CARD = torch.device("cuda", 0)
PROMPTS = [[(7 * i + 3 * n) % 150 + 3 for i in range(n)] for n in (1, 17, 70, 100, 33)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2),
    SamplingParams(seed=3, max_tokens=10, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(seed=5, temperature=0.8, top_p=0.9, max_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=12),
]


class Result(TypedDict):
    """What the program prints."""

    ids: list[list[int]]  # Tokens of each answer, twice: the second time with cached prefixes.
    graphs: list[int]  # Captured graphs of decode steps and of prompts on rank 0.
    lost_s: float | None  # Seconds from the loss of rank 1 to the end of all answers; None if it was not lost.
    lost_error: str  # Error of an answer after the loss.


class OneCardCollectives(Collectives):
    """The collectives of ranks on one card."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        *,
        one_shot: bool = False,
        graphs: bool = False,
    ) -> None:
        super().__init__(store, rank, size, torch.device("cpu"), host, graphs=graphs)
        assert one_shot
        self._one_shot = OneShotReduce(store, rank, size, device)

    def all_reduce(self, part: Tensor) -> None:
        assert self._one_shot is not None
        if not self._one_shot(part):
            on_host = part.cpu()
            self._group.allreduce([on_host]).wait()
            part.copy_(on_host)

    def broadcast(self, tensor: Tensor) -> None:
        assert self._one_shot is not None
        if not self._one_shot.broadcast(tensor):
            on_host = tensor.cpu()
            self._group.broadcast([on_host], torch.distributed.BroadcastOptions()).wait()
            tensor.copy_(on_host)


class OneCardRank(ranks.Rank):
    """A rank that takes the card of rank 0."""

    def _open(self, message: Any) -> None:
        super()._open(message.__class__(message.kind, {**message.fields, "device": str(CARD)}, message.payload))


def command(rank: int, master: str) -> list[str]:
    return [sys.executable, "-m", "tests.rigs.parallel.one_card", "--rank", str(rank), master]


def answer(llm: LLM, adapter: str | None) -> list[list[int]]:
    """Returns the tokens of all answers, twice. adapter: a directory; every second answer has this adapter."""
    names: list[str | None] = [None] * len(PROMPTS)
    if adapter is not None:
        llm.add_adapter(Path(adapter), "one")
        names[::2] = ["one"] * len(names[::2])
    answers: list[list[int]] = []
    for extra in ([], [9]):
        asked = [[*prompt, *extra] for prompt in PROMPTS]
        for done in llm.generate(asked, PARAMS, adapter=names if adapter else None, ignore_eos=True):
            assert done.error is None, done.error
            answers.append(done.ids)
    return answers


def run(model_dir: Path, options: dict[str, Any], *, lose: bool) -> Result:
    """Runs rank 0. options: settings of the engine, and `adapter` for `answer`."""
    adapter = options.pop("adapter", None)
    own: dict[str, Any] = {"device": "cuda", "dtype": "float32", "load_format": "dummy", "tensor_parallel_size": 2}
    own |= {"tensor_parallel_reduce": "one_shot", "max_seqs": 4, "chunk_tokens": 64, "prompt_step_tokens": 64}
    own |= {"block_size": 16, "num_blocks": 64, "max_model_len": 256}
    llm = LLM(model_dir, **(own | options))
    engine = llm.engine
    answers = answer(llm, adapter)
    engine.pool.check_integrity()
    steps = engine.runner.decode_step, engine.runner.prompt_step
    graphs = [0 if step is None else len(step._graphs._graphs) for step in steps]
    if not lose:
        engine.close()
        return {"ids": answers, "graphs": graphs, "lost_s": None, "lost_error": ""}
    assert engine.rank_group is not None
    pid, lost_at = engine.rank_group.pids[0], [0.0]

    def kill() -> None:
        lost_at[0] = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    threading.Timer(1.0, kill).start()
    long = SamplingParams(temperature=0.0, max_tokens=150)
    failed = [llm.generate([PROMPTS[1]], long, ignore_eos=True)[0] for _ in range(3)][-1]
    return {"ids": answers, "graphs": graphs, "lost_s": time.monotonic() - lost_at[0], "lost_error": str(failed.error)}


def main(argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with pytest.MonkeyPatch.context() as patch:
        if argv[0] == "--rank":
            patch.setattr(ranks, "Collectives", OneCardCollectives)
            patch.setattr(ranks, "Rank", OneCardRank)
            code = ranks.main(list(argv[1:]))
            logging.shutdown()
            os._exit(code)
        patch.setattr("engine.parallel.leader.Collectives", OneCardCollectives)
        patch.setattr(TensorParallelBuilder, "check", lambda *_: None)
        defaults = Engine.__init__.__kwdefaults__
        assert defaults is not None
        patch.setitem(defaults, "start_ranks", functools.partial(RankGroup.start, command=command))
        result = run(Path(argv[0]), json.loads(argv[1]), lose=argv[2:] == ["--lose"])
        sys.stdout.write(f"{json.dumps(result)}\n")
        sys.stdout.flush()
        os._exit(0)  # a kernel that hangs would keep the process


if __name__ == "__main__":
    main(sys.argv[1:])
