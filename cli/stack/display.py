"""Display of a running stack: a live table on a terminal, otherwise one line per change."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.stack.supervisor import Service, State

REFRESH_S = 0.25
_STYLE = {
    State.STOPPED: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.UNREADY: "red",
    State.WAITING: "red",
}


class Board:
    """Shows the services inside the context `showing`. say() may be called at any time on the event loop."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._draw: Callable[[], None] = lambda: None  # inside of `showing`

    def say(self, line: str) -> None:
        """Prints one message."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        """Draws now."""
        self._draw()

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
            seen[service.spec.name] = now
            took = f" after {service.ready_after_s:.1f} s" if service.state is State.READY else ""
            self.say(f"{service.spec.name:<10} {service.state.value}{took} ({service.spec.address}, pid {now[1]})")

    @contextlib.asynccontextmanager
    async def _ticking(self, draw: Callable[[], None]) -> AsyncIterator[None]:
        """Draws periodically, and at the end of the block unless it raises."""

        async def tick() -> None:
            while True:
                draw()
                await asyncio.sleep(REFRESH_S)

        self._draw = draw
        task = asyncio.create_task(tick())
        try:
            yield
            draw()
        finally:
            self._draw = lambda: None
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
        if service.ready_after_s is not None:
            note = f"ready after {service.ready_after_s:.1f} s"
        if service.restarts:
            note += f", {service.restarts} restarts"
        pid = service.spec.process.pid if service.spec.process.alive else None
        table.add_row(
            service.spec.name,
            service.spec.role,
            service.spec.address,
            str(pid or "-"),
            Text(state.value, style=_STYLE[state]),
            note,
        )
    return table
