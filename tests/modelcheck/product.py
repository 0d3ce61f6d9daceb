"""The product's modules as the explorer runs them: read from their files, on request with one line removed.

The modules are made anew and are not registered, so the rest of the process keeps its own. Time limits are shortened:
the clock of the model stands still, and a stored time that is moved into the past makes a timer fire.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Modules under test, a module after those that it imports.
MODULES = (
    "engine.kv.blocks",
    "kv_transfer.receiver.state_machine",
    "kv_transfer.sender.state_machine",
    "kv_transfer.receiver.transfers",
    "kv_transfer.sender.transfers",
    "kv_transfer.servicer",
)
#: Constants by module. Retries and waits are due at once. The grace is one tick: the machines count all ticks alike.
CONSTANTS: dict[str, dict[str, object]] = {
    "kv_transfer.receiver.state_machine": {"GRACE_S": 0.25, "_DRAIN_RETRY_S": (0.0, 0.0)},
    "kv_transfer.sender.state_machine": {
        "GRACE_S": 0.25,
        "_OPEN_RETRY_S": 0.0,
        "_COMMIT_RETRY_S": 0.0,
        "_MAX_RETRY_S": 0.0,
    },
    "kv_transfer.receiver.transfers": {"COMMIT_WAIT_S": 0.0, "_TICK_S": 0.0, "_PROCESS_CHECK_S": 0.0},
}


@dataclass(frozen=True, slots=True)
class Removal:
    """One line of a product file that is removed."""

    module: str
    function: str  # Name of the function that holds the line
    line: str  # The line, without indentation
    nth: int = 0  # Which of the equal lines of the function

    def apply(self, source: str) -> str:
        """Returns the source without the line. `pass` takes its place, because a block may not be empty.

        Raises ValueError if the function has no such line.
        """
        lines = source.splitlines()
        begins = [number for number, line in enumerate(lines) if line.lstrip().startswith(f"def {self.function}(")]
        if len(begins) != 1:
            raise ValueError(f"{self.module} has {len(begins)} functions {self.function}: name one function")
        seen = 0
        for number in range(begins[0] + 1, len(lines)):
            text = lines[number].strip()
            if text.startswith(("def ", "class ", "@")):
                break
            if text == self.line:
                if seen == self.nth:
                    indentation = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
                    return "\n".join([*lines[:number], f"{indentation}pass", *lines[number + 1 :], ""])
                seen += 1
        raise ValueError(f"{self.module}.{self.function} has no line {self.line!r}: choose another one")


class Swallowed:
    """Logger of the modules. It keeps errors that the product logs and does not raise."""

    SHARED = True  # Copies of a pod have the same logger

    def __init__(self) -> None:
        self.errors: list[str] = []

    def exception(self, text: str, *_: object) -> None:
        self.errors.append(f"{text}: {sys.exc_info()[1]!r}")

    def info(self, *_: object, **__: object) -> None: ...

    warning = error = debug = info


@dataclass(frozen=True, slots=True)
class Product:
    """The names that the model uses, from freshly made modules."""

    BlockPool: Any
    ReceiverMachine: Any
    ReceiverState: Any
    SenderState: Any
    IncomingTransfer: Any
    TransferReceiver: Any
    TransferSender: Any
    WriteLimits: Any
    TransferServicer: Any
    log: Swallowed


@contextmanager
def _own_modules() -> Iterator[None]:
    """Gives the process its own modules back at the end of the scope."""
    before = {name: sys.modules.get(name) for name in MODULES}
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def load(removal: Removal | None = None) -> Product:
    """Makes the modules, without the removed line if one is given. Raises ValueError if the line does not exist."""
    log, names = Swallowed(), dict[str, Any]()
    with _own_modules():
        for name in MODULES:
            path = ROOT / f"{name.replace('.', '/')}.py"
            source = path.read_text()
            if removal is not None and removal.module == name:
                source = removal.apply(source)
            module = sys.modules[name] = types.ModuleType(name)
            module.__file__ = str(path)
            exec(compile(source, str(path), "exec"), vars(module))
            constants = {"_log": log} | CONSTANTS.get(name, {})
            if missing := constants.keys() - vars(module).keys() - {"_log"}:
                raise ValueError(f"{name} has no constant {min(missing)}: change CONSTANTS")
            vars(module).update(constants)
            names.update(vars(module))
    return Product(**{field: names[field] for field in Product.__slots__ if field != "log"}, log=log)
