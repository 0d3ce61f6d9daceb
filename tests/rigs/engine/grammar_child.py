"""Compiles grammars in processes of their own, since some end the process: `with GrammarChild(model_dir) as child`.

Run as a program, it takes lines of JSON, forks for each one, and answers how the fork ended. A fork compiles in a
thread of a pool, as gateways and pods do.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from common.errors import InvalidRequest
from common.grammar import limits
from common.grammar.compiler import GrammarCompiler, GrammarTokenizer
from common.types import Grammar

COMPILED = "compiled"
OVERFLOW = f"killed by {signal.SIGSEGV.name}"


class GrammarChild:
    """A process that has read the tokenizer, and forks for each grammar."""

    def __init__(self, model_dir: Path) -> None:
        command = [sys.executable, "-m", "tests.rigs.engine.grammar_child", str(model_dir)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0

    def outcome(self, text: str, *, stack: int | None = None, checked: bool = True) -> str:
        """COMPILED, "refused: " and why, or the signal that killed the process.

        stack: of the thread that compiles, in bytes. checked: the limits hold.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"text": text, "stack": stack, "checked": checked}), file=self._process.stdin, flush=True)
        outcome: str = json.loads(self._process.stdout.readline())
        return outcome


def _compile(tokenizer: GrammarTokenizer, order: dict[str, Any]) -> str:
    if order["stack"] is not None:
        limits.COMPILE_STACK = order["stack"]
    if not order["checked"]:
        limits.check = lambda text, field: None
    threads = ThreadPoolExecutor(1)
    try:
        threads.submit(GrammarCompiler(tokenizer).compile, Grammar(order["text"], "f")).result(60)
    except InvalidRequest as error:
        return f"refused: {error.message}" if error.field == "f" else f"refused for the field {error.field}"
    return COMPILED


def _forked(tokenizer: GrammarTokenizer, order: dict[str, Any]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        outcome = "failed"
        try:
            outcome = _compile(tokenizer, order)
        finally:
            os.write(writer, outcome.encode()[:4000])
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said.decode(errors="replace") if code == 0 else f"killed by {signal.Signals(-code).name}"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = GrammarTokenizer(Path(sys.argv[1]), eos_ids=(2,), vocab_size=49152)
    tokenizer.get()
    assert threading.active_count() == 1
    for line in sys.stdin:
        print(json.dumps(_forked(tokenizer, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
