"""A stand-in for the Hugging Face hub: its HTTP API as far as `huggingface_hub` needs it, on a free local port."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LFS = (".safetensors", ".bin")  # files that the hub answers with a redirect to another host
TOKEN = "hf_" + "t" * 34


@dataclass
class Repository:
    """One model: its commits, and the branches and tags that name them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False  # TOKEN's owner has no access
    private: bool = False  # seen with TOKEN only

    def push(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Adds a commit, and returns its hash."""
        content = hashlib.sha1(repr(sorted((n, hashlib.sha1(b).hexdigest()) for n, b in files.items())).encode())
        self.commits[content.hexdigest()] = dict(files)
        self.refs[ref] = content.hexdigest()
        return content.hexdigest()

    def push_directory(self, directory: Path, ref: str = "main") -> str:
        files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        return self.push(files, ref)


class HubServer(ThreadingHTTPServer):
    """The server. Tests read `requests` and set faults."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path, Range
        self.cuts: dict[str, int] = {}  # the next download of this file loses its connection after so many bytes
        self.stalls: dict[str, threading.Event] = {}  # the next download of this file stops in its middle, and sets it
        self.status: int | None = None  # answer of every request, if set
        self.bad_token = False  # the hub does not know any token

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def downloads(self) -> list[str]:
        """The names of the files whose bytes were sent, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/api/" not in path]

    @contextlib.contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", commit: str = "") -> None:
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path, self.headers.get("Range") or ""))
        try:
            if hub.status is not None:
                raise _Refusal(hub.status)
            if match := re.fullmatch(r"/cdn/(\w+)/(.*)", path):
                self._send_file(match[2], self._blob(match[1]), {})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(tree|paths-info|revision)/(.+)", path):
                _, files = self._commit(match[1], match[3])
                wanted = parse_qs(body.decode()).get("paths", []) if match[2] == "paths-info" else list(files)
                self._send_json([_entry(name, files[name]) for name in wanted if name in files])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(main|v1|[0-9a-f]{40}|refs/pr/\d+|[\w-]+)/(.+)", path):
                self._resolve(match[1], match[2], match[3])
            else:
                raise _Refusal(404)
        except _Refusal as refusal:
            self._head(refusal.status, {k: v for k, v in refusal.headers.items() if v} | {"Content-Length": "0"})

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        hub, token = self.server, (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and hub.bad_token:
            raise _Refusal(401, message="Invalid credentials in Authorization header")
        found = hub.repositories.get(name)
        if found is None or (found.private and token != TOKEN):
            raise _Refusal(404 if token else 401, "RepoNotFound", "Repository not found")
        commit = found.refs.get(revision, revision)
        if commit not in found.commits:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, found.commits[commit]

    def _resolve(self, name: str, revision: str, file: str) -> None:
        commit, files = self._commit(name, revision)
        if self.server.repositories[name].gated:
            token = self.headers.get("Authorization")
            raise _Refusal(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted")
        if file not in files:
            raise _Refusal(404, "EntryNotFound", "Entry not found", commit)
        content, digest = files[file], hashlib.sha256(files[file]).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
        if file.endswith(LFS):
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content)), "Content-Length": "0"}
            self._head(
                302, {**headers, "Location": f"{self.server.url.replace('127.0.0.1', 'localhost')}/cdn/{digest}/{file}"}
            )
        else:
            self._send_file(file, content, headers)

    def _blob(self, digest: str) -> bytes:
        for repository in self.server.repositories.values():
            for files in repository.commits.values():
                for content in files.values():
                    if hashlib.sha256(content).hexdigest() == digest:
                        return content
        raise _Refusal(404)

    def _send_file(self, name: str, content: bytes, headers: Mapping[str, str]) -> None:
        start = int((re.search(r"bytes=(\d+)-", self.headers.get("Range") or "") or [0, 0])[1])
        part = content[start:]
        more = {"Content-Length": str(len(part)), "Accept-Ranges": "bytes"}
        if start:
            more["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(206 if start else 200, {**headers, **more})
        if self.command == "HEAD":
            return
        if (stalled := self.server.stalls.pop(name, None)) is not None:
            self.wfile.write(part[: len(part) // 2])
            stalled.set()
            self.rfile.read(1)  # until the client ends
            self.close_connection = True
        elif (cut := self.server.cuts.pop(name, None)) is not None:
            self.wfile.write(part[:cut])
            self.close_connection = True
        else:
            self.wfile.write(part)

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = hashlib.sha1(content).hexdigest()
    if name.endswith(LFS):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


@contextlib.contextmanager
def hub_in_this_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Runs a hub that `huggingface_hub` in this process uses, with an empty cache and without a token."""
    from huggingface_hub import constants

    with HubServer().running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def hub_environment(hub: HubServer, home: Path) -> dict[str, str]:
    """Returns the variables with which another process uses a hub."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
