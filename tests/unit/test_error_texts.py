"""`describe` has words with the cause for every failure, and each handler of the sources uses `describe`."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from redis import exceptions as redis_errors

import common.redis.client
import common.rpc
from common.errors import InternalError, Unavailable, describe
from common.wire import error_to_pb

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("common", "prefix_index", "engine", "kv_transfer", "pod", "prefill_service", "decode_service", "gateway"),
    *("cli", "baton", "simulator", "loadtest"),
)


class _Private(Exception):
    pass


class _PrivateTimeout(Exception):
    pass


def caused_by(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


CALLS = ("[Errno 111] Connect call failed ('::1', 1, 0, 0)", "[Errno 111] Connect call failed ('127.0.0.1', 1)")
MULTIPLE = f"Multiple exceptions: {', '.join(CALLS)}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "timed out after 0.5 s"),
        (TimeoutError(110, "Connection timed out"), "connection timed out"),
        (httpx.ConnectTimeout(""), "timed out after 0.5 s"),
        (httpx.ConnectError("[Errno 111] Connection refused"), "connection refused"),
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 6379)"), "connection refused (127.0.0.1:6379)"),
        (OSError(MULTIPLE), "connection refused ([::1]:1, 127.0.0.1:1)"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), "no such file or directory (/x/y)"),
        (KeyError("weight_map"), "'weight_map' is missing"),
        (MemoryError(), "out of memory"),
        (EOFError(), "the other side ended the connection"),
        (AssertionError(), "AssertionError without a text"),
        (RuntimeError("boom\nand more"), "boom"),
        (IndexError("3"), "IndexError: 3"),
        (_Private("the lease was refused"), "the lease was refused"),
        (_Private(), "Exception without a text"),
        (_PrivateTimeout(), "timed out after 0.5 s"),
        (caused_by(Exception(), TimeoutError()), "timed out after 0.5 s"),
        (ExceptionGroup("several", [ValueError("a"), TimeoutError()]), "a; timed out after 0.5 s"),
        (Unavailable("the pod is leaving"), "the pod is leaving"),
        (InternalError(""), "InternalError without a text"),
    ],
)
def test_every_failure_has_words(error: BaseException, words: str) -> None:
    assert describe(error, limit_s=0.5) == words


def test_a_time_out_without_a_known_limit() -> None:
    assert describe(TimeoutError()) == "timed out"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "ConnectionError: Error 111 connecting to 127.0.0.1:1. Connect call failed.",
            "connection refused (127.0.0.1:1)",
        ),
        (f"ConnectionError: Error {MULTIPLE} connecting to localhost:1.", "connection refused (localhost:1)"),
        (
            "ConnectionError: Error while reading from h:1 : (104, 'Connection reset by peer')",
            "connection reset by peer",
        ),
        ("ConnectionError: Connection closed by server.", "connection closed by the server"),
        (
            "ConnectionError: Error 1 connecting to h:1. [SSL: WRONG_VERSION_NUMBER] wrong.",
            "TLS: the server does not use TLS",
        ),
        ("ConnectionError: ", "connection failed"),
        ("TimeoutError: Timeout reading from 127.0.0.1:6379", "timed out after 0.5 s"),
        ("AuthenticationError: invalid username-password pair or user is disabled.", "wrong password or user"),
        ("AuthenticationError: Authentication required.", "password missing"),
        ("NoPermissionError: this user has no permissions to run the 'hget' command", "no permission for this command"),
        ("BusyLoadingError: Redis is loading the dataset in memory", "loading its data"),
        ("ReadOnlyError: You can't write against a read only replica.", "read-only replica"),
        ("MasterDownError: Link with MASTER is down", "replica without its primary"),
        ("OutOfMemoryError: command not allowed when used memory > 'maxmemory'.", "memory full"),
        ("ResponseError: MISCONF unable to persist to disk", "no writes, because saving to disk fails"),
        ("RedisClusterException: Redis Cluster cannot be connected", "Redis Cluster cannot be connected"),
    ],
)
def test_the_causes_of_an_index_that_is_away(error: str, words: str) -> None:
    kind, _, text = error.partition(": ")
    assert describe(getattr(redis_errors, kind)(text), limit_s=0.5).startswith(words)


def rpc_error(code: grpc.StatusCode, details: str, *trailer: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details)


def test_a_failed_call_says_what_the_peer_reported_or_why_it_was_not_reached() -> None:
    refused = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
        "connect: Connection refused (111)"
    )
    assert describe(rpc_error(grpc.StatusCode.UNAVAILABLE, refused)) == "connection refused"
    assert (
        describe(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), limit_s=2.0)
        == "timed out after 2 s"
    )
    assert describe(rpc_error(grpc.StatusCode.UNAVAILABLE, "")) == "UNAVAILABLE"
    reported = (common.rpc.ERROR_KEY, error_to_pb(Unavailable("the pod is leaving")).SerializeToString())
    assert describe(rpc_error(grpc.StatusCode.UNAVAILABLE, "x", reported)) == "the pod is leaving"


#: Exceptions whose text may be empty or name no cause.
WITHOUT_WORDS = {
    *("Exception", "BaseException", "OSError", "TimeoutError", "MemoryError", "EOFError", "AssertionError", "KeyError"),
    *("REDIS_FAILURES", "RedisError", "httpx.HTTPError", "httpx.TimeoutException", "httpx.ConnectError"),
    *("httpx.StreamError", "grpc.aio.AioRpcError", "asyncio.InvalidStateError"),
}


def caught(kinds: ast.expr | None) -> Iterator[str]:
    """Returns the names of the exceptions that a handler catches."""
    match kinds:
        case None:
            yield "BaseException"
        case ast.Tuple(elts=parts):
            for part in parts:
                yield from caught(part)
        case ast.Starred(value=inner):
            yield from caught(inner)
        case _:
            yield ast.unparse(kinds)


def exceptions_of(tree: ast.AST) -> Iterator[tuple[str | None, list[ast.stmt]]]:
    """The names of such exceptions, with the code in which they have them: of handlers, and the results of tasks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and WITHOUT_WORDS.intersection(caught(node.type)):
            yield node.name, node.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                match inner:
                    case ast.NamedExpr(target=ast.Name(id=name), value=ast.Call(func=ast.Attribute(attr="exception"))):
                        yield name, node.body


