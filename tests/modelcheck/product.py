"""Loads the product's modules for the explorer, if wanted without one of their lines.

`load` executes each file in a new module object. sys.modules gets its former modules back, so the rest of the process
does not see the new ones. Time limits are shortened because the clock of the model stands still: the model fires a
timer by moving a stored time into the past.
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

#: Modules under test. Each stands behind the modules that it imports.
MODULES = (
    "engine.kv.ledger",
    "engine.kv.lease",
    "engine.kv.blocks",
    "kv_transfer.receiver.state_machine",
    "kv_transfer.sender.state_machine",
    "kv_transfer.receiver.transfers",
    "kv_transfer.sender.transfers",
    "kv_transfer.servicer",
)
#: Values of constants, by module. Retries and waits are due at once. The grace is one tick long.
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
    """Removes one line of a product file."""

    module: str  #: One of MODULES.
    function: str  #: Name of the function that holds the line.
    line: str  #: The line, without indentation.
    nth: int = 0  #: Number of the line among equal lines of the function, from 0.

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


class ErrorLog:
    """The logger of the loaded modules. It records exceptions that the product logs and does not raise."""

    SHARED = True  #: Copies of a pod share the logger (snapshot.clone).

    def __init__(self) -> None:
        self.errors: list[str] = []

    def exception(self, text: str, *_: object) -> None:
        self.errors.append(f"{text}: {sys.exc_info()[1]!r}")

    def info(self, *_: object, **__: object) -> None: ...

    warning = error = debug = info


@dataclass(frozen=True, slots=True)
class Product:
    """The classes that the model uses, from newly loaded modules."""

    BlockPool: Any
    ReceiverMachine: Any
    ReceiverState: Any
    SenderState: Any
    IncomingTransfer: Any
    TransferReceiver: Any
    TransferSender: Any
    WriteLimits: Any
    TransferServicer: Any
    log: ErrorLog


@contextmanager
def _own_modules() -> Iterator[None]:
    """Gives sys.modules its former modules back at the end of the scope."""
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
    """Loads the modules, without the line that `removal` names. Raises ValueError if the line does not exist."""
    log, names = ErrorLog(), dict[str, Any]()
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
