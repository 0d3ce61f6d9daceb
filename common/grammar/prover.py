"""Lets a child process prove grammars before this process compiles them. zygote.py is the program of the child.

A grammar may overflow the native stack, take gigabytes or run for minutes. A proof that does so ends only its child.
Verdicts are kept by the digest of the grammar, so a retry or n samples need one proof.

Measured with SmolLM2's 49k tokens on two cores: an ordinary schema is proven in 10 ms (8 ms of processor time) when
the process is warm, and 900 definitions in 150 ms. The process starts in 0.6 s, by `start` or the first grammar.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import BatonError, InvalidRequest, Overloaded, RateLimited, Unavailable, describe
from common.grammar.compiler import MASK_LIMIT_S, MAX_GRAMMAR_CHARS, GrammarSource
from common.grammar.zygote import FIELD, MEMORY
from common.types import Grammar

WALL_S = 1.4  #: Seconds after which a proof is ended. A flat schema of 100 kB of optional properties takes up to 1 s.
PATIENCE_S = 1.8  #: Seconds from `submit` to the verdict or to an error, unless the caller says otherwise.
POD_PATIENCE_S = 8.0  #: The same in a pod, where a gateway has proven the grammar.
LEAST_S = 0.2  #: A proof does not start with less time than this.
MAX_PROOFS = 8  #: Proofs at the same time.
MAX_CLIENT_PROOFS = 2  #: Proofs at the same time of one API key, or of one client address without a key.
MAX_WAITING = 64  #: Proofs that wait for their turn.
MAX_KEPT, MAX_KEPT_CHARS = 4096, 16 << 20  #: Max verdicts that are kept, and max characters of their grammars.
COSTLY_KEPT_S = 60.0  #: Seconds for which "too costly" is kept; the machine may have been busy.
_STUCK_S = 30.0  #: A process that has not answered for this time is replaced.
_START_S = 120.0  #: The same before its first answer. A process that starts on a busy machine is not stuck.

_TOO_COSTLY = {
    "time": f"compiling it takes too long; the limit is {WALL_S} s",
    "memory": f"compiling it takes more memory than the limit of {MEMORY >> 20} MiB",
    "crash": "compiling it exceeds the limits of the compiler",
    "mask": f"finding its next token takes more than {MASK_LIMIT_S * 1000:.0f} ms",
}

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Proof:
    body: bytes
    key: bytes
    client: str | None
    deadline: float
    result: Future[dict[str, Any]]
    patient: bool
    wall_s: float = 0.0
    sent: float = 0.0


class GrammarProver:
    """Proves the grammars of one model. Any thread; no call waits for the process.

    Args:
        eos_ids, vocab_size: as of GrammarTokenizer.
    """

    def __init__(self, model_dir: Path, eos_ids: Sequence[int], vocab_size: int = 0) -> None:
        self._args = [str(model_dir), str(vocab_size), *map(str, eos_ids)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: queue.SimpleQueue[bytes] | None = None  # to the process; b"" is the end
        self._number = 0
        self._proving: dict[int, _Proof] = {}  # by id
        self._waiting: list[_Proof] = []
        #: Proofs that run or wait, by key and client: a request does not wait for another client's turn.
        self._open: dict[tuple[bytes, str | None], _Proof] = {}
        self._clients: Counter[str | None] = Counter()  # proofs that run
        self._kept: OrderedDict[bytes, tuple[dict[str, Any], float]] = OrderedDict()  # verdict and when it expires
        self._kept_chars = 0

    @property
    def pid(self) -> int | None:
        """The process id of the child, None before the first grammar."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process if it does not run. Returns before it is ready."""
        with self._lock:
            self._start()

    def submit(
        self, source: GrammarSource, *, client: str | None = None, deadline: float | None = None
    ) -> Future[Grammar]:
        """Proves a grammar. The result is the grammar as pods compile it.

        The future raises InvalidRequest with the source's field, RateLimited if the client has too many grammars in
        proof, and Unavailable if the process fails.

        Args:
            client: The sender's API key or address; at most MAX_CLIENT_PROOFS of one client run, and clients take
                turns. None (in a pod) has no limit.
            deadline: time.monotonic() until which the proof may wait and run. None: PATIENCE_S from now, in a pod
                POD_PATIENCE_S; only there a proof may run for more than WALL_S.
        """
        answer: Future[Grammar] = Future()
        answer.set_running_or_notify_cancel()  # a proof is not cancelled: its verdict is kept

        def tell(done: Future[dict[str, Any]]) -> None:
            try:
                answer.set_result(_grammar(done.result(), source))
            except BatonError as error:
                answer.set_exception(type(error)(error.message, field=source.field, retry_after_s=error.retry_after_s))

        self._verdict(source, client, deadline).add_done_callback(tell)
        return answer

    def _verdict(self, source: GrammarSource, client: str | None, deadline: float | None) -> Future[dict[str, Any]]:
        result: Future[dict[str, Any]] = Future()
        try:
            value = json.dumps({"form": source.form, "value": source.value}).encode()
        except (ValueError, TypeError, RecursionError) as error:
            result.set_result({"verdict": "refused", "message": f"{FIELD} is not valid JSON: {error}"})
            return result
        if len(value) > MAX_GRAMMAR_CHARS and source.form != "text" and _chars(source.value) > MAX_GRAMMAR_CHARS:
            message = f"{FIELD} is longer than {MAX_GRAMMAR_CHARS} characters"
            result.set_result({"verdict": "refused", "message": message})
            return result
        now = time.monotonic()
        key = hashlib.sha256(value).digest()
        with self._lock:
            kept, expires = self._kept.get(key, (None, 0.0))
            if kept is not None and now < expires:
                self._kept.move_to_end(key)
                result.set_result(kept)
                return result
            if (proof := self._open.get((key, client))) is not None:
                return proof.result
            if deadline is None:
                deadline = now + (POD_PATIENCE_S if client is None else PATIENCE_S)
            proof = self._open[key, client] = _Proof(value, key, client, deadline, result, client is None)
            self._waiting.append(proof)
            self._next()
        return result

    def _next(self) -> None:
        """Sends the proofs that may run, first those of the clients with the fewest running proofs. Under the lock."""
        waiting = Counter(proof.client for proof in self._waiting)
        [(greediest, _)] = waiting.most_common(1) or [(None, 0)]
        last = next((proof for proof in reversed(self._waiting) if proof.client == greediest), None)
        for proof in sorted(self._waiting, key=lambda proof: self._clients[proof.client]):
            left = proof.deadline - time.monotonic()
            turn = proof.client is None or self._clients[proof.client] < MAX_CLIENT_PROOFS
            if left < LEAST_S or (len(self._waiting) > MAX_WAITING and proof is last):
                self._waiting.remove(proof)
                busy = RateLimited("too many grammars are being compiled for this client", retry_after_s=WALL_S)
                self._finish(proof, busy)
            elif turn and len(self._proving) < MAX_PROOFS:
                self._waiting.remove(proof)
                self._send(proof, left if proof.patient else min(left, WALL_S))

    def _send(self, proof: _Proof, wall_s: float) -> None:
        self._number += 1
        proof.wall_s, proof.sent = wall_s, time.monotonic()
        head = json.dumps({"id": self._number, "wall_s": wall_s}).encode()
        body = head[:-1] + b", " + proof.body[1:]
        try:
            frames = self._start()
        except OSError as error:
            _log.warning("the process that proves grammars cannot be started: %s", describe(error))
            self._finish(proof, Unavailable("grammars cannot be compiled now", retry_after_s=1.0))
            return
        self._proving[self._number] = proof
        self._clients[proof.client] += 1
        frames.put(len(body).to_bytes(4, "big") + body)

    def _start(self) -> queue.SimpleQueue[bytes]:
        if self._frames is not None:
            return self._frames
        mine, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "common.grammar.zygote", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *self._args],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "RUST_BACKTRACE": "0"},
            )
        mine.settimeout(1.0)
        frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._frames = frames
        writer = threading.Thread(target=_write, args=(mine, frames), name="grammar-prover-writer", daemon=True)
        writer.start()
        args = (mine, self._process, frames, writer)
        threading.Thread(target=self._read, args=args, name="grammar-prover", daemon=True).start()
        return frames

    def _read(
        self,
        sock: socket.socket,
        process: subprocess.Popen[bytes],
        frames: queue.SimpleQueue[bytes],
        writer: threading.Thread,
    ) -> None:
        """Takes the answers of one process until it ends."""
        inbox, limit_s = bytearray(), _START_S
        while True:
            try:
                chunk = sock.recv(1 << 20)
            except TimeoutError:
                with self._lock:
                    oldest = min((proof.sent for proof in self._proving.values()), default=time.monotonic())
                if time.monotonic() - oldest < limit_s:
                    continue
                chunk = b""
            except OSError:
                chunk = b""
            if not chunk:
                break
            inbox += chunk
            while len(inbox) >= 4 and len(inbox) >= (end := 4 + int.from_bytes(inbox[:4], "big")):
                limit_s = _STUCK_S
                self._take(json.loads(inbox[4:end]))
                del inbox[:end]
        process.kill()
        process.wait()
        frames.put(b"")
        writer.join()  # its writes fail, because the process has ended
        sock.close()
        _log.warning("the process that proves grammars has ended; the next grammar starts another one")
        with self._lock:
            self._frames = None
            lost, self._proving = self._proving, {}
            self._clients.clear()
            for proof in lost.values():
                self._finish(proof, Unavailable("grammars cannot be compiled now", retry_after_s=1.0))
            self._next()

    def _take(self, answer: dict[str, Any]) -> None:
        with self._lock:
            if (proof := self._proving.pop(answer["id"], None)) is None:
                return
            self._clients -= Counter([proof.client])
            if answer["verdict"] == "failed":
                _log.error("trying a grammar failed: %s", answer.get("cause", "the child ended without an answer"))
                self._finish(proof, Unavailable("grammars cannot be compiled now", retry_after_s=1.0))
            elif answer["verdict"] == "busy":
                self._finish(proof, Overloaded("the grammar was not compiled in time", retry_after_s=1.0))
            else:
                if answer["verdict"] != "costly" or proof.wall_s >= WALL_S:
                    self._keep(proof, answer)
                self._finish(proof, answer)
            self._next()

    def _keep(self, proof: _Proof, answer: dict[str, Any]) -> None:
        lasts = COSTLY_KEPT_S if answer["verdict"] == "costly" else float("inf")
        old = self._kept.pop(proof.key, None)
        self._kept_chars += len(answer.get("text") or "") - (0 if old is None else len(old[0].get("text") or ""))
        self._kept[proof.key] = answer, time.monotonic() + lasts
        while len(self._kept) > MAX_KEPT or self._kept_chars > MAX_KEPT_CHARS:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._kept_chars -= len(dropped.get("text") or "")

    def _finish(self, proof: _Proof, outcome: dict[str, Any] | BatonError) -> None:
        """Gives the outcome to the callers. The lock is held, so their callbacks must not use this prover."""
        self._open.pop((proof.key, proof.client), None)
        if isinstance(outcome, BatonError):
            proof.result.set_exception(outcome)
        else:
            proof.result.set_result(outcome)


