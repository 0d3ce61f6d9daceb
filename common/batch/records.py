"""The two files: lines of requests, checked before anything is sent, and lines of answers, to which runs append.

Invariant of the answers: every line but the last is whole, and no custom_id has two. A run that was killed may leave
half a line at the end; the next one takes it out, with those that failed for a passing reason, and goes on.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from common.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
PASSING = frozenset({408, 429, 500, 502, 503, 504})  # statuses that a later try may not have


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the input; body is JSON."""

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one request: a status and a body, or, where there was no answer at all, an error.

    A body that is not JSON is a string.
    """

    status: int = 0
    request_id: str = ""
    body: Any = None
    error: str = ""

    @property
    def answered(self) -> bool:
        return self.status == 200

    def line(self, custom_id: str) -> bytes:
        """The output line."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        return orjson.dumps(
            {
                "id": f"batch_req_{secrets.token_hex(12)}",
                "custom_id": custom_id,
                "response": response if self.status else None,
                "error": None if self.status else {"code": "connection_error", "message": self.error},
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


def requests(path: Path) -> Iterator[Request]:
    """The requests of a file, one after the other. Raises ConfigError that names the line."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    request = _request(line, f"{path}, line {number}")
                    if request.custom_id in seen:
                        raise _wrong(f"{path}, line {number}", f"custom_id {request.custom_id!r} is not the first")
                    seen.add(request.custom_id)
                    yield request
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", field="input") from e


def _request(line: bytes, where: str) -> Request:
    try:
        raw = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise _wrong(where, f"not JSON: {e.msg}") from e
    if not isinstance(raw, dict):
        raise _wrong(where, "not a JSON object")
    custom_id, body = raw.get("custom_id"), raw.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise _wrong(where, "custom_id must be a string")
    if raw.get("method", "POST") != "POST":
        raise _wrong(where, "method must be POST")
    if raw.get("url") not in URLS:
        raise _wrong(where, f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise _wrong(where, "body must be a JSON object")
    if body.get("stream"):
        raise _wrong(where, "stream must not be true")
    return Request(custom_id, raw["url"], orjson.dumps(body))


def _wrong(where: str, what: str) -> ConfigError:
    return ConfigError(f"{where}: {what}", field="input")


class Answers:
    """The output file, locked against a second run; a context. done: the custom_ids that have their answer."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when it cannot be written, is in use, or is something else than such a file."""
        self.done: set[str] = set()
        self._path = path
        try:
            self._lock = path.with_name(f".{path.name}.lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run writes {path}", field="output") from None
        except OSError as e:
            raise ConfigError(f"cannot write {path}: {e.strerror}", field="output") from e
        self._resume()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        os.close(self._file)
        Path(self._lock.name).unlink(missing_ok=True)
        self._lock.close()

    def append(self, custom_id: str, result: Result) -> None:
        """One line, in one write."""
        line = result.line(custom_id)
        while line:  # a full disk or a signal may cut a write short
            line = line[os.write(self._file, line) :]
        self.done.add(custom_id)

    def sync(self) -> None:
        """What was appended is on the disk."""
        os.fsync(self._file)

    def _resume(self) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_bytes().split(b"\n")
        torn = lines.pop()
        kept: list[bytes] = []
        for number, line in enumerate(lines, 1):
            custom_id, final = _of_answer(line, f"{self._path}, line {number}")
            if final and custom_id not in self.done:
                self.done.add(custom_id)
                kept.append(line)
        if torn or len(kept) < len(lines):
            self._replace(b"".join(line + b"\n" for line in kept))

    def _replace(self, content: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), self._path.stat().st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(self._path)


def _of_answer(line: bytes, where: str) -> tuple[str, bool]:
    """The custom_id of an output line, and whether nothing is to be tried again."""
    try:
        raw = orjson.loads(line)
        response = raw["response"]
        final = response is not None and response["status_code"] not in PASSING
        return str(raw["custom_id"]), final
    except (orjson.JSONDecodeError, KeyError, TypeError) as e:
        raise ConfigError(f"{where} is no line of a batch's output; name another file", field="output") from e
