"""The `baton` command as a person uses it: refusals in one line, `up` from the first to the last process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

BATON = [sys.executable, "-P", "-m", "common.cli"]
START_S = 120.0


def baton(*argv: str, env: dict[str, str] | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BATON, *argv],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["frobnicate"], "frobnicate"),
        (["up", "--frobnicate"], "--frobnicate"),
        (["up", "--prefill", "many"], "--prefill"),
        (["up", "--decode", "0"], "decode"),
        (["up", "--block-size", "0"], "block_size"),
        (["up", "--kv-memory", "a lot"], "kv_memory"),
        (["up", "--model", "/does/not/exist"], "/does/not/exist"),
        (["up", "--redis", "http://localhost"], "redis"),
        (["serve"], "role"),
        (["serve", "--role", "referee"], "--role"),
        (["serve", "--role", "prefill", "--host", "0.0.0.0"], "secret"),
        (["serve", "--role", "decode", "--config", "/does/not/exist.toml"], "/does/not/exist.toml"),
        (["gateway", "--pods", "nowhere"], "pods"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(argv: list[str], named: str) -> None:
    done = baton(*argv)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr


def test_unknown_settings_in_file_and_environment_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("blok_size = 16\n")
    for done in (
        baton("serve", "--role", "decode", "--config", str(file)),
        baton("serve", "--role", "decode", env={"BATON_CONFIG": str(file)}),
    ):
        assert done.returncode == 2
        assert "blok_size" in done.stderr
    done = baton("serve", "--role", "decode", env={"BATON_BLOK_SIZE": "16"})
    assert done.returncode == 2
    assert "BATON_BLOK_SIZE" in done.stderr


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_directory_without_a_file_is_refused_by_its_name(missing: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name != missing:
            (tmp_path / name).write_text("{}")
    done = baton("up", "--model", str(tmp_path))
    assert done.returncode == 2
    assert missing.removeprefix("model") in done.stderr


def test_doctor_finds_what_the_tests_need() -> None:
    done = baton("doctor", timeout_s=240)
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
            self.process = subprocess.Popen([*BATON, "up", *flags], stdout=out, stderr=subprocess.STDOUT)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.output.read_text())) is None:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)
        return found

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def up(tmp_path: Path, smollm2_dir: Path) -> Iterator[Up]:
    running = Up(tmp_path, smollm2_dir, "--port", "0")
    yield running
    running.process.kill()
    running.process.wait()


def test_up_serves_restarts_what_dies_and_takes_everything_along(up: Up) -> None:
    up.wait_for(r"curl -N (\S+)/chat/completions")
    before = {" ".join(p.cmdline()): p.pid for p in up.children()}
    assert len(before) == 4  # valkey, prefill-0, decode-0, gateway

    victim = next(pid for command, pid in before.items() if "--name=decode-0" in command)
    os.kill(victim, signal.SIGKILL)
    up.wait_for(r"decode-0 ended \(SIGKILL\)")
    up.wait_for(r"decode-0 is ready again")
    after = {" ".join(p.cmdline()): p.pid for p in up.children()}
    assert after.keys() == before.keys()  # the same name and port
    assert {c for c in after if after[c] != before[c]} == {c for c in before if before[c] == victim}

    children = up.children()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert not psutil.wait_procs(children, timeout=5)[1]


def test_nothing_survives_the_death_of_up(up: Up) -> None:
    up.wait_for(r"decode-0 +starting")
    children = up.children()
    assert len(children) == 4
    up.process.kill()
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_one_answer_and_where_its_time_went(tmp_path: Path, smollm2_dir: Path) -> None:
    flags = ["--model", str(smollm2_dir), "--log-dir", str(tmp_path), "--kv-memory", "64M", "--port", "0"]
    done = baton("up", *flags, "--once", "What is the capital of France?", "--chunk-tokens", "16", timeout_s=240)
    assert done.returncode == 0, done.stdout
    assert "The capital of France is Paris." in done.stdout
    for phase in ("gateway", "queue", "chunk 1", "chunk 2", "pushes", "hand-off", "decode"):
        assert re.search(rf"^{phase} +[\d.]+ ms", done.stdout, re.MULTILINE), phase


def test_up_gives_up_on_a_child_that_cannot_start(tmp_path: Path) -> None:
    for name, content in {"config.json": '{"model_type": "abacus"}', "tokenizer.json": "{}"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = baton("up", "--model", str(tmp_path), "--log-dir", str(tmp_path / "logs"), timeout_s=240)
    assert done.returncode in (1, 2)
    assert "baton: " in done.stderr
