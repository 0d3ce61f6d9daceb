"""`baton chat` and `baton bench` with a gateway over fake pods: conversations, commands, pipes, a terminal, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import sys
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.chat import Chat, answer_input
from cli.client import Server
from cli.commands import bench
from common.errors import ConfigError, Unavailable
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.waiting import until

BATON = [sys.executable, "-P", "-m", "cli"]


class Pipe(StringIO):
    """A stdin that is no terminal."""

    def isatty(self) -> bool:
        return False


@contextlib.contextmanager
def chatting(gw: Rig, *, terminal: bool = False, api_key: str | None = None, **options: Any) -> Iterator[Chat]:
    """A chat whose consoles write to memory."""
    consoles = [Console(file=StringIO(), width=200, force_terminal=terminal, color_system=None) for _ in range(2)]
    with Server(gw.url, api_key) as server:
        yield Chat(server, MODEL, {"max_tokens": 5, **options}, *consoles)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def test_a_conversation_is_kept_until_it_is_cleared(gw: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with chatting(gw) as chat:
        sent = list[list[dict[str, str]]]()
        stream = Server.stream_chat

        def spy(self: Server, body: Any, *args: Any) -> Any:
            sent.append(body["messages"])
            return stream(self, body, *args)

        monkeypatch.setattr(Server, "stream_chat", spy)
        await asyncio.to_thread(chat.run, "/system Be brief.")
        await asyncio.to_thread(chat.ask, "Hello")
        await asyncio.to_thread(chat.ask, "And now?")
        first, second = (message["content"] for message in chat.messages if message["role"] == "assistant")
        assert (len(first), len(second)) == (5, 5)
        assert shown(chat.console) == f"{first}\n{second}\n"
        system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
        answered, now = {"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}
        assert sent == [[system, hello], [system, hello, answered, now]]
        await asyncio.to_thread(chat.run, "/retry")
        assert sent[-1] == sent[-2]
        assert len(chat.messages) == 4
        await asyncio.to_thread(chat.run, "/clear")
        await asyncio.to_thread(chat.run, "/system")
        await asyncio.to_thread(chat.ask, "Hello")
        assert sent[-1] == [hello]


async def test_the_trace_shows_queue_prefill_transfer_and_decode(gw: Rig) -> None:
    with chatting(gw) as chat:
        await asyncio.to_thread(chat.run, "/trace")
        assert "there is no complete answer yet" in shown(chat.notes)
        await asyncio.to_thread(chat.ask, "Hello")
        await gw.settled()
        await asyncio.to_thread(chat.run, "/trace")
    said = shown(chat.notes)
    for part in ("gateway", "queue ", "prefill ", "transfer ", "decode ", " ms", "5 generated (length)"):
        assert part in said, part


async def test_ctrl_c_ends_the_answer_and_not_the_chat(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.05
    with chatting(gw, terminal=True, max_tokens=400) as chat:
        show = chat._show

        def interrupted(said: list[str], style: str | None = None) -> Any:
            write = show(said, style)

            def on_text(text: str) -> None:
                write(text)
                if len("".join(said)) >= 3:
                    raise KeyboardInterrupt

            return on_text

        chat._show = interrupted  # type: ignore[method-assign]
        await asyncio.to_thread(chat.ask, "Hello")
        assert "(stopped)" in shown(chat.notes)
        assert 3 <= len(chat.messages[-1]["content"]) < 400, "the part that arrived is in the conversation"
        await until(lambda: cluster.all_idle())


async def test_a_failed_request_leaves_the_conversation_as_it_was(gw: Rig) -> None:
    with chatting(gw) as chat:
        await asyncio.to_thread(chat.ask, "Hello")
        before = list(chat.messages)
        chat.options = {"temperature": 9}
        with pytest.raises(Unavailable, match="answered 400 to POST /v1/chat/completions: temperature must be"):
            await asyncio.to_thread(chat.ask, "Again")
        assert chat.messages == before
        with pytest.raises(Unavailable):
            await asyncio.to_thread(chat.run, "/retry")
        assert chat.messages == before


async def test_line_separators_of_unicode_are_text(gw: Rig, cluster: FakeCluster) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\nf"
    ids = gw.gateway.tokenizer.encode(text, add_special_tokens=False)
    cluster.script = lambda _request: ids
    with chatting(gw, max_tokens=len(ids)) as chat:
        await asyncio.to_thread(chat.ask, "Hello")
        assert chat.messages[-1]["content"] == text


async def test_a_terminal_gets_no_control_characters_of_an_answer(gw: Rig) -> None:
    with chatting(gw, terminal=True) as chat:
        chat._show([])("a\x1b[2Jb\x07c\nd\x9b")
        assert shown(chat.console) == "a[2Jbc\nd"
    with chatting(gw) as chat:
        chat._show([])("a\x1b[2J")
        assert shown(chat.console) == "a\x1b[2J", "a file gets the text as it is"


async def test_a_pipe_is_one_message_or_a_script(gw: Rig) -> None:
    with chatting(gw) as chat:
        assert await asyncio.to_thread(answer_input, chat, Pipe("a\nb\n"), "What is this?") == 0
        assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["What is this?\n\na\nb"]
        chat.run("/clear")
        assert await asyncio.to_thread(answer_input, chat, Pipe("one\n\ntwo\n/quit\nthree\n"), None) == 0
        assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["one", "two"]
        with pytest.raises(ConfigError, match="stdin has no text"):
            answer_input(chat, Pipe(" \n"), None)


async def test_keys_and_unreachable_servers(cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int) -> None:
    async with rig(cluster, smollm2_dir, api_key=("my key".replace(" ", "-"),)) as gw:
        with chatting(gw, api_key="my-key") as chat:
            await asyncio.to_thread(chat.ask, "Hello")
            assert len(shown(chat.console)) == 6
            assert await asyncio.to_thread(chat.server.timeline, chat.last.request_id if chat.last else "")
        for key in (None, "my-keys"):
            with chatting(gw, api_key=key) as chat, pytest.raises(Unavailable, match="answered 401"):
                await asyncio.to_thread(chat.ask, "Hello")
    with (
        Server(f"127.0.0.1:{unused_tcp_port}") as server,
        pytest.raises(Unavailable, match="start one with `baton serve MODEL`"),
    ):
        server.models()
    with pytest.raises(ConfigError, match="is not like http://HOST:PORT"):
        Server("ftp://127.0.0.1:1")


@contextlib.asynccontextmanager
async def terminal_of(*argv: str, env: dict[str, str]) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    """A `baton` process with a terminal of its own: the other end of the terminal, and the process."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *BATON, *argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **env}, start_new_session=True
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield ours, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(ours)


