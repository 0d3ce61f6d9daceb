"""The process that proves grammars: it has built a model's tokenizer, and forks a child for each grammar.

    gateway or pod  --- GrammarProver --- socket --- this process (no threads) --- fork --- child: one proof

A proof runs what pods run: conversion, limits, compilation with its stack, first mask, and then a few answers of
random tokens. A child has its own limits of memory and time and dies alone. This process ends with its parent: the
socket ends, or its parent's pid changes. Children end with this process (PR_SET_PDEATHSIG).

A frame in either direction is a length (4 bytes, big-endian) and that many bytes of JSON. Orders have `id`, `form`,
`value` and `wall_s`. Answers have `id` and `verdict`: "proven" with `text`, `cpu_s` and `memory`; "refused" with
`message`, in which FIELD stands for the name of the field; "costly" with `reason`; "busy" if the time ran out
before the child had BUSY_SHARE of it on a processor; "failed" with `cause` if the proof itself failed.

Run as `python -m common.grammar.zygote FD PARENT_PID MODEL_DIR VOCAB_SIZE [EOS_ID ...]`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest, describe, public_name
from common.grammar.compiler import FORMS, JSON_OBJECT, MASK_LIMIT_S, CompiledGrammar, GrammarTokenizer, compile_grammar
from common.process.tether import die_with_parent

FIELD = "\x1ffield\x1f"  #: Stands for the field's name in messages, so that a verdict does not depend on it.
#: Address space of a child beyond that of this process, in bytes: 64 MiB of stack, as much for the allocator of that
#: thread, and the grammar. The largest ordinary grammar of the tests uses 43 MiB.
MEMORY = 512 << 20
CPU_S = 2  #: Processor seconds of a child, a whole number for the kernel; the wall limit usually ends it before.
BUSY_SHARE = 0.6  #: Share of its time that a child must have had on a processor to be called costly.
NICE = 10  #: Nice value of a child at its start.
LATE_NICE, LATE_S = 15, 0.15  #: Nice value of a child after LATE_S seconds, so that short proofs overtake long ones.
WALKS, WALK_TOKENS = 4, 12  #: Random answers of a proof, and the max tokens of each.
WALK_S = 0.4  #: Processor seconds after which no further token is tried.

_SOME_BITS = re.compile(rb"[^\0]")


@dataclass(slots=True)
class _Child:
    pid: int
    sock: socket.socket
    order_id: int
    start: float
    deadline: float
    late: bool = False
    answer: bytearray = field(default_factory=bytearray)


class _Zygote:
    def __init__(self, sock: socket.socket, tokenizer: GrammarTokenizer, parent: int) -> None:
        self._socket, self._tokenizer, self._parent = sock, tokenizer, parent
        self._inbox, self._outbox = bytearray(), bytearray()
        self._children: dict[int, _Child] = {}  # by the descriptor of their sockets
        #: A child without an order yet, which has proven a grammar to have its pages: a fork and its copies take 8 ms.
        self._spare: tuple[int, socket.socket] | None = None
        sock.setblocking(False)  # the parent may write while it does not read
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def run(self) -> None:
        """Returns when the parent is gone."""
        while os.getppid() == self._parent:
            for key, events in self._selector.select(0.02 if self._children else 1.0):
                if key.fd != self._socket.fileno():
                    self._read_child(key.fd)
                elif events & selectors.EVENT_READ and not self._read_orders():
                    return
            self._flush()
            if self._spare is None:
                with contextlib.suppress(OSError):
                    self._spare = self._fork(warm=True)
            now = time.monotonic()
            for child in self._children.values():
                if now > child.deadline:
                    os.kill(child.pid, signal.SIGKILL)  # its socket ends, and then it is reaped
                elif now > child.start + LATE_S and not child.late:
                    child.late = True
                    _renice(child.pid)

    def _read_orders(self) -> bool:
        """Forks for the orders that have arrived. Returns False at the end of the socket."""
        chunk = self._socket.recv(1 << 20)
        self._inbox += chunk
        while len(self._inbox) >= 4:
            end = 4 + int.from_bytes(self._inbox[:4], "big")
            if len(self._inbox) < end:
                break
            order = json.loads(self._inbox[4:end])
            del self._inbox[:end]
            self._prove(order)
        return bool(chunk)

    def _prove(self, order: dict[str, Any]) -> None:
        try:
            pid, sock = self._spare or self._fork()
            self._spare = None
            sock.sendall(json.dumps(order).encode())
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._send(
                {"id": order["id"], "verdict": "failed", "cause": f"no child could be started: {describe(error)}"}
            )
            return
        now = time.monotonic()
        self._children[sock.fileno()] = _Child(pid, sock, order["id"], now, now + order["wall_s"])
        self._selector.register(sock, selectors.EVENT_READ)

    def _fork(self, *, warm: bool = False) -> tuple[int, socket.socket]:
        """Returns the pid of a child that waits for its order, and this process's end of its socket."""
        mine, theirs = socket.socketpair()
        mine.settimeout(1.0)
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._selector.close()
                self._socket.close()
                mine.close()
                _child_main(self._tokenizer, theirs, me, warm=warm)
            finally:
                os._exit(0)
        theirs.close()
        return pid, mine

    def _read_child(self, descriptor: int) -> None:
        child = self._children[descriptor]
        chunk = child.sock.recv(1 << 20)
        child.answer += chunk
        if chunk:
            return
        self._selector.unregister(child.sock)
        child.sock.close()
        del self._children[descriptor]
        with contextlib.suppress(ValueError):
            self._send({**json.loads(child.answer), "id": child.order_id})
            self._flush()
            os.waitpid(child.pid, 0)  # takes as long as the kernel needs to free the memory
            return
        _, ended, used = os.wait4(child.pid, 0)
        status = os.waitstatus_to_exitcode(ended)
        answer: dict[str, Any] = {"verdict": "costly", "reason": "crash"}
        if status == 0:
            answer = {"verdict": "failed"}
        elif -status in (signal.SIGKILL, signal.SIGXCPU):
            cpu_s, now = used.ru_utime + used.ru_stime, time.monotonic()
            answer["reason"] = "time" if now > child.deadline or cpu_s > 0.9 * CPU_S else "memory"
            if cpu_s < BUSY_SHARE * min(now - child.start, CPU_S):
                answer = {"verdict": "busy"}
        elif -status == signal.SIGABRT:  # how Rust's allocator ends a process
            answer["reason"] = "memory"
        self._send({**answer, "id": child.order_id})

    def _send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self._outbox += len(body).to_bytes(4, "big") + body

    def _flush(self) -> None:
        if self._outbox:
            with contextlib.suppress(BlockingIOError):
                del self._outbox[: self._socket.send(self._outbox)]
            more = selectors.EVENT_WRITE if self._outbox else 0
            self._selector.modify(self._socket, selectors.EVENT_READ | more)


