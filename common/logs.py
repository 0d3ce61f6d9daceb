"""Structured logs on stderr: JSON lines, or a readable console when stderr is a terminal.

Standard-library loggers (ours and the libraries') and structlog loggers go the same way. What bind() binds in a context
(the request id) is on every line that this context writes, tasks started from it included.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import structlog

_QUIET_LOGGERS = ("grpc", "httpx", "httpcore", "asyncio", "uvicorn.access")


def setup_logs(level: str = "info", format: str = "auto") -> None:
    """Routes all logging of this process to stderr; level is debug, info, warning or error. format auto: JSON, unless
    stderr is a terminal.
    """
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

    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _plain_uvicorn(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """uvicorn logs everything as `uvicorn.error`, and its text a second time with a terminal's colours."""
    line.pop("color_message", None)
    if line.get("logger") == "uvicorn.error":
        line["logger"] = "uvicorn"
    return line


def _dumps(line: Any, **_options: Any) -> str:
    """What JSON does not know is written as it prints."""
    return orjson.dumps(line, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A structlog logger; before setup_logs it writes with structlog's defaults."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


@contextmanager
def log_context(**values: str | int) -> Iterator[None]:
    """Puts values (request_id="...") on every line logged inside the block."""
    with structlog.contextvars.bound_contextvars(**values):
        yield
