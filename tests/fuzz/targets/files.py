"""Files and records that processes read: settings, API keys, the prefix index.

An input is a byte that chooses the kind, and the content.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from pydantic import ValidationError

from common.errors import BatonError, ConfigError
from common.settings.table import ENV_PREFIX, Settings, declared
from common.types import PodLoad, Role
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile, RedisKeyStore
from gateway.api.openai.responses.store import ResponseStore
from gateway.pods.endpoint_slices import EndpointSliceWatcher, KubernetesApi
from prefix_index.reader import IndexReader
from prefix_index.store import PodRecord
from tests.fuzz.mutators import bend, mutate, words
from tests.fuzz.target import FuzzTarget

_COMMANDS = list(Settings.of_command)


class SettingsFiles(FuzzTarget):
    """TOML files and environment variables of every command."""

    words = (
        *(f"\n{name} = ".encode() for command in _COMMANDS for name in declared(Settings.of_command[command])),
        *words("settings"),
        b"\n",
    )

    def __enter__(self) -> SettingsFiles:
        self._folder = tempfile.TemporaryDirectory()
        self._file = Path(self._folder.name) / "baton.toml"
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def seeds(self) -> Sequence[bytes]:
        texts = [
            "",
            'model = "smollm2"\n',
            'model = "m"\nchunk_tokens = 64\nkv_memory = "1GiB"\nredis = "redis://h:1/0"\n',
        ]
        texts += [
            'models = ["a=b"]\npods = "h:1,h:2"\napi_keys = ["k.toml"]\n',
            'max_ttft_s = 1.5\nlog_level = "debug"\n',
        ]
        return [bytes([i, env]) + text.encode() for i in range(len(_COMMANDS)) for env in (0, 1) for text in texts]

    def run(self, data: bytes) -> str:
        head, content = data[:2].ljust(2, b"\0"), data[2:]
        cls, env = Settings.of_command[_COMMANDS[head[0] % len(_COMMANDS)]], {}
        if head[1] % 2:  # the same values, as variables
            pairs = (line.partition(" = ") for line in content.decode(errors="replace").replace("\0", "").splitlines())
            env, content = {ENV_PREFIX + name.upper(): value.strip('"') for name, _, value in pairs}, b""
        self._file.write_bytes(content)
        try:
            cls.load(file=self._file, env=env, flags={})
        except ConfigError as error:
            return f"{cls.__name__} {error.field}"
        return f"{cls.__name__} loaded"


def _record(**changes: Any) -> PodRecord:
    fields = {"pod": "d", "generation": 5, "address": "h:1", "role": Role.DECODE, "model": "m", "scope": "0" * 8}
    return PodRecord(
        **{**fields, "fingerprint": "0" * 32, "block_size": 16, "max_model_len": 64, "num_blocks": 9, **changes}
    )


class _Redis:
    """Answers every call of a reader with the same values."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def hkeys(self, _key: str) -> list[bytes]:
        return [b"0" * 8]

    async def evalsha(self, *_: Any) -> Any:
        return self._answer

    async def hgetall(self, _key: str) -> Any:
        return self._answer

    async def get(self, _key: str) -> Any:
        return self._answer


def _bytes(value: Any) -> Any:
    """Returns a JSON value with its strings as bytes, as redis-py returns them."""
    if isinstance(value, list):
        return [_bytes(item) for item in value]
    return value.encode("latin-1", "replace") if isinstance(value, str) else value


