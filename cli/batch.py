"""The work of `baton batch`: reads a file of requests, sends them, and writes a file of answers, in OpenAI's format.

The input is checked before any request is sent. Invariants of the output: every line but the last is complete, and no
custom_id has two lines. A killed run may leave a partial last line. The next run removes it, together with temporary
failures, and continues. A file with other lines is refused and stays unchanged.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import orjson

from cli.client import server_url
from common.errors import BatonError, ConfigError, Unavailable, describe
from common.process.atomic_file import write_file_atomically

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ANSWERED = 200
TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})  # Statuses of temporary failures.
MAX_LISTED_LINES = 20  # Max wrong input lines that an error lists.
_ID = "batch_req_"
_BEGIN = b'{"id":"' + _ID.encode()  # of every output line
BACKOFF_S = (0.5, 30.0)
MAX_RETRY_AFTER_S = 300.0
NO_RETRY_CODES = frozenset({"insufficient_quota"})  # Codes of status 429 that retries in this run cannot change.


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
    connected: bool = True  # False if no connection to the gateway could be made.

    @property
    def answered(self) -> bool:
        return self.status == ANSWERED

    @property
    def may_pass(self) -> bool:
        """Whether a later try may get an answer."""
        return (self.status in TEMPORARY or not self.status) and self.code not in NO_RETRY_CODES

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
        response = error = None
        if self.status:
            response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        else:
            error = {"code": "connection_error", "message": self.error}
        line = {"id": f"{_ID}{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


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
    """The output file, locked against a second run; a context manager."""

    def __init__(self, path: Path, *, retry_errors: bool = False) -> None:
        """Opens or continues the file. `retry_errors` removes all errors of former runs, not only temporary ones.

        Raises ConfigError if the file is not writable, in use, or not an output file.
        """
        self.done: dict[str, bool] = {}  # custom_id of each answered request, and whether its answer is an error
        self._path = path
        self._dropped: Callable[[int], bool] = (
            (lambda status: status != ANSWERED) if retry_errors else TEMPORARY.__contains__
        )
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
            if status and not self._dropped(status) and custom_id not in self.done:
                self.done[custom_id] = status != ANSWERED
                kept.append(line)
        if partial or len(kept) < len(lines):
            mode = self._path.stat().st_mode & 0o777
            write_file_atomically(self._path, b"".join(line + b"\n" for line in kept), mode)


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


@dataclass(frozen=True, slots=True)
class Retry:
    """A further try of one request."""

    number: int  # Number of the try; 2 for the first retry.
    tries: int  # Tries that the request has at most.
    pause_s: float  # Seconds until the try.
    reason: str  # Why the try before failed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How to send the requests."""

    url: str  # Of the gateway, with or without /v1.
    api_key: str | None = None
    concurrency: int = 64
    retries: int = 10  # Per request.
    timeout_s: float = 600.0  # Per try.


async def send_all(
    sending: Sending,
    requests: Iterator[Request],
    done: Callable[[Request, Result], None],
    retried: Callable[[Retry], None],
) -> None:
    """Sends all requests; calls `done` with each result as it arrives, and `retried` before each retry.

    The back-off is exponential with jitter, and at least the answer's Retry-After. Raises Unavailable if the first
    connection fails or the gateway refuses the API key, ConfigError for an invalid URL or key, and errors of `done`.
    """
    headers = {"content-type": "application/json", "x-request-timeout": f"{sending.timeout_s:g}"}
    if sending.api_key:
        if not (sending.api_key.isascii() and sending.api_key.isprintable()):
            raise ConfigError("--api-key: an API key must be printable ASCII", field="api_key")
        headers["authorization"] = f"Bearer {sending.api_key}"
    base = server_url(sending.url)
    limits = httpx.Limits(max_connections=sending.concurrency, max_keepalive_connections=sending.concurrency)
    timeout = httpx.Timeout(sending.timeout_s + 10.0, connect=10.0)
    async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout) as client:
        reached = False  # A gateway has answered before, so a later failure to connect may be temporary.

        async def work() -> None:
            nonlocal reached
            for request in requests:  # all workers take from one iterator
                pauses = _pauses()
                for number in range(1, sending.retries + 2):
                    result, retry_after_s = await _try(client, request)
                    if not (reached := reached or result.connected):
                        raise Unavailable(f"{result.error}; is a gateway running there?")
                    if not result.may_pass or number > sending.retries:
                        break
                    pause_s = max(min(retry_after_s, MAX_RETRY_AFTER_S), next(pauses))
                    retried(Retry(number + 1, sending.retries + 1, pause_s, result.reason))
                    await asyncio.sleep(pause_s)
                done(request, result)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(sending.concurrency):
                    group.create_task(work())
        except* BatonError as e:
            raise e.exceptions[0] from e


def _pauses() -> Iterator[float]:
    """Seconds before each retry of a request."""
    pause_s = BACKOFF_S[0]
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(BACKOFF_S[1], 2 * pause_s)


async def _try(client: httpx.AsyncClient, request: Request) -> tuple[Result, float]:
    """Sends a request once: the result, and the seconds of Retry-After. Raises Unavailable for a refused API key."""
    try:
        answer = await client.post(request.url, content=request.body)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        connected = not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout)
        error = f"no answer from {client.base_url}: {describe(e)}"
        return Result(error=error, connected=connected), 0.0
    try:
        body = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        body = answer.text
    retry_after = answer.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
    result = Result(answer.status_code, answer.headers.get("x-request-id", ""), body)
    if result.status in (401, 403) and result.code == "invalid_api_key":
        raise Unavailable("the gateway refuses the API key; pass another one with --api-key")
    return result, retry_after_s