def own_words(tree: ast.AST) -> Iterator[int]:
    """Lines that make a text of such an exception without `describe`."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for name, body in exceptions_of(tree):
        for node in (node for part in body for node in ast.walk(part)):
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            parent = parents[node]
            if isinstance(parent, ast.FormattedValue):
                yield node.lineno
            if isinstance(parent, ast.Call) and node in parent.args:
                function = ast.unparse(parent.func)
                named = function == "type" and ast.unparse(parents[parent]).endswith(".__name__")
                if function in ("str", "repr") or function.startswith(("log.", "_log.")) or named:
                    yield node.lineno


#: Lines that look at a text or a name, and report neither.
ALLOWED = {
    "engine/models/hf/spec.py": 1,  # the text decides which words are used
}


def test_no_handler_reports_an_exception_by_its_text_or_class_alone() -> None:
    """To mend a failure, use `describe`: str() of a TimeoutError is empty, and a private class has a private name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            lines = list(own_words(ast.parse(file.read_text())))
            if len(lines) > ALLOWED.get(name, 0):
                found[name] = lines
    assert found == {}


def test_the_check_finds_each_form() -> None:
    forms = ('log.info("x %s", e)', 'f"{e}"', "repr(e)", "str(e)", 'f"{type(e).__name__}"')
    for form in forms:
        assert list(own_words(ast.parse(f"try:\n  pass\nexcept OSError as e:\n  {form}\n"))) == [4], form
    assert list(own_words(ast.parse("def f(t):\n  if e := t.exception():\n    log.info('%s', e)\n"))) == [3]
    assert not list(own_words(ast.parse("try:\n  pass\nexcept OSError as e:\n  log.info('%s', describe(e))\n")))
    assert not list(own_words(ast.parse("try:\n  pass\nexcept ConfigError as e:\n  log.info('%s', e)\n")))
