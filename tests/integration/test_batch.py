"""`baton batch` with a gateway over fake pods: one output line per request, also with refusals, restarts and kills."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli import batch as work
from cli.batch import MAX_LISTED_LINES, Answers, Sending, check, requests
from cli.commands.batch import run
from common.errors import ConfigError, Overloaded, Unavailable
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "BACKOFF_S", (0.01, 0.05))
    monkeypatch.setattr(work, "MAX_RETRY_AFTER_S", 0.02)


def line(custom_id: str, *, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def completions(count: int) -> list[dict[str, Any]]:
    return [line(f"r{i}", prompt="Hello", max_tokens=1 + i % 3) for i in range(count)]


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    by_id = {each["custom_id"]: each for each in lines}
    assert len(by_id) == len(lines)
    return by_id


async def batch(gw: Rig, source: Path, target: Path, **sending: Any) -> tuple[int, str]:
    console = Console(file=StringIO(), width=200)
    code = await run(console, source, target, Sending(**{"url": gw.url, "concurrency": 8, **sending}))
    assert isinstance(console.file, StringIO)
    return code, console.file.getvalue()


async def test_every_request_gets_its_answer_in_openais_format(gw: Rig, tmp_path: Path) -> None:
    chat = line("chat", url="/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    bad = line("bad", prompt="x", temperature=9)
    source = write(tmp_path / "in.jsonl", [*completions(40), chat, bad])
    code, said = await batch(gw, source, tmp_path / "out.jsonl", url=f"{gw.url}/v1/")
    assert code == 1
    assert "41 answered, 1 failed, 0 had answers" in said
    assert "  1 failed: 400 temperature must be at least 0 and at most 2, not 9" in said
    out = read(tmp_path / "out.jsonl")
    assert set(out) == {*(f"r{i}" for i in range(40)), "chat", "bad"}
    assert out["r4"]["id"].startswith("batch_req_")
    assert out["r4"]["error"] is None
    assert out["r4"]["response"]["status_code"] == 200
    assert out["r4"]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert out["r4"]["response"]["request_id"]
    assert out["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert out["bad"]["response"]["body"]["error"]["param"] == "temperature"
    # Run again, there is nothing to do, and still not all of it went well.
    code, said = await batch(gw, source, tmp_path / "out.jsonl")
    assert code == 1
    assert "0 answered, 0 failed, 42 had answers already (1 of them errors)" in said
    assert read(tmp_path / "out.jsonl") == out


async def test_concurrency_is_the_most_requests_in_flight(gw: Rig, cluster: FakeCluster, tmp_path: Path) -> None:
    most = 0

    def script(request: Any) -> list[int]:
        nonlocal most
        most = max(most, len(gw.gateway._requests))
        return [66] * request.sampling.max_tokens

    cluster.script = script
    source = write(tmp_path / "in.jsonl", completions(30))
    assert (await batch(gw, source, tmp_path / "out.jsonl", concurrency=3))[0] == 0
    assert 1 <= most <= 3


async def test_temporary_failures_are_retried(gw: Rig, cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.decodes[0].faults.reject = 5
    cluster.prefills[0].faults.prefill_error = Overloaded("busy", retry_after_s=1)
    cluster.prefills[0].faults.prefill_errors = 7
    source, target = write(tmp_path / "in.jsonl", completions(10)), tmp_path / "out.jsonl"
    code, said = await batch(gw, source, target)
    assert (code, len(read(target))) == (0, 10)
    assert " 0 retries" not in said
    assert re.search(r"^try 2 of 11 in 0\.0 s: (503|429) ", said, re.MULTILINE)
    # The gateway dies: an error line each, and the next run has them answered.
    target.unlink()

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dying.close()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    dying = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    gone = f"http://127.0.0.1:{dying.sockets[0].getsockname()[1]}"
    code, said = await batch(gw, source, target, url=gone, retries=1, concurrency=1)
    lost_why = f"no answer from {gone}: ConnectError: "
    assert said.count("try 2 of 2 in ") == 1
    assert f"  10 failed: {lost_why}" in said
    lost = read(target)
    assert (code, len(lost)) == (1, 10)
    assert lost["r0"]["response"] is None
    assert lost["r0"]["error"]["code"] == "connection_error"
    code, said = await batch(gw, source, target)
    assert code == 0
    assert "10 answered, 0 failed, 0 had answers" in said
    assert {each["response"]["status_code"] for each in read(target).values()} == {200}


async def test_a_run_without_a_gateway_ends_at_once(gw: Rig, tmp_path: Path, unused_tcp_port: int) -> None:
    source, target = write(tmp_path / "in.jsonl", completions(10)), tmp_path / "out.jsonl"
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(Unavailable, match=f"^no answer from {url}: ConnectError.*is a gateway running there"):
        await batch(gw, source, target, url=url)
    assert target.read_bytes() == b""


async def test_errors_of_a_former_run_are_sent_again_on_request(gw: Rig, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    wrong = write(tmp_path / "wrong.jsonl", [line("a", prompt="x", temperature=9), line("b", prompt="x")])
    assert (await batch(gw, wrong, target))[0] == 1
    right = write(tmp_path / "right.jsonl", [line("a", prompt="x", temperature=1), line("b", prompt="x")])
    kept = read(target)["b"]
    console = Console(file=StringIO(), width=200)
    assert await run(console, right, target, Sending(url=gw.url), retry_errors=True) == 0
    assert isinstance(console.file, StringIO)
    assert "1 answered, 0 failed, 1 had answers already;" in console.file.getvalue()
    assert read(target)["a"]["response"]["status_code"] == 200
    assert read(target)["b"] == kept


async def test_a_second_run_continues_an_interrupted_one(gw: Rig, cluster: FakeCluster, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", completions(20)), tmp_path / "out.jsonl"
    cluster.decodes[0].faults.token_delay_s = 0.05
    run = asyncio.create_task(batch(gw, source, target, concurrency=2))
    while not target.exists() or target.read_bytes().count(b"\n") < 5:
        await asyncio.sleep(0.01)
    cluster.decodes[0].faults.stall_after = 0  # the first run does not end by itself
    with pytest.raises(ConfigError, match="another run"):
        await batch(gw, source, target)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    cluster.decodes[0].faults.stall_after = None
    before = read(target)
    with target.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_i')
    code, said = await batch(gw, source, target)
    assert code == 0
    assert f"{20 - len(before)} answered, 0 failed, {len(before)} had answers" in said
    after = read(target)
    assert len(after) == 20
    assert all(after[custom_id] == each for custom_id, each in before.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not a JSON object"),
        (json.dumps(line("a", prompt="x")) + "\n" + json.dumps(line("a", prompt="x")), "line 2: custom_id 'a'"),
        (json.dumps({**line("a"), "custom_id": 3}), "custom_id must be a non-empty string"),
        (json.dumps({**line("a"), "method": "GET"}), "method must be POST"),
        (json.dumps(line("a", url="/v1/models")), "url must be one of"),
        (json.dumps(line("a", prompt="x", stream=True)), "stream must not be true"),
        (json.dumps({**line("a"), "body": None}), "body must be a JSON object"),
    ],
)
def test_a_wrong_input_is_refused_before_any_request(text: str, said: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ConfigError, match=said):
        check(source)


def test_the_error_lists_every_wrong_line(tmp_path: Path) -> None:
    lines = [line("a", prompt="x"), line("a", prompt="x"), {**line("b"), "method": "GET"}, line("c"), line("a")]
    source = write(tmp_path / "in.jsonl", lines)
    with pytest.raises(ConfigError) as error:
        check(source)
    said = error.value.message.splitlines()
    assert [each.partition(": ")[0].rpartition(" ")[2] for each in said] == ["2", "3", "5"]
    assert "'a' is already used in line 1" in said[0]
    assert "'a' is already used in line 1" in said[2]
    source.write_text("x\n" * (MAX_LISTED_LINES + 5))
    with pytest.raises(ConfigError) as error:
        check(source)
    assert len(error.value.message.splitlines()) == MAX_LISTED_LINES + 1
    assert error.value.message.endswith("and 5 more lines")


def test_line_ends_and_byte_order_marks_of_other_systems(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    first, second = (json.dumps(line(name, prompt="é")) for name in ("a", "b"))
    source.write_bytes(b"\xef\xbb\xbf" + f"{first}\r\n\r\n  \n{second}".encode())
    assert [(r.custom_id, json.loads(r.body)["prompt"]) for r in requests(source)] == [("a", "é"), ("b", "é")]
    assert check(source) == 2


@pytest.mark.parametrize("text", ["my notes\nare here\n", "my notes", "{", json.dumps(line("a", prompt="x")), "\n"])
def test_a_file_with_other_content_is_refused_and_unchanged(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    if text == "{":  # may be the beginning of an output's first line
        Answers(path).__exit__()
        assert path.read_text() == ""
        return
    with pytest.raises(ConfigError, match="another file"):
        Answers(path)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == [path.name]


def test_only_regular_files_are_accepted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for use in (lambda: check(tmp_path / "pipe"), lambda: Answers(tmp_path / "pipe"), lambda: check(tmp_path)):
        with pytest.raises(ConfigError, match="not a regular file"):
            use()
    with pytest.raises(ConfigError, match="cannot read"):
        check(tmp_path / "absent")


async def test_a_full_disk_ends_the_run_with_an_error(gw: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write(tmp_path / "in.jsonl", completions(5)), tmp_path / "out.jsonl"

    def full(_file: int, _line: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cli.batch.os.write", full)
        with pytest.raises(ConfigError, match="No space left"):
            await batch(gw, source, target)
    assert (await batch(gw, source, target))[0] == 0
    assert len(read(target)) == 5


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
async def test_an_invalid_url_is_refused_at_once(url: str, gw: Rig, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", completions(1))
    with pytest.raises(ConfigError, match=r"^url: "):
        await batch(gw, source, tmp_path / "out.jsonl", url=url)
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(ConfigError, match="--api-key"):
        await batch(gw, source, tmp_path / "out.jsonl", api_key="schlüssel")


async def test_every_url_of_the_format_and_the_progress_bar(gw: Rig, tmp_path: Path) -> None:
    lines = [
        line("embeddings", url="/v1/embeddings", input=["Hi", "there"]),
        line("responses", url="/v1/responses", input="Hi", max_output_tokens=3),
        line("chat", url="/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=3),
        line("completion", prompt="Hi", max_tokens=3),
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    console = Console(file=StringIO(), width=200, force_terminal=True)
    assert await run(console, source, target, Sending(url=gw.url)) == 0
    out = {name: each["response"]["body"] for name, each in read(target).items()}
    assert [entry["object"] for entry in out["embeddings"]["data"]] == ["embedding"] * 2
    assert out["responses"]["object"] == "response"
    assert out["chat"]["object"] == "chat.completion"
    assert out["completion"]["object"] == "text_completion"
    assert isinstance(console.file, StringIO)
    said = console.file.getvalue()
    assert "4/4" in said
    prompts = sum(b["usage"].get("prompt_tokens") or b["usage"]["input_tokens"] for b in out.values())
    assert f"{prompts} prompt tokens, 9 generated" in said


async def test_a_refused_key_ends_the_run(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("")
    source, target = write(tmp_path / "in.jsonl", completions(5)), tmp_path / "out.jsonl"
    async with rig(cluster, smollm2_dir, api_keys=(str(tmp_path / "keys.json"),)) as gw:
        with pytest.raises(Unavailable, match="refuses the API key"):
            await batch(gw, source, target, api_key="x")
    assert target.read_bytes() == b""
