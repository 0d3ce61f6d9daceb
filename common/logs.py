"""Structured logs on stderr: JSON lines, or a readable console when stderr is a terminal.

gRPC's core writes lines of its own format to stderr, so Baton turns them off, unless GRPC_VERBOSITY is set. Nothing is
lost: the status of a failed call has the cause, and Baton logs the status. kv_transfer/backend/ucx_log.py reads the log
of UCX.

structlog formats the lines of standard loggers. The values that `log_context` binds are on every line that is logged
inside it, also by tasks that were started inside it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import orjson
import structlog

log_context = structlog.contextvars.bound_contextvars  #: Context manager: adds values to lines logged inside it.

_QUIET_LOGGERS = ("grpc", "httpx", "httpcore", "asyncio", "uvicorn.access")


def setup_logs(level: str = "info", format: str = "auto") -> None:
    """Sends all logs of this process to stderr. `format`: json, text, or auto (text on a terminal, otherwise json).

    Call it before the first channel or server of gRPC, because gRPC reads its verbosity once.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        _plain_uvicorn,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    as_json = not sys.stderr.isatty() if format == "auto" else format == "json"
    final: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        final += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_dumps)]
    else:
        final += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=final, foreign_pre_chain=shared))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _plain_uvicorn(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Renames the logger `uvicorn.error`, used by uvicorn for everything, and drops its coloured copy of the text."""
    line.pop("color_message", None)
    if line.get("logger") == "uvicorn.error":
        line["logger"] = "uvicorn"
    return line


def _dumps(line: Any, **_options: Any) -> str:
    """Returns the event as JSON; values that JSON has no type for are written as their repr."""
    return orjson.dumps(line, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
