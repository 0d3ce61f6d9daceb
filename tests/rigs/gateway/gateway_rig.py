"""A gateway on a free port with fake pods, and an HTTP client for it."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from common.model.generation import GenerationDefaults, generation_defaults
from common.settings.gateway import GatewayConfig
from gateway.admission.key_store import KeyRing
from gateway.pods.endpoint_slices import KubernetesApi
from gateway.pods.pod import Pod
from gateway.server import GatewayServer
from gateway.serving.gateway import Gateway
from gateway.serving.models import TextProcessor
from gateway.text.chat_format import ChatFormat
from gateway.text.tokenizer import TextTokenizer
from prefix_index.reader import IndexReader
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.waiting import until

MODEL = "smol"

#: max_completion_tokens of a chat for which a test gives none.
MAX_TOKENS = 100


def booked(pod: Pod) -> int:
    """Returns the number of open bookings of this gateway on a pod."""
    return 0 if pod.view is None else len(pod.view.prefill_bookings) + len(pod.view.decode_bookings)


@dataclass
class Rig:
    """A running gateway and its client."""

    server: GatewayServer
    http: httpx.AsyncClient
    cluster: FakeCluster

    @property
    def gateway(self) -> Gateway:
        return self.server.gateway

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **_short(fields)}
        return await self.http.post("/v1/chat/completions", json=body)

    async def stream(self, path: str, **fields: Any) -> tuple[int, list[Any]]:
        """Returns the status and the events; "[DONE]" is a string."""
        default = {"prompt": "Hello"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
        body = {"model": MODEL, "stream": True, **default, **(_short(fields) if path == "chat" else fields)}
        url = f"/v1/{'chat/' if path == 'chat' else ''}completions"
        events: list[Any] = []
        async with self.http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                return response.status_code, [orjson.loads(await response.aread())]
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append(data if data == "[DONE]" else orjson.loads(data))
        return response.status_code, events

    async def settled(self) -> None:
        """Waits until no request is left in the gateway or on the pods."""
        await until(lambda: not self.gateway._requests)  # a request is counted and logged after its answer
        await until(lambda: self.cluster.all_idle())
        await until(lambda: all(not booked(pod) and not pod._sinks for pod in self.gateway.pod_table.pods.values()))


def _short(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Limits a chat without a limit, which would get as many fake tokens as the context has room for."""
    limited = "max_tokens" in fields or "max_completion_tokens" in fields
    return {**fields} if limited else {"max_completion_tokens": MAX_TOKENS, **fields}


@functools.cache
def texts(
    model_dir: Path, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> tuple[TextTokenizer, ChatFormat]:
    """Returns the tokenizer and chat format of a directory, loaded once."""
    text = TextProcessor.load("", model_dir, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    return text.tokenizer, text.chat_format


def own_texts(model_dir: Path, config: GatewayConfig) -> tuple[TextTokenizer, ChatFormat]:
    """Returns the tokenizer and the chat format with the configured template and variables."""
    variables = json.loads(config.default_chat_template_kwargs or "{}")
    text = TextProcessor.load("", model_dir, chat_template=config.chat_template, template_variables=variables)
    return text.tokenizer, text.chat_format


@asynccontextmanager
async def rig(
    cluster: FakeCluster,
    model_dir: Path,
    *,
    wait: bool = True,
    index_timeout_s: float = 2.0,
    api: KubernetesApi | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Runs a gateway with the cluster's pods. `settings` are of GatewayConfig; `api` is used by discovery="k8s"."""
    fields: dict[str, Any] = {
        "pods": cluster.addresses,
        "models": (f"{MODEL}={model_dir}",),
        "port": 0,
        "pod_wait_s": 5.0,
    }
    config = GatewayConfig(**{**fields, **settings})
    # A busy test machine often misses the real limit of 20 ms. Tests with a stopped index cover the timeout.
    index = IndexReader(config.redis, timeout_s=index_timeout_s) if config.redis else None
    parsers = config.tool_parser, config.reasoning_parser
    served = []
    for name, path in config.served_models().items():
        own = config.chat_template is not None or config.default_chat_template_kwargs is not None
        tokenizer, chat_format = own_texts(Path(path), config) if own else texts(Path(path), *parsers)
        defaults = generation_defaults(Path(path)) if config.generation_config == "auto" else GenerationDefaults()
        served.append(TextProcessor(name, tokenizer, chat_format, defaults))
    server = GatewayServer(
        config,
        Gateway(
            config,
            served,
            index,
            KeyRing(config.api_keys, config.redis, config.api_key),
            limits_timeout_s=index_timeout_s,
        ),
        api=api,
    )
    try:
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
            if wait:
                await until(lambda: server.gateway.ready)
                decodes = len(cluster.decodes)
                await until(lambda: len(server.gateway.pod_table.decode_pods()) == decodes)
            yield Rig(server, http, cluster)
    finally:
        await server.stop()


async def right_text(gw: Rig) -> str:
    """Returns the answer of a healthy cluster."""
    return str((await gw.complete()).json()["choices"][0]["text"])