async def test_a_chat_in_a_terminal(gw: Rig, tmp_path: Path) -> None:
    seen = ""

    def reads(text: str) -> bool:
        nonlocal seen
        with contextlib.suppress(BlockingIOError, OSError):
            seen += os.read(screen, 65536).decode(errors="replace")
        return text in seen

    env = {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    async with terminal_of("chat", gw.url, "--max-tokens", "6", "--trace", env=env) as (screen, process):
        await until(lambda: reads(f"{MODEL} at {gw.url}"))
        os.write(screen, b"Hello\n")
        await until(lambda: reads("6 generated (length)"))
        assert "transfer" in seen
        os.write(screen, b"\x03")  # Ctrl-C at the prompt clears the line
        os.write(screen, b"/quit\n")
        assert await asyncio.wait_for(process.wait(), 30) == 0
    history = tmp_path / "baton" / "chat_history"
    assert "Hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0, "prompts are private"


async def test_the_answer_alone_goes_through_a_pipe(gw: Rig) -> None:
    process = await asyncio.create_subprocess_exec(
        *BATON, "chat", gw.url, "--max-tokens", "4", stdin=-1, stdout=-1, stderr=-1
    )
    out, err = await process.communicate(b"Hello\n")
    assert (process.returncode, len(out.decode()), out[-1:]) == (0, 5, b"\n")
    assert b"--max-tokens" in err


async def test_a_bench_measures_each_number_of_users_and_ends_with_a_verdict(gw: Rig) -> None:
    argv = ["bench", gw.url, "--users", "1,3", "--seconds", "3", "--output-tokens", "8", "--input-tokens", "16", "-q"]
    process = await asyncio.create_subprocess_exec(*BATON, *argv, "--json", stdout=-1, stderr=-1)
    out, err = await process.communicate()
    assert process.returncode == 0, err
    one, three = json.loads(out)
    assert (one["users"], three["users"]) == (1, 3)
    assert one["answered"] > 0
    assert one["failed"] == three["failed"] == 0
    assert one["output_tokens_per_s"] == pytest.approx(8 * one["answers_per_s"])
    process = await asyncio.create_subprocess_exec(*BATON, *argv, stdout=-1, stderr=-1)
    out, _ = await process.communicate()
    table = out.decode()
    assert "between tokens p99 ms" in table  # whole, at 80 columns
    assert table.rstrip().splitlines()[-1].startswith("Verdict: "), table


def document(users: int, tokens_per_s: float, answered: int = 10, failed: int = 0) -> dict[str, Any]:
    times = {name: {"p50": 100.0, "p99": 200.0} for name in ("ttft", "itl", "e2e", "tpot")}
    rates = {"answered_per_s": 1.0, "output_tokens_per_s": tokens_per_s}
    requests = {"answered": answered, "failed": failed}
    errors = [{"kind": "http 503", "count": failed, "messages": ["no pods"]}] if failed else []
    config = {"users": users}
    return {"config": config, "requests": requests, "rates": rates, "latencies_ms": times, "errors": errors}


def test_the_verdict_names_the_users_from_which_more_hardly_help() -> None:
    said = bench.verdict([document(1, 20), document(4, 60), document(16, 62)])
    assert said == (
        "Verdict: 4 users at once get 60 output tokens/s (10.0 each), and the first token after 100 ms in the median, "
        "more users hardly give more."
    )
    assert "16 users" in bench.verdict([document(1, 20), document(4, 60), document(16, 100)])
    assert "more users may give more" in bench.verdict([document(1, 20), document(16, 100, failed=2)])
    assert bench.verdict([document(1, 0, 0, 5)]) == "Verdict: no request was answered: http 503, no pods."


@pytest.mark.parametrize("text", ["", "0", "4,1", "1,1", "x", "1,"])
def test_wrong_numbers_of_users_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--users"):
        bench._stages(text)
