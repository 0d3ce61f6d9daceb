"""A client of one running server: its models, streamed chat answers, and the timelines of its requests."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from common.errors import ConfigError, Unavailable, describe
from common.settings.kinds import is_loopback

CONNECT_S = 5.0
DATA, END = "data: ", "data: [DONE]"


@dataclass(frozen=True)
class Answer:
    """An answer. Times are seconds since the request was sent."""

    request_id: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    first_s: float  # Time of the first text.
    last_s: float  # Time of the end of the stream.

    @property
    def figures(self) -> str:
        """Tokens, times and rate, for a person."""
        rest = self.completion_tokens - 1
        rate = f", then {rest / max(self.last_s - self.first_s, 1e-9):.0f} tokens/s" if rest > 0 else ""
        return (
            f"{self.prompt_tokens} prompt tokens, {self.completion_tokens} generated ({self.finish_reason}); "
            f"first after {self.first_s * 1000:.0f} ms{rate}"
        )


class Server:
    """A server with OpenAI's REST API; a context manager. All failures of requests are Unavailable."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        ca_file: str | None = None,
        any_certificate: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        """`url` is HOST:PORT, http:// or https://, with or without /v1. timeout_s: max silence of the server.

        `ca_file` (PEM) names the authorities of an https server. Raises ConfigError.
        """
        self.url = server_url(url)
        headers = {}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("--api-key: an API key must be printable ASCII", field="api_key")
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            verify=_certificates(ca_file, any_certificate) if self.url.scheme == "https" else False,
            trust_env=not is_loopback(self.url.host),  # a proxy of the environment does not reach this machine's ports
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def models(self) -> list[str]:
        """The names of the served models."""
        with self._request("GET", "/v1/models") as reply:
            try:
                return [str(model["id"]) for model in json.loads(reply.read())["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise Unavailable(f"{self.url} does not answer like a server with OpenAI's API") from error

    def timeline(self, request_id: str) -> dict[str, Any]:
        """The events of a recent request, from the gateway's record."""
        with self._request("GET", f"/debug/requests/{request_id}") as reply:
            timeline: dict[str, Any] = json.loads(reply.read())
            return timeline

    def stream_chat(
        self,
        body: Mapping[str, Any],
        on_text: Callable[[str], None],
        on_reasoning: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Streams one chat completion; `body` has at least the model and the messages."""
        content = {**body, "stream": True, "stream_options": {"include_usage": True}}
        started, texts = time.monotonic(), list[str]()
        request_id, finish_reason, first_s, usage = "", "", 0.0, dict[str, int]()
        with self._request("POST", "/v1/chat/completions", json=content) as reply:
            for line in _lines(reply):
                if line == END:
                    break
                if not line.startswith(DATA):
                    continue  # a comment, which keeps the connection alive
                event = json.loads(line.removeprefix(DATA))
                if "error" in event:
                    raise Unavailable(event["error"].get("message", "the stream ended with an error"))
                request_id = event.get("id", request_id)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    finish_reason = choice.get("finish_reason") or finish_reason
                    delta = choice["delta"]
                    if reasoning := delta.get("reasoning_content"):
                        first_s = first_s or time.monotonic() - started
                        on_reasoning(reasoning)
                    if text := delta.get("content"):
                        first_s = first_s or time.monotonic() - started
                        texts.append(text)
                        on_text(text)
        if not finish_reason:
            raise Unavailable("the stream ended without a finish reason")
        return Answer(
            request_id=request_id,
            text="".join(texts),
            finish_reason=finish_reason,
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            first_s=first_s,
            last_s=time.monotonic() - started,
        )

    @contextlib.contextmanager
    def _request(self, method: str, path: str, **content: Any) -> Iterator[httpx.Response]:
        """The response to one request. Leaving the block early closes the connection, which ends the request."""
        try:
            with self._client.stream(method, path, **content) as reply:
                if reply.status_code >= 400:
                    text = reply.read().decode("utf-8", "replace")
                    raise Unavailable(f"{self.url} answered {reply.status_code} to {method} {path}: {_reason(text)}")
                yield reply
        except httpx.ConnectError as error:
            raise Unavailable(
                f"no server answers at {self.url} ({describe(error)}); start one with `baton serve MODEL`"
            ) from error
        except httpx.TimeoutException as error:
            raise Unavailable(f"{self.url} was silent for too long ({describe(error)})") from error
        except (httpx.HTTPError, httpx.StreamError, ValueError, KeyError) as error:
            raise Unavailable(f"{method} {path} at {self.url} failed: {describe(error)}") from error


def _lines(reply: httpx.Response) -> Iterator[str]:
    """Yields the lines of an event stream. `iter_lines` of httpx also ends a line at U+2028 and U+0085 in a text."""
    rest = b""
    for part in reply.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode("utf-8", "replace").removesuffix("\r") for line in lines)
    yield rest.decode("utf-8", "replace")


def server_url(url: str) -> httpx.URL:
    """Returns the URL of a server without /v1; http:// is the default. Raises ConfigError."""
    text = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(text.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"url: {url!r} is not a URL: {error}", field="url") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"url: {url!r} is not like http://HOST:PORT", field="url")
    return parsed


def _certificates(ca_file: str | None, any_certificate: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(
            f"--ca-file: cannot read certificates in {ca_file}: {describe(error)}", field="ca_file"
        ) from error
    if any_certificate:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _reason(text: str) -> str:
    """The message of an error in OpenAI's shape, else the text itself, cut."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
