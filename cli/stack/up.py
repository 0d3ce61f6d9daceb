"""Runs and displays a stack on this machine, until a signal or until one piece of work is done.

    starting --> serving, or working --> stopping

The first Ctrl-C stops all processes in order; running answers get drain_s to end. The second one kills them. If this
process is killed by SIGKILL, the kernel kills the children.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from cli.demo.model import prepared
from cli.probes import redis_trouble
from cli.stack.stack import Stack
from cli.stack.supervisor import Service, State, Supervisor
from common.model.directory import default_served_name, expected_model_path, pinned_model, resolve_eagle_head
from common.model.hub import remove_partial_files
from common.redis.url import RedisUrl
from common.settings.up import UpConfig

READY_TIMEOUT_S = 600.0
TEARDOWN_GRACE_S = 25.0  # Time for a service to end after its drain; services limit themselves to 15 s.
KEPT_LOG_DIRS = 10
REFRESH_S = 0.25
TEMPERATURE = 0.3  # Of the examples. Small models answer sensibly only at low temperatures.
_STYLE = {"stopped": "dim", "starting": "yellow", "ready": "green", "unready": "red", "waiting": "red"}  # By State


class Board:
    """A live table of the services on a terminal, otherwise one line per change. say() works at any time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.refresh: Callable[[], None] = lambda: None  # Draws now; inside of `showing`

    def say_phase(self, service: Service, text: str) -> None:
        """Prints one finished phase of a service's start."""
        self.say(f"{service.spec.name:<10} {text}")

    def say(self, line: str) -> None:
        """Prints one message."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextlib.asynccontextmanager
    async def showing(self, services: Sequence[Service]) -> AsyncIterator[None]:
        """Keeps the display current inside the block."""
        if self.console.is_terminal:
            with Live(_table(services), console=self.console, auto_refresh=False) as live:
                async with self._ticking(lambda: live.update(_table(services), refresh=True)):
                    yield
        else:
            seen: dict[str, tuple[State, int | None]] = {}
            async with self._ticking(lambda: self._changes(services, seen)):
                yield

    def _changes(self, services: Sequence[Service], seen: dict[str, tuple[State, int | None]]) -> None:
        for service in services:
            now = (service.state, service.spec.process.pid)
            if seen.get(service.spec.name) == now or (service.state is State.STOPPED and service.spec.name not in seen):
                continue
            started = service.state is State.READY and seen.get(service.spec.name, now)[0] is not State.UNREADY
            seen[service.spec.name] = now
            took = f" after {service.ready_after_s:.1f} s" if started else ""
            again = f", restart {service.restarts}" if service.restarts else ""
            place = f"{service.spec.address}, pid {now[1]}{again}"
            self.say(f"{service.spec.name:<10} {service.state.value}{took} ({place})")

    @contextlib.asynccontextmanager
    async def _ticking(self, draw: Callable[[], None]) -> AsyncIterator[None]:
        """Draws periodically, and at the end of the block unless it raises."""

        async def tick() -> None:
            while True:
                draw()
                await asyncio.sleep(REFRESH_S)

        self.refresh = draw
        task = asyncio.create_task(tick())
        try:
            yield
            draw()
        finally:
            self.refresh = lambda: None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _table(services: Sequence[Service]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("name", "role", "address", "pid", "state", ""):
        table.add_column(column)
    for service in services:
        state = service.state
        note = f"{time.monotonic() - service.started_at:.0f} s" if state is State.STARTING else ""
        if note:
            note += f", {service.phase or 'loads its code'}"
        if service.ready_after_s is not None:
            note = f"ready after {service.ready_after_s:.1f} s"
        if service.restarts:
            times = "1 restart" if service.restarts == 1 else f"{service.restarts} restarts"
            ago = f", the last one {time.monotonic() - service.started_at:.0f} s ago" if service.ready_after_s else ""
            note += f"{', ' * bool(note)}{times}{ago}"
        pid = service.spec.process.pid if service.spec.process.alive else None
        spec, shown = service.spec, Text(state.value, style=_STYLE[state])
        table.add_row(spec.name, spec.role, spec.address, str(pid or "-"), shown, note)
    return table


Work = Callable[[Board, Stack], Coroutine[Any, Any, int]]


async def run(config: UpConfig, *, once: str | None, browse: bool = False) -> int:
    """Serves until a signal, or until the prompt `once` is answered; `browse` opens the dashboard. See run_stack."""

    async def answer(board: Board, stack: Stack) -> int:
        from cli.demo.answer import show_answer

        assert once is not None
        where, key = " on this CPU" if _surely_cpu(config.device) else "", next(iter(config.api_key), None)
        return await asyncio.to_thread(
            show_answer, board.console, stack.base_url, stack.model, once, config.max_tokens, where=where, api_key=key
        )

    return await run_stack(config, None if once is None else answer, browse=browse)


async def run_stack(config: UpConfig, work: Work | None, *, browse: bool = False) -> int:
    """Serves until a signal, or until `work` is done; returns the exit code. `browse` opens the dashboard when ready.

    Raises ConfigError for a wrong configuration, Unavailable if a process does not become ready. All processes have
    ended when this function returns or raises.
    """
    began = time.monotonic()
    board = Board(Console(highlight=False))
    log_dir = Path(config.log_dir) if config.log_dir else _new_log_dir()
    # Ports are reserved first, so that a port in use is reported before the model conversion, which takes a minute.
    config = await asyncio.to_thread(_pinned, config)
    stack = Stack.plan(config, expected_model_path(config.model), log_dir, say=board.say)
    try:
        if config.redis is not None:
            await _report_missing_redis(config.redis, board.say)
        with _ending_at_once(stack):
            await asyncio.to_thread(_prepare, config, board.say)
        log_dir.mkdir(parents=True, exist_ok=True)
        supervisor = Supervisor(stack.specs, on_event=board.say, on_phase=board.say_phase)
        stop = asyncio.Event()
        with _signals(stop, supervisor.kill):
            try:
                return await _until(stop, _session(board, stack, supervisor, work, began, browse))
            finally:
                wait = f": waits up to {config.drain_s:g} s for running answers; Ctrl-C again kills"
                board.say(f"stopping{wait if stop.is_set() else ''}")
                await supervisor.stop(config.drain_s + TEARDOWN_GRACE_S)
    finally:
        stack.close()


async def _report_missing_redis(url: str, say: Callable[[str], None]) -> None:
    """Says that a Redis does not answer: the stack waits for it, because the gateway finds its pods there."""
    if (problem := await redis_trouble(url)) is not None:
        away = f"{RedisUrl.parse(url)} does not answer ({problem.rstrip('.')})"
        say(f"{away}: the stack waits for it. Without --redis a stack starts a Valkey of its own")


def _pinned(config: UpConfig) -> UpConfig:
    """The settings with commits in the names of a hub's models, so that all processes use the same files."""
    draft = config.speculation_model
    return dataclasses.replace(
        config,
        model=pinned_model(config.model),
        served_name=config.served_name or default_served_name(config.model),
        speculation_model=None if draft is None else pinned_model(str(draft)),
    )


