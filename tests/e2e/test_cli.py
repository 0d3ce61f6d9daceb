"""The `baton` command from outside: errors of one line, and the processes of `baton up`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.rigs.forked_cli import forked

BATON = [sys.executable, "-P", "-m", "cli"]
START_S = 240.0


def baton(*argv: str, env: dict[str, str] | None = None, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BATON, *argv],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


WRONG: list[tuple[list[str], str]] = [
    (["frobnicate"], "frobnicate"),
    (["up", "--frobnicate"], "--frobnicate"),
    (["up", "--prefill", "many"], "--prefill: invalid value 'many': expected an integer"),
    (["up", "--prefill", "-1"], "--prefill: invalid value -1: expected an integer"),
    (["up", "--max-tokens", "0"], "--max-tokens: invalid value 0"),
    (["up", "--port"], "(baton up --help)"),
    (["up", "--decode", "0"], "(baton up --help)"),
    (["up", "--block-size", "0"], "--block-size: invalid value 0"),
    (["up", "--kv-memory", "a lot"], "--kv-memory: invalid value 'a lot'"),
    (["up", "--model", "/does/not/exist"], "/does/not/exist"),
    (["up", "--redis", "http://localhost"], "redis"),
    (["serve"], "--role: missing"),
    (["serve", "--role", "referee"], "--role: invalid value 'referee': expected one of prefill, decode, both"),
    (["serve", "--role", "decode", "--drain-s", "soon"], "(baton serve --help)"),
    (["gateway", "--log-level", "loud"], "--log-level: invalid value 'loud'"),
    (["serve", "--role", "prefill", "--host", "0.0.0.0"], "secret"),
    (["serve", "--role", "decode", "--config", "/does/not/exist.toml"], "/does/not/exist.toml"),
    (["gateway", "--pods", "nowhere"], "pods"),
    (["gateway"], "expected --redis URL (the prefix index), --pods HOST:PORT,..., or --discovery k8s"),
    (["doctor", "--pods", "127.0.0.1:7000,nowhere"], "--pods: invalid value '127.0.0.1:7000,nowhere': expected"),
]


@pytest.fixture(scope="module")
def refused() -> list[subprocess.CompletedProcess[str]]:
    return forked([argv for argv, _ in WRONG])


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(argv) for argv, _ in WRONG])
def test_an_error_is_one_line_and_exit_code_2(number: int, refused: list[subprocess.CompletedProcess[str]]) -> None:
    done, (_, named) = refused[number], WRONG[number]
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr


def test_unknown_settings_in_file_and_environment_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("blok_size = 16\n")
    serve = ["serve", "--role", "decode"]
    refusals = forked(
        [[*serve, "--config", str(file)], [f"BATON_CONFIG={file}", *serve], ["BATON_BLOK_SIZE=16", *serve]]
    )
    for done, named in zip(refusals, ("blok_size", "blok_size", "BATON_BLOK_SIZE"), strict=True):
        assert done.returncode == 2
        assert named in done.stderr


def test_a_model_directory_without_a_file_is_refused_by_its_name(tmp_path: Path) -> None:
    files = ("config.json", "tokenizer.json", "model.safetensors")
    for missing in files:
        (tmp_path / missing).mkdir()
        for name in {*files} - {missing}:
            (tmp_path / missing / name).write_text("{}")
    for missing, done in zip(files, forked([["up", "--model", str(tmp_path / name)] for name in files]), strict=True):
        assert done.returncode == 2
        assert missing.removeprefix("model") in done.stderr.replace(str(tmp_path / missing), "")


def test_doctor_finds_what_the_tests_need() -> None:
    done = baton("doctor", timeout_s=280)
    assert done.returncode == 0, done.stdout
    assert "missing" not in done.stdout
    assert re.search(r"NIXL, default transport: .*intact", done.stdout)
    assert re.search(r"NIXL, TCP: .*intact.*tcp", done.stdout)


class Up:
    """A running `baton up` and its output so far."""

    def __init__(self, tmp: Path, model: Path, *argv: str) -> None:
        self.output = tmp / "output"
        flags = ["--model", str(model), "--log-dir", str(tmp / "logs"), "--kv-memory", "64M", *argv]
        with self.output.open("w") as out:
            env = {**os.environ, "COLUMNS": "80"}
            self.process = subprocess.Popen([*BATON, "up", *flags], stdout=out, stderr=subprocess.STDOUT, env=env)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.output.read_text())) is None:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)
        return found

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def services(self) -> dict[str, int]:
        """Returns the pid of each service by its command line."""
        commands = {" ".join(p.cmdline()): p.pid for p in self.children()}
        return {command: pid for command, pid in commands.items() if "common.grammar.zygote" not in command}


@pytest.fixture
def up(tmp_path: Path, smollm2_dir: Path) -> Iterator[Up]:
    running = Up(tmp_path, smollm2_dir, "--port", "0", "--served-name", "it's small", "--max-model-len", "96")
    yield running
    running.process.kill()
    running.process.wait()


def run_pasted(argv: list[str]) -> str:
    """Runs an example command unchanged and returns its output."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_up_serves_restarts_dead_processes_and_stops_all_of_them(up: Up) -> None:
    up.wait_for(r"curl -N (\S+)/chat/completions")
    examples = up.wait_for(r"(?s)\n(curl .*?)\n\n(from openai .*?)\n\ndashboard: ")
    answers = [run_pasted(["bash", "-c", examples[1]]), run_pasted([sys.executable, "-c", examples[2]])]
    assert answers[0].rstrip().endswith("data: [DONE]")
    assert answers[1].strip()

    before = up.services()
    assert len(before) == 4  # valkey, prefill-0, decode-0, gateway

    victim = next(pid for command, pid in before.items() if "--name=decode-0" in command)
    os.kill(victim, signal.SIGKILL)
    up.wait_for(r"(?s)decode-0 ended \(SIGKILL\).*decode-0 is ready again")
    after = up.services()
    assert after.keys() == before.keys()  # the same name and port
    assert {c for c in after if after[c] != before[c]} == {c for c in before if before[c] == victim}

    children = up.children()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(120) == 0
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_nothing_survives_the_death_of_up(up: Up) -> None:
    up.wait_for(r"decode-0 +starting")
    deadline = time.monotonic() + START_S
    while len(children := up.children()) < 4:  # the gateway starts last
        assert time.monotonic() < deadline, up.output.read_text()
        time.sleep(0.05)
    up.process.kill()
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_one_answer_and_where_its_time_went(tmp_path: Path, smollm2_dir: Path) -> None:
    flags = ["--model", str(smollm2_dir), "--log-dir", str(tmp_path), "--kv-memory", "64M", "--port", "0"]
    done = baton("up", *flags, "--once", "What is the capital of France?", "--chunk-tokens", "16", timeout_s=240)
    assert done.returncode == 0, done.stdout
    assert "The capital of France is Paris." in done.stdout
    for phase in ("gateway", "queue", "chunk 1", "chunk 2", "pushes", "hand-off", "decode"):
        assert re.search(rf"^{phase} +[\d.]+ ms", done.stdout, re.MULTILINE), phase
    assert "tokens/s on this" in done.stdout.splitlines()[-2]


