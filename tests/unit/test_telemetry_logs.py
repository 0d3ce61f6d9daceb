"""Metrics are per service and served over HTTP; logs are one JSON object per line with the log context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from cli.stack.certificates import Authority
from common.errors import ConfigError
from common.telemetry import Metrics
from common.tls import CERT_FILE, KEY_FILE

ROOT = Path(__file__).parents[2]


def test_names_labels_and_values() -> None:
    metrics = Metrics()
    metrics.counter("requests", "Requests.", ["status"]).labels("200").inc(2)
    metrics.gauge("running", "Running.").set(3)
    metrics.histogram("ttft_seconds", "First token.").observe(0.03)
    metrics.sampled_gauge("kv_blocks", "Blocks by state.", lambda: [(("free",), 7), (("cached",), 1)], ["state"])
    metrics.sampled_counter("steps", "Steps.", lambda: [((), 9)])
    text = metrics.exposition().decode()
    for line in (
        'baton_requests_total{status="200"} 2.0',
        "baton_running 3.0",
        'baton_ttft_seconds_bucket{le="0.05"} 1.0',
        'baton_kv_blocks{state="free"} 7.0',
        "baton_steps_total 9.0",
    ):
        assert line in text.splitlines()


def test_two_metrics_objects_share_nothing_and_a_name_is_declared_once() -> None:
    first, second = Metrics(), Metrics()
    first.counter("requests", "Requests.").inc()
    second.counter("requests", "Requests.")
    assert "baton_requests_total 0.0" in second.exposition().decode()
    with pytest.raises(ValueError, match="Duplicated"):
        first.counter("requests", "Requests.")


def test_the_endpoint() -> None:
    metrics = Metrics()
    metrics.gauge("up", "Up.").set(1)
    server = metrics.start_metrics_server(0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert b"baton_up 1.0" in answer.read()
        with pytest.raises(ConfigError) as e:
            metrics.start_metrics_server(server.port)
        assert e.value.field == "metrics_port"
    finally:
        server.stop()


def logged(code: str) -> list[dict[str, object]]:
    """Runs code in a child process, because logging is global, and returns the lines of its stderr."""
    setup = "import asyncio, logging\nfrom common.logs import log_context, setup_logs\n"
    setup += "setup_logs('info', 'json')\n"
    run = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == ""
    return [json.loads(line) for line in run.stderr.splitlines()]


def test_lines_of_all_tasks_in_a_context_carry_the_request_id() -> None:
    lines = logged("""
with log_context(request_id="r1"):
    logging.getLogger("a").info("hello", extra={"tokens": 3})
    logging.getLogger("b").warning("n = %d", 7, extra={"pod": "p"})
    async def task():
        logging.getLogger("c").info("inside")
    asyncio.run(task())
logging.getLogger("b").info("outside")
logging.getLogger("b").debug("not shown")
""")
    assert [(x["event"], x["level"], x["logger"], x.get("request_id")) for x in lines] == [
        ("hello", "info", "a", "r1"),
        ("n = 7", "warning", "b", "r1"),
        ("inside", "info", "c", "r1"),
        ("outside", "info", "b", None),
    ]
    assert (lines[0]["tokens"], lines[1]["pod"]) == (3, "p")
    assert all("timestamp" in x for x in lines)


@pytest.mark.parametrize(("format", "json_lines"), [("auto", True), ("json", True), ("text", False)])
def test_lines_are_json_unless_stderr_is_a_terminal(format: str, json_lines: bool) -> None:
    code = f"import logging; from common.logs import setup_logs; setup_logs('info', {format!r}); logging.info('hi')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    (line,) = run.stderr.splitlines()
    assert line.startswith("{") is json_lines
    assert "hi" in line


def test_values_without_json_type_are_written_as_their_repr() -> None:
    (line,) = logged("logging.getLogger('a').info('x', extra={'where': __import__('pathlib').Path('/p'), 'n': {1: 2}})")
    assert (line["where"], line["n"]) == ("PosixPath('/p')", {"1": 2})


def test_uvicorn_logs_each_event_once_under_its_own_name() -> None:
    (line,) = logged("logging.getLogger('uvicorn.error').info('up %d', 7, extra={'color_message': 'up %d'})")
    assert line.keys() == {"event", "logger", "level", "timestamp"}
    assert (line["event"], line["logger"]) == ("up 7", "uvicorn")


#: A TLS server of gRPC gets bytes that are no handshake, which gRPC's core writes to stderr.
STRANGER = """
import socket, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from common.logs import setup_logs
setup_logs("info", "json")
import grpc
server = grpc.server(ThreadPoolExecutor(1))
credentials = grpc.ssl_server_credentials([(Path(KEY).read_bytes(), Path(CERT).read_bytes())])
port = server.add_secure_port("127.0.0.1:0", credentials)
server.start()
with socket.create_connection(("127.0.0.1", port)) as stranger:
    stranger.sendall(b"no handshake" * 20)
    while stranger.recv(1000):
        pass
time.sleep(SECONDS)
server.stop(0)
"""


@pytest.mark.parametrize(("verbosity", "writes"), [(None, False), ("INFO", True)])
def test_grpc_writes_no_lines_of_its_own_unless_it_is_asked_to(
    tmp_path: Path, verbosity: str | None, writes: bool
) -> None:
    Authority.create().issue(tmp_path, "gateway", "gateway", 1)
    code = STRANGER.replace("KEY", repr(str(tmp_path / KEY_FILE))).replace("CERT", repr(str(tmp_path / CERT_FILE)))
    code = code.replace("SECONDS", "2.0" if writes else "0.5")
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    env |= {} if verbosity is None else {"GRPC_VERBOSITY": verbosity}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=env)
    assert ("Handshake failed" in run.stderr) is writes, run.stderr
    if not writes:
        assert run.stderr == ""


def test_a_traceback_is_part_of_its_line() -> None:
    (line,) = logged("""
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("a").exception("failed")
""")
    assert "ZeroDivisionError" in str(line["exception"])