def _prepare(config: UpConfig, say: Callable[[str], None]) -> None:
    """Converts or downloads the missing files of the models. Raises ConfigError."""
    weights, draft = config.load_format == "auto", config.speculation_model
    prepared(config.model, weights=weights, say=say)
    if config.speculation == "draft_model":
        prepared(str(draft), weights=weights, say=say)
    elif draft is not None:
        resolve_eagle_head(str(draft), weights=weights, say=say)


@contextlib.contextmanager
def _ending_at_once(stack: Stack) -> Iterator[None]:
    """SIGINT and SIGTERM end this process at once. A download thread would otherwise end only with its file."""

    def end(number: int, _frame: object) -> None:
        stack.close()
        remove_partial_files()
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _session(
    board: Board, stack: Stack, supervisor: Supervisor, work: Work | None, began: float, browse: bool
) -> int:
    async with board.showing(supervisor.services):
        await supervisor.start(READY_TIMEOUT_S)
        if work is None:
            board.refresh()  # shows "ready" above the welcome text
            _welcome(board, stack, time.monotonic() - began)
            if browse:
                await _open(board, f"{stack.origin}/#/playground")
            await supervisor.failure()
    assert work is not None
    return await work(board, stack)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, int]) -> int:
    """The result of the work; 0 if `stop` is set before."""
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


def _welcome(board: Board, stack: Stack, took_s: float) -> None:
    """Prints how to use the stack: without indent and line breaks, so that commands can be copied."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"model": stack.model, "stream": True, "temperature": TEMPERATURE, "messages": messages})
    link = Style(bold=True, link=stack.base_url)
    head = Text.assemble(
        *("\nready after ", f"{took_s:.1f} s: ", (stack.model, "bold"), " is served on ", (stack.base_url, link)),
        f" (gRPC on {stack.grpc_address})",
    )
    board.console.print(head, soft_wrap=True)
    key = " -H 'Authorization: Bearer YOUR_KEY'" if stack.needs_key else ""
    board.say(f"""
curl -N {stack.base_url}/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}

from openai import OpenAI
client = OpenAI(base_url="{stack.base_url}", api_key="{"YOUR_KEY" if stack.needs_key else "none"}")
messages = {json.dumps(messages)}
answer = client.chat.completions.create(model={json.dumps(stack.model)}, messages=messages, temperature={TEMPERATURE})
print(answer.choices[0].message.content)
""")
    page = f"{stack.origin}/"
    board.console.print(Text.assemble("dashboard: ", (page, Style(link=page)), " (with a playground)"), soft_wrap=True)
    board.say(f"in a terminal: baton chat {stack.origin}, baton bench {stack.origin}")
    board.say(f"logs in {stack.log_dir}; Ctrl-C stops everything\n")


async def _open(board: Board, page: str) -> None:
    """Opens a page in the user's browser; says so if there is none."""
    import webbrowser

    if not await asyncio.to_thread(webbrowser.open, page):
        board.say(f"no browser to open {page}")


def _surely_cpu(device: str) -> bool:
    """Whether pods with this `device` certainly compute on the CPU; with `auto` a driver may offer a GPU."""
    return device == "cpu" or (device == "auto" and not any(Path(f"/dev/{n}").exists() for n in ("nvidiactl", "dxg")))


def _new_log_dir() -> Path:
    """A new log directory in the user's state directory; keeps the latest old ones and those of running stacks."""
    state = os.environ.get("XDG_STATE_HOME")
    runs = (Path(state) if state else Path.home() / ".local" / "state") / "baton" / "runs"
    with contextlib.suppress(FileNotFoundError):
        ended = sorted(run for run in runs.iterdir() if not _runs(run))
        for old in ended[: -(KEPT_LOG_DIRS - 1)]:
            shutil.rmtree(old, ignore_errors=True)
    return runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _runs(log_dir: Path) -> bool:
    """Whether the process with the pid in the directory's name is alive, or the pid was reused."""
    pid = log_dir.name.rpartition("-")[2]
    if not pid.isdecimal() or int(pid) == 0:
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(pid), 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