def test_a_model_that_is_not_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    configs = ['{"architectures": ["BertForMaskedLM"]}', '{"model_type": "abacus"}', "[]"]
    logs, commands = tmp_path / "logs", []
    for number, config in enumerate(configs):
        (model := tmp_path / f"model-{number}").mkdir()
        for name, content in {"config.json": config, "tokenizer.json": "{}", "model.safetensors": ""}.items():
            (model / name).write_text(content)
        commands.append(["up", "--port", "0", "--model", str(model), "--log-dir", str(logs)])
        commands.append(["serve", "--role", "prefill", "--model", str(model)])
    reasons = ("BertForMaskedLM", "BertForMaskedLM", "abacus", "abacus", *2 * ("not a JSON object",))
    imports = "import engine, torch, transformers.models.auto.modeling_auto"  # once for all commands
    for done, reason in zip(forked(commands, before=imports), reasons, strict=True):
        assert done.returncode == 2
        assert re.fullmatch(rf"baton: .*{reason}.*\n", done.stderr)
    assert not logs.exists()


def test_a_port_that_was_asked_for_and_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        done = baton("up", "--port", str(port), "--log-dir", str(tmp_path / "logs"))
    assert done.returncode == 2
    assert done.stderr == f"baton: port: {port} is in use\n"
