"""A fake Kubernetes API server for EndpointSlices: list and watch over TLS, with a token, and with faults."""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gateway.pods.endpoint_slices import SERVICE_LABEL, KubernetesApi

NAMESPACE = "test"


@dataclass
class FakeKube:
    """The API server. `put` and `remove` change a slice and create a new version."""

    account: Path
    host: str = "127.0.0.1"
    port: int = 0
    #: The accepted token.
    token: str = "token-1"
    version: int = 100
    #: Status of all responses; 0 for none.
    refuse: int = 0
    #: Sent in place of events; "" for none.
    garble: str = ""
    #: How many versions in the past a watch may begin.
    history: int = 1000
    #: By name.
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Number of list calls.
    lists: int = 0
    #: Versions that watches began at.
    watches: list[int] = field(default_factory=list)
    _events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _ending: int = 0
    _last: dict[str, Any] | None = None
    _server: asyncio.Server | None = None

    @property
    def api(self) -> KubernetesApi:
        return KubernetesApi(f"https://{self.host}:{self.port}", self.account)

    async def put(
        self, service: str, pods: dict[str, bool], *, name: str = "", port: int = 7000, **fields: Any
    ) -> None:
        """Sets one slice of a service: its hosts, and whether they are terminating."""
        self.version += 1
        name = name or f"{service}-abcde"
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "resourceVersion": str(self.version), "labels": {SERVICE_LABEL: service}},
            "addressType": "IPv4",
            "endpoints": self.endpoints(pods),
            "ports": [{"name": "metrics", "port": 9400}, {"name": "grpc", "port": port, "protocol": "TCP"}],
            **fields,
        }
        await self._send_slice(kind, name)

    def endpoints(self, pods: dict[str, bool]) -> list[dict[str, Any]] | None:
        """Returns the endpoints of a slice; None if there are none, as Go writes an empty list."""
        return [
            {"addresses": [host], "conditions": {"ready": not ending, "serving": True, "terminating": ending}}
            for host, ending in pods.items()
        ] or None

    async def remove(self, name: str) -> None:
        self.version += 1
        self.slices[name]["metadata"]["resourceVersion"] = str(self.version)
        await self._send_slice("DELETED", name)
        del self.slices[name]

    async def bookmark(self) -> None:
        """Creates a version without a change of the slices."""
        self.version += 1
        meta = {"metadata": {"resourceVersion": str(self.version)}}
        await self._send({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", **meta}})

    async def end_watches(self, event: dict[str, Any] | None = None) -> None:
        """Ends all watches, like their timeout, or with an ERROR event. The connections stay open."""
        async with self._changed:
            self._ending, self._last = self._ending + 1, event
            self._changed.notify_all()

    async def break_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _send_slice(self, kind: str, name: str) -> None:
        await self._send({"type": kind, "object": copy.deepcopy(self.slices[name])})

    async def _send(self, event: dict[str, Any]) -> None:
        async with self._changed:
            self._events.append((self.version, event))
            self._changed.notify_all()

    async def start(self) -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.account / "ca.crt", self.account / "server.key")
        self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.break_connections()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                headers = {}
                while (header := (await reader.readline()).strip()) != b"":
                    name, _, value = header.decode().partition(": ")
                    headers[name.lower()] = value
                await self._answer(line.split()[1].decode(), headers, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, target: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        status = self.refuse or (200 if headers.get("authorization") == f"Bearer {self.token}" else 401)
        known = query.get("labelSelector", "").startswith(f"{SERVICE_LABEL} in (")
        if urlsplit(target).path != self.api.slices_path() or not known:
            status = 404
        if status != 200:
            _whole(writer, status, {"kind": "Status", "code": status, "message": "refused"})
            return
        services = query["labelSelector"].partition("(")[2].rstrip(")").split(",")
        if "watch" not in query:
            self.lists += 1
            items = [s for s in self.slices.values() if s["metadata"]["labels"][SERVICE_LABEL] in services]
            _whole(writer, 200, {"metadata": {"resourceVersion": str(self.version)}, "items": items})
            return
        version = int(query["resourceVersion"])
        self.watches.append(version)
        if version < self.version - self.history:
            _whole(writer, 410, {"kind": "Status", "code": 410, "message": "too old"})
            return
        await self._watch(version, services, writer)

    async def _watch(self, version: int, services: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        ending = self._ending
        while not writer.is_closing():
            async with self._changed:
                while self.version <= version and self._ending == ending:
                    await self._changed.wait()
                events = [event for number, event in self._events if number > version]
                version = self.version
            for event in events:
                labels = event["object"]["metadata"].get("labels", {})
                if event["type"] == "BOOKMARK" or labels.get(SERVICE_LABEL) in services:
                    _chunk(writer, event, self.garble)
            if self._ending != ending:
                if self._last is not None:
                    _chunk(writer, self._last)
                writer.write(b"0\r\n\r\n")
                return
            await writer.drain()


def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)


def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any], instead: str = "") -> None:
    raw = (instead or json.dumps(event)).encode() + b"\n"
    writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")


def make_account(directory: Path, host: str = "127.0.0.1", token: str = "token-1") -> Path:
    """Creates the files that a kubelet mounts, with a self-signed certificate for `host` and its key."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "token").write_text(token)
    (directory / "namespace").write_text(NAMESPACE)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=kubernetes", "-addext", f"subjectAltName=IP:{host}"),
            *("-keyout", str(directory / "server.key"), "-out", str(directory / "ca.crt")),
        ],
        check=True,
        capture_output=True,
    )
    return directory


@asynccontextmanager
async def fake_kube(directory: Path, **fields: Any) -> AsyncIterator[FakeKube]:
    kube = FakeKube(make_account(directory / "account"), **fields)
    await kube.start()
    try:
        yield kube
    finally:
        await kube.stop()