def _child_main(tokenizer: GrammarTokenizer, sock: socket.socket, zygote: int, *, warm: bool) -> None:
    die_with_parent(zygote)
    os.nice(NICE)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what native code says as it dies has parts of the grammar
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    size = MEMORY + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, limit in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    if warm:
        verdict(tokenizer, {"form": "json", "value": JSON_OBJECT})
    order = json.loads(b"".join(iter(lambda: sock.recv(1 << 20), b"")))
    with sock:  # closed before the process ends, which takes some ms
        sock.sendall(json.dumps(verdict(tokenizer, order)).encode())


def verdict(tokenizer: GrammarTokenizer, order: dict[str, Any]) -> dict[str, Any]:
    """Does the work of a child: tries the grammar of an order. Returns the answer without `id`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        grammar = FORMS[order["form"]](order["value"], field=FIELD)
        slowest = _walk(compile_grammar(tokenizer, grammar))
    except InvalidRequest as error:
        return {"verdict": "refused", "message": error.message}
    except UnicodeError:
        return {"verdict": "refused", "message": f"{FIELD} is not valid Unicode"}
    except (MemoryError, RecursionError):
        return {"verdict": "costly", "reason": "memory"}
    except Exception as error:  # its text may have parts of the grammar, which do not belong in a log
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"verdict": "failed", "cause": f"{public_name(error)} in {last.name}, {last.filename}:{last.lineno}"}
    if slowest > MASK_LIMIT_S:
        return {"verdict": "costly", "reason": "mask"}
    used = resource.getrusage(resource.RUSAGE_SELF)
    text = None if order["form"] == "text" else grammar.text
    return {
        "verdict": "proven",
        "text": text,
        "cpu_s": round(used.ru_utime + used.ru_stime, 6),
        "memory": (used.ru_maxrss - before) << 10,
    }


def _walk(compiled: CompiledGrammar) -> float:
    """Follows random answers. Returns the processor seconds of the slowest token. Matchers that fail are left alone."""
    slowest, rng, end = 0.0, random.Random(0), time.thread_time() + WALK_S
    for _ in range(WALKS):
        began = time.thread_time()
        matcher = compiled.matcher()
        for _ in range(WALK_TOKENS):
            mask = matcher.compute_bitmask()
            if matcher.is_stopped():
                break
            slowest = max(slowest, time.thread_time() - began)
            if time.thread_time() > end:
                return slowest
            start = rng.randrange(len(mask))
            found = _SOME_BITS.search(mask, start) or _SOME_BITS.search(mask)
            if found is None:
                break
            bits = [bit for bit in range(8) if found[0][0] >> bit & 1]
            began = time.thread_time()
            if not matcher.consume_token(found.start() * 8 + rng.choice(bits)):
                break
    return slowest


def _renice(pid: int) -> None:
    """Sets LATE_NICE for all threads of a process: Linux has a nice value for each."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), LATE_NICE)


def main(argv: list[str]) -> None:
    """Builds the tokenizer, then proves grammars until the parent is gone."""
    descriptor, parent, model_dir, vocab_size, *eos = argv
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes; the parent decides
        signal.signal(number, signal.SIG_IGN)
    tokenizer = GrammarTokenizer(Path(model_dir), eos_ids=[int(i) for i in eos], vocab_size=int(vocab_size))
    with contextlib.suppress(InvalidRequest):  # each proof says it again
        tokenizer.get()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as sock, contextlib.suppress(ConnectionError):
        _Zygote(sock, tokenizer, int(parent)).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
