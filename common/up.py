"""`baton up`: the whole stack on this machine, for as long as somebody wants it, or for one answer.

starting -> serving (or answering once) -> stopping. The first Ctrl-C stops everything in order, the second kills it.
Our own SIGKILL is the kernel's business: every child is tied to this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from common.config import UpConfig
from common.demo import show_answer
from common.display import Board
from common.models import resolve_model
from common.stack import Stack
from common.supervisor import Supervisor

READY_TIMEOUT_S = 600.0
DRAIN_GRACE_S = 35.0  # a little more than the services' own
KEPT_LOG_DIRS = 10


async def run(config: UpConfig, *, once: str | None, max_tokens: int) -> int:
    """Serves until a signal, or until `once` is answered; the process's exit code.

    ConfigError for a wrong configuration, Unavailable when a process does not come up; all processes have ended then.
    """
    board = Board(Console(highlight=False))
    model_dir = await asyncio.to_thread(resolve_model, config.model, say=board.say)
    log_dir = Path(config.log_dir) if config.log_dir else _new_log_dir()
    log_dir.mkdir(parents=True, exist_ok=True)
    stack = Stack.plan(config, model_dir, log_dir)
    supervisor = Supervisor(stack.specs, on_event=board.say)
    stop = asyncio.Event()
    try:
        with _signals(stop, supervisor.kill):
            try:
                return await _until(stop, _session(board, stack, supervisor, once, max_tokens))
            finally:
                board.say("stopping")
                await supervisor.stop(DRAIN_GRACE_S)
    finally:
        stack.close()


async def _session(board: Board, stack: Stack, supervisor: Supervisor, once: str | None, max_tokens: int) -> int:
    async with board.showing(supervisor.services):
        await supervisor.start(READY_TIMEOUT_S)
        if once is None:
            board.console.print(_welcome(stack))
            await supervisor.failure()
    assert once is not None
    return await asyncio.to_thread(show_answer, board.console, stack.base_url, stack.model, once, max_tokens)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, int]) -> int:
    """The work's result; 0 when it was stopped before its end."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else 0
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.wait((task, stopped))


@contextlib.contextmanager
def _signals(stop: asyncio.Event, kill: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`, the second kills and exits."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            kill()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _welcome(stack: Stack) -> str:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"model": stack.model, "stream": True, "messages": messages})
    return f"""
[bold]{escape(stack.model)}[/bold] is served on [bold]{stack.base_url}[/bold] (gRPC on {stack.grpc_address})

  curl -N {stack.base_url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{escape(body)}'

  from openai import OpenAI
  client = OpenAI(base_url="{stack.base_url}", api_key="none")
  messages = {escape(json.dumps(messages))}
  print(client.chat.completions.create(model="{stack.model}", messages=messages).choices\\[0].message.content)

logs in {escape(str(stack.log_dir))}; Ctrl-C stops everything
"""


def _new_log_dir() -> Path:
    """A fresh directory under the user's state; only the last few are kept."""
    state = os.environ.get("XDG_STATE_HOME")
    runs = (Path(state) if state else Path.home() / ".local" / "state") / "baton" / "runs"
    with contextlib.suppress(FileNotFoundError):
        for old in sorted(runs.iterdir())[: -(KEPT_LOG_DIRS - 1)]:
            shutil.rmtree(old, ignore_errors=True)
    return runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