class Records(FuzzTarget):
    """Records in Redis (pods, loads, API keys, responses), key files, and endpoint slices of Kubernetes.

    Only values that clients and pods write are changed, not the answers' form, which Baton's own scripts give.
    """

    words = words("json")

    def __enter__(self) -> Records:
        self._folder = tempfile.TemporaryDirectory()
        self._kinds: list[Callable[[bytes], Any]] = [
            self._pods,
            self._keys,
            self._toml_keys,
            self._slices,
            self._response,
        ]
        self._loop = asyncio.Runner()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()
        self._folder.cleanup()

    def seeds(self) -> Sequence[bytes]:
        key = create_key("t", note="n")[1].model_dump_json(exclude_defaults=True)
        toml = "\n".join(f"{name} = {json.dumps(value)}" for name, value in json.loads(key).items())
        slice_ = {
            "metadata": {"name": "s", "resourceVersion": "1"},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"terminating": False}}],
            "ports": [{"name": "grpc", "port": 50051}],
        }
        response = {"response": {"id": "r"}, "input": [], "conversation": []}
        return [
            b"\0" + json.dumps(["d", "5", "1", PodLoad().to_json(), _record().to_fields()]).encode(),
            b"\1" + key.encode(),
            b"\2[[keys]]\n" + toml.encode(),
            b"\3" + json.dumps({"type": "ADDED", "object": slice_}).encode(),
            b"\3" + json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}).encode(),
            b"\4" + json.dumps(response).encode(),
        ]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = rng.choice(corpus)
        try:
            value = json.loads(data[1:])
        except (ValueError, RecursionError):
            return mutate(data, rng, self.words, corpus)
        if rng.random() < 0.3:
            return data[:1] + mutate(data[1:], rng, self.words, corpus)
        return data[:1] + json.dumps(bend(value, rng)).encode()

    def run(self, data: bytes) -> str:
        kind = self._kinds[data[0] % len(self._kinds) if data else 0]
        try:
            return f"{kind.__name__} {kind(data[1:])}"
        except BatonError as error:
            return f"{kind.__name__} {error.kind} {error.message[-40:]}"

    def _pods(self, content: bytes) -> str:
        try:
            name, _, _, load, info = json.loads(content)
        except (ValueError, TypeError, RecursionError):
            return "no row"
        flat = info if isinstance(info, list) else []
        texts = [item if isinstance(item, str) else json.dumps(item) for item in [name, load, *flat]]
        name, load, *flat = (
            text.encode("utf-16-le", "surrogatepass") if "\ud800" in text else text.encode() for text in texts
        )
        reader = IndexReader(None)
        row = [name, b"5", b"1", load, flat[: len(flat) // 2 * 2]]
        good = [b"good", b"6", b"2", b"", [part.encode() for part in _record(pod="good").to_fields()]]
        pods = self._loop.run(reader._read_pods(_PodRows([row, good])))
        assert any(pod.record.pod == "good" for pod in pods), "one unreadable record hides the other pods"
        return f"{len(pods)} pods"

    def _keys(self, content: bytes) -> str:
        store = RedisKeyStore("redis://127.0.0.1:1")
        store._client = _Redis({b"k": content})  # type: ignore[assignment]
        return str(len(self._loop.run(store.read())))

    def _toml_keys(self, content: bytes) -> str:
        path = Path(self._folder.name) / ("keys.toml" if len(content) % 2 else "keys.json")
        path.write_bytes(content)
        return str(len(KeyFile(path).read()))

    def _slices(self, content: bytes) -> str:
        watcher = EndpointSliceWatcher(KubernetesApi("http://h", Path("/")), ["s"], lambda _: None)
        from gateway.pods import endpoint_slices

        try:
            watcher._apply(endpoint_slices._Event.model_validate_json(content))
        except (ValueError, ValidationError, endpoint_slices._WatchRefused, endpoint_slices._VersionExpired) as error:
            return type(error).__name__
        return str(len(watcher._slices))

    def _response(self, content: bytes) -> str:
        store = ResponseStore("redis://127.0.0.1:1", ttl_s=1, max_bytes_per_tenant=1 << 20)
        store._client = _Redis(content)  # type: ignore[assignment]
        return str(self._loop.run(store.find("t", "r")) is not None)


class _PodRows(_Redis):
    """The first call of a poll reads the pods, the second one registers the gateway."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__([b"epoch", b"epoch/1", rows])

    async def evalsha(self, _sha: str, keys: int, *_: Any) -> Any:
        return self._answer if keys == 2 else 1
