"""The input file of a batch, checked before any request is sent, and the output file, to which runs append answers.

Invariants of the output: every line but the last is complete, and no custom_id has two lines. A killed run may leave a
partial last line. The next run removes it, together with temporary failures, and continues. A file with other lines is
not an output file; it is refused and stays unchanged.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from common.errors import ConfigError
from common.process.atomic_file import write_file_atomically

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ANSWERED = 200
#: Statuses of temporary failures.
TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})
#: Most wrong input lines that an error lists.
MAX_LISTED_LINES = 20
_ID = "batch_req_"
_BEGIN = b'{"id":"' + _ID.encode()  # of every output line


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the input."""

    custom_id: str
    url: str
    body: bytes  # JSON.


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one request: an answer with any status, or a connection error."""

    status: int = 0  # 0 without an answer.
    request_id: str = ""
    body: Any = None  # Parsed JSON, or text if the body is not JSON.
    error: str = ""  # Set without an answer.

    @property
    def answered(self) -> bool:
        return self.status == ANSWERED

    @property
    def code(self) -> str | None:
        """The error code of an answer in OpenAI's error format."""
        code = self._refusal.get("code")
        return code if isinstance(code, str) else None

    @property
    def reason(self) -> str:
        """The reason of a failure, for a person."""
        return f"{self.status} {self._refusal.get('message') or self.body}" if self.status else self.error

    @property
    def _refusal(self) -> dict[str, Any]:
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return error if isinstance(error, dict) else {}

    def line(self, custom_id: str) -> bytes:
        """The output line."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        return orjson.dumps(
            {
                "id": f"{_ID}{secrets.token_hex(12)}",
                "custom_id": custom_id,
                "response": response if self.status else None,
                "error": None if self.status else {"code": "connection_error", "message": self.error},
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


def check(path: Path) -> int:
    """The number of requests in a file. Raises ConfigError with up to MAX_LISTED_LINES wrong lines."""
    number, wrong = 0, []
    for request in _lines(path):
        number += 1
        if isinstance(request, str):
            wrong.append(request)
    if wrong:
        more = [f"and {len(wrong) - MAX_LISTED_LINES} more lines"] if len(wrong) > MAX_LISTED_LINES else []
        raise ConfigError("\n".join(wrong[:MAX_LISTED_LINES] + more), field="input")
    return number


def requests(path: Path) -> Iterator[Request]:
    """The requests of a file. Raises ConfigError if the file changed since `check` and is now wrong."""
    for request in _lines(path):
        if isinstance(request, str):
            raise ConfigError(request, field="input")
        yield request


def _lines(path: Path) -> Iterator[Request | str]:
    """The request of each line, or the error of the line."""
    seen: dict[str, int] = {}
    try:
        if path.exists() and not path.is_file():  # the file is read several times
            raise ConfigError(f"{path} is not a regular file", field="input")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                line_name = f"{path}, line {number}"
                try:
                    request = _request(line)
                except ValueError as e:
                    yield f"{line_name}: {e}"
                    continue
                first = seen.setdefault(request.custom_id, number)
                twice = f"{line_name}: custom_id {request.custom_id[:100]!r} is already used in line {first}"
                yield request if first == number else twice
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", field="input") from e


def _request(line: bytes) -> Request:
    """The request of a line. Raises ValueError with the reason."""
    try:
        raw = orjson.loads(line.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as e:
        raise ValueError(f"not JSON: {e.msg}") from e
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    custom_id, body = raw.get("custom_id"), raw.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a non-empty string")
    if raw.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    if raw.get("url") not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("stream must not be true")
    try:
        return Request(custom_id, raw["url"], orjson.dumps(body))
    except orjson.JSONEncodeError as e:
        raise ValueError(f"body is nested too deep: {e}") from e


class Answers:
    """The output file, locked against a second run; a context manager.

    Attributes:
        done: custom_id of each answered request, and whether its answer is an error.
    """

    def __init__(self, path: Path) -> None:
        """Opens or continues the file. Raises ConfigError if it is not writable, in use, or not an output file."""
        self.done: dict[str, bool] = {}
        self._path = path
        with self._writing():
            self._lock = path.with_name(f".{path.name}.lock").open("a")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # An ending run unlinks its lock file. A lock on an unlinked file does not exclude a later run.
                held = os.fstat(self._lock.fileno()).st_nlink > 0
            except BlockingIOError:
                held = False
            if not held:
                self._lock.close()
                raise ConfigError(f"another run is writing {path}", field="output")
            try:
                if path.exists() and not path.is_file():
                    raise ConfigError(f"{path} is not a regular file", field="output")
                self._resume()
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except BaseException:
                self._unlock()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.sync()
        finally:
            os.close(self._file)
            self._unlock()

    def _unlock(self) -> None:
        Path(self._lock.name).unlink(missing_ok=True)
        self._lock.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise ConfigError(f"cannot write {self._path}: {e.strerror}", field="output") from e

    def append(self, custom_id: str, result: Result) -> None:
        """Appends a line in one write. Raises ConfigError if that fails."""
        line = result.line(custom_id)
        with self._writing():
            while line:  # a full disk or a signal can shorten a write
                line = line[os.write(self._file, line) :]
        self.done[custom_id] = not result.answered

    def sync(self) -> None:
        """Writes appended lines to the disk. Raises ConfigError if that fails."""
        with self._writing():
            os.fsync(self._file)

    def _resume(self) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_bytes().split(b"\n")
        partial = lines.pop()
        if not (partial.startswith(_BEGIN) or _BEGIN.startswith(partial)):
            raise _no_output(f"{self._path}, line {len(lines) + 1}")
        kept: list[bytes] = []
        for number, line in enumerate(lines, 1):
            custom_id, status = _of_answer(line, f"{self._path}, line {number}")
            if status and status not in TEMPORARY and custom_id not in self.done:
                self.done[custom_id] = status != ANSWERED
                kept.append(line)
        if partial or len(kept) < len(lines):
            write_file_atomically(
                self._path, b"".join(line + b"\n" for line in kept), self._path.stat().st_mode & 0o777
            )


def _of_answer(line: bytes, where: str) -> tuple[str, int]:
    """The custom_id and status of an output line; status 0 without an answer."""
    try:
        raw = orjson.loads(line)
        response = raw["response"]
        return str(raw["custom_id"]), 0 if response is None else int(response["status_code"])
    except (ValueError, KeyError, TypeError) as e:
        raise _no_output(where) from e


def _no_output(where: str) -> ConfigError:
    return ConfigError(f"{where} is not a line of batch output; name another file", field="output")