def _write(sock: socket.socket, frames: queue.SimpleQueue[bytes]) -> None:
    """Writes frames until b"" or until the process has ended. A process that does not read delays only this thread."""
    while left := memoryview(frames.get()):
        while left:
            try:
                left = left[sock.send(left) :]
            except TimeoutError:
                continue  # the process starts, or `_read` will replace it
            except OSError:
                return


def _chars(value: Any) -> int:
    """Returns how many characters a client's value has: as it is if it is a text, else as compact JSON."""
    if isinstance(value, str):
        return len(value)
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _grammar(answer: dict[str, Any], source: GrammarSource) -> Grammar:
    """Returns the proven grammar, or raises InvalidRequest with the source's field."""
    if answer["verdict"] == "proven":
        return Grammar(source.value if answer["text"] is None else answer["text"], source.field)
    if answer["verdict"] == "refused":
        raise InvalidRequest(answer["message"].replace(FIELD, source.field), field=source.field)
    raise InvalidRequest(f"{source.field} is too costly: {_TOO_COSTLY[answer['reason']]}", field=source.field)


@cache
def prover_of(model_dir: Path, eos_ids: tuple[int, ...], vocab_size: int = 0) -> GrammarProver:
    """Returns this process's prover for a model."""
    return GrammarProver(model_dir, eos_ids, vocab_size)
