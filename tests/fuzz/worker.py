"""A process that runs inputs of one target. It reports crashes and the sum to a file, a JSON object per line.

The input that runs is in a memory-mapped file, the mailbox, so that the parent can save it when this process ends or
hangs. Inputs follow from the seed, the target and the number of the worker. Only the time of an input is measured, so
a busy machine gives the same inputs and outcomes.
"""

from __future__ import annotations

import json
import logging
import mmap
import re
import resource
import struct
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from common.process.tether import die_with_parent
from tests.fuzz.target import FuzzTarget

LIMIT_S = 1.0  #: Processor time of this process that one input may take.
HANG_S = 20.0  #: Time after which the parent ends a worker whose input has not ended.
MAX_MEMORY = 6 << 30  #: Bytes of data that a worker may have; an input that needs more gets a MemoryError.
MAX_CORPUS = 3000
_HEAD = struct.Struct("<dQI")  # time.monotonic() at the start of the input (0: none runs), inputs before it, its length
_BOX_BYTES = 1 << 22


class Mailbox:
    """The input that a worker runs, in a file that both processes map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BOX_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BOX_BYTES)

    def put(self, done: int, data: bytes) -> None:
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, 0, time.monotonic(), done, len(data))

    def clear(self, done: int) -> None:
        _HEAD.pack_into(self._map, 0, 0.0, done, 0)

    def read(self) -> tuple[float, int, bytes]:
        """Returns when the input began (0: none runs), the number of inputs before it, and the input."""
        started, done, length = _HEAD.unpack_from(self._map)
        return started, done, self._map[_HEAD.size : _HEAD.size + length]


@dataclass(frozen=True, slots=True)
class Crash:
    """An input that ended with an error that is not documented, ended the process, or took too long."""

    kind: str  #: Type of the error and its place; equal for inputs that fail in the same way.
    text: str  #: Traceback, or what happened.
    data: bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "data": self.data.hex()}


class _ErrorLog(logging.Handler):
    """Keeps log records of errors: code that logs an unexpected error and goes on has crashed too."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("grpc"):  # gRPC logs bytes that are no message
            self.records.append(record)

    def check(self) -> None:
        """Raises AssertionError for the first record since the last call."""
        records, self.records = self.records, []
        for record in records:
            cause = record.exc_info[1] if record.exc_info else None
            raise AssertionError(f"logged by {record.name}: {record.getMessage()}") from cause


class InputRunner:
    """Runs inputs of an open target and recognises crashes."""

    def __init__(self, target: FuzzTarget) -> None:
        self._target = target
        self._log = _ErrorLog()
        logging.getLogger().addHandler(self._log)
        self.slowest_s = 0.0

    def close(self) -> None:
        logging.getLogger().removeHandler(self._log)

    def run(self, data: bytes, *, retry: bool = True) -> str | Crash:
        """Returns the outcome. A slow input has to be slow twice: the first run may load something."""
        self._log.records.clear()
        started = time.process_time()
        try:
            outcome = self._target.run(data)
            self._log.check()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Rust panics and SystemExit are no Exception
            return Crash(_kind(error), "".join(traceback.format_exception(error, limit=-12)), data)
        taken = time.process_time() - started
        if taken > LIMIT_S:
            return self.run(data, retry=False) if retry else Crash("slow", f"took {taken:.2f} s ({outcome})", data)
        self.slowest_s = max(self.slowest_s, taken)
        return outcome


def _kind(error: BaseException) -> str:
    """Returns the type of an error's first cause and the last place in this repository that raised it."""
    while (cause := error.__cause__) is not None:
        error = cause
    root = str(Path(__file__).resolve().parents[2])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(root)]
    place = f"{Path(frames[-1].filename).relative_to(root)}:{frames[-1].lineno}" if frames else "?"
    text = re.sub(r"\d+", "N", str(error).split("\n", 1)[0])[:60]
    return f"{type(error).__name__} at {place}" if frames else f"{type(error).__name__}: {text}"


def work(target: FuzzTarget, *, seed: str, inputs: int, first: int, box: Path, out: Path) -> None:
    """Runs the inputs `first` to `inputs` of a worker, and writes crashes and the sum to `out`."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    mailbox, rng = Mailbox(box), Random(f"{seed} {first}")
    with target, out.open("a") as report:
        runner = InputRunner(target)
        seeds = target.seeds()
        corpus = list(seeds)
        outcomes: dict[str, int] = {}
        started = time.monotonic()
        for number in range(first, inputs):
            data = seeds[number] if number < len(seeds) else target.make(corpus, rng)
            mailbox.put(number, data)
            outcome = runner.run(data)
            if isinstance(outcome, Crash):
                report.write(json.dumps(outcome.to_json()) + "\n")
                report.flush()
                continue
            if outcome not in outcomes and len(corpus) < MAX_CORPUS:
                corpus.append(data)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        mailbox.clear(inputs)
        spent = {"seconds": time.monotonic() - started, "slowest_s": runner.slowest_s}
        report.write(json.dumps({"outcomes": outcomes, **spent}) + "\n")


def replay(target: FuzzTarget, inputs: Sequence[bytes]) -> list[str | Crash]:
    """Runs saved inputs in this process."""
    with target, closing(InputRunner(target)) as runner:
        return [runner.run(data) for data in inputs]
