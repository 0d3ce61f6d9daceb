"""Clients that have only proto/ or gRPC reflection get the same as REST clients: tokens, errors and deadlines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.errors import Overloaded
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig, texts
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.pods.scripted import counting

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).parents[1] / "rigs/gateway/grpc_stranger.py"


@pytest_asyncio.fixture
async def gw(smollm2_dir: Path, unused_tcp_port: int) -> AsyncIterator[Rig]:
    tokenizer = texts(smollm2_dir)[0]
    slow = tokenizer.encode("slow", add_special_tokens=False)

    async with fake_cluster() as cluster:

        def script(request: Any) -> list[int]:
            ids = list(request.prompt_ids)
            cluster.decodes[0].faults.token_delay_s = 0.2 if ids == slow else 0.0
            return counting(request)

        cluster.script = script
        async with rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as r:
            yield r
            await r.settled()


async def run_client(gw: Rig, *how: str, path: str) -> dict[str, Any]:
    """Returns the output of a client. path: its module search path."""
    address = f"127.0.0.1:{gw.server.grpc_port}"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(CLIENT), address, MODEL, *how),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": path, "PATH": ""},
        cwd=path,
    )
    out, err = await asyncio.wait_for(child.communicate(), 200)
    assert child.returncode == 0, err.decode()[-3000:]
    said: dict[str, Any] = json.loads(out)
    return said


async def _protoc(directory: Path) -> None:
    protos = [str(path) for path in sorted((ROOT / "proto").rglob("*.proto"))]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"),
        *(f"--python_out={directory}", f"--grpc_python_out={directory}", *protos),
    )
    assert await child.wait() == 0


@pytest.mark.parametrize("how", ["stubs", "reflection"])
async def test_a_foreign_client_gets_what_rest_gets(gw: Rig, how: str, tmp_path: Path) -> None:
    if how == "stubs":
        await _protoc(tmp_path)
        said = await run_client(gw, how, str(tmp_path), path=str(tmp_path))
    else:
        said = await run_client(gw, how, path=str(tmp_path))
    assert said["healthy"]
    assert said["models"] == [[MODEL, MODEL, 2048, 49152]]

    rest: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    for name, answer in (
        ("text", await gw.complete(**rest)),
        ("token_ids", await gw.complete(prompt=[1, 2, 3], **rest)),
        ("chat", await gw.chat(**rest)),
    ):
        body = answer.json()
        choice, usage = body["choices"][0], body["usage"]
        text = choice["text"] if name != "chat" else choice["message"]["content"]
        tokenizer = gw.gateway.models.first.tokenizer
        assert said[name]["text"] == text
        assert tokenizer.decode(said[name]["tokens"]) == text
        assert said[name]["usage"] == [usage["prompt_tokens"], usage["completion_tokens"]]
        assert {1: "stop", 2: "length"}[said[name]["finish"]] == choice["finish_reason"]

    tokenize = {"model": MODEL, "prompt": "Hello there"}
    assert said["ids"] == (await gw.http.post("/tokenize", json=tokenize)).json()["tokens"]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    assert said["chat_ids"] == (await gw.http.post("/tokenize", json=chat)).json()["tokens"]
    assert said["back"] == "Hello there"

    bad = (await gw.complete(temperature=9.0)).json()["error"]
    assert said["bad_field"] == {
        "code": "INVALID_ARGUMENT",
        "message": bad["message"],
        "field": bad["param"],
        "reason": "InvalidRequest",
    }
    missing = (await gw.complete(model="other")).json()["error"]
    assert said["no_model"] == {
        "code": "NOT_FOUND",
        "message": missing["message"],
        "field": "model",
        "reason": "ModelNotFound",
    }
    assert said["late"]["code"] == "DEADLINE_EXCEEDED"
    assert gw.cluster.decodes[0].seen.timeouts[-1] > 0


@pytest.mark.parametrize("how", ["stubs", "reflection"])
async def test_a_foreign_client_gets_the_retry_delay(gw: Rig, how: str, tmp_path: Path) -> None:
    gw.cluster.decodes[0].faults.reserve_error = Overloaded("busy", retry_after_s=2.5)
    if how == "stubs":
        await _protoc(tmp_path)
    said = await run_client(gw, how, *([str(tmp_path)] if how == "stubs" else []), path=str(tmp_path))
    refused = await gw.complete()
    assert refused.status_code == 429
    assert said["full"]["code"] == "RESOURCE_EXHAUSTED"
    assert said["full"]["message"] == refused.json()["error"]["message"]
    assert said["full"]["retry_s"] == 2.5
