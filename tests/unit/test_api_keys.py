"""API keys: their records, the callers they identify, and their files."""

from __future__ import annotations

import stat
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from common.errors import BatonError, ConfigError, InvalidApiKey
from gateway.admission.api_keys import Caller, KeySet, create_key
from gateway.admission.key_store import KeyFile, KeyRing
from gateway.api.http.endpoint import AuthMiddleware, caller_of

FIELDS = {"requests_per_minute": 5, "weight": 2.5, "models": ("a", "b"), "note": 'quo"te\x7f ü', "isolated": True}


def refused(call: object) -> None:
    with pytest.raises(InvalidApiKey):
        call()  # type: ignore[operator]


def test_only_the_exact_key_identifies_its_caller() -> None:
    key, record = create_key("acme", **FIELDS)
    other, _ = create_key("acme")
    keys = KeySet([record])
    caller = keys.identify(f"Bearer {key}")
    assert (caller.tenant, caller.key_id, caller.weight) == ("acme", record.id, 2.5)
    assert caller.limits.requests_per_minute == 5
    secret = key.removeprefix(f"sk-baton-{record.id}-")  # it can have "-" itself
    assert len(secret) == 43
    last = "A" if key[-2] != "A" else "B"
    for wrong in (
        "",
        key[:-1],
        key[:-2] + last + key[-1],
        key + "A",
        other,
        secret,
        key.upper(),
        f"sk-baton-{'0' * 12}-{'A' * 43}",
    ):
        refused(lambda wrong=wrong: keys.identify(f"Bearer {wrong}"))
    assert secret not in record.model_dump_json()
    assert record.hash != create_key("acme")[1].hash


def test_a_key_expires_at_its_time() -> None:
    now = datetime.now(UTC)
    key, record = create_key("t", expires=now + timedelta(hours=1))
    assert KeySet([record]).identify(f"Bearer {key}").tenant == "t"
    key, record = create_key("t", expires=now - timedelta(seconds=1))
    refused(lambda: KeySet([record]).identify(f"Bearer {key}"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weight": 0}, "weight"),
        ({"concurrent": -1}, "concurrent"),
        ({"limit": 3}, "limit"),
        ({"tenant": "a b"}, "tenant"),
    ],
)
def test_a_wrong_record_is_refused_by_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        create_key(**{"tenant": "t", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["keys.toml", "keys.json"])
def test_records_are_added_and_removed_and_the_file_is_private(name: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / name)
    records = [create_key("acme", **FIELDS)[1], create_key("b", priority=-3, admin=True)[1], create_key("c")[1]]
    for record in records:
        file.add(record)
    assert file.read() == records
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert not file.remove("0" * 12)
    assert file.remove(records[1].id)
    assert file.read() == [records[0], records[2]]
    assert file.remove(records[0].id)
    assert file.remove(records[2].id)
    assert file.read() == []


def test_comments_in_the_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# the keys of team A\n")
    file = KeyFile(path)
    one, two = create_key("one")[1], create_key("two")[1]
    file.add(one)
    path.write_text(path.read_text() + "# the second\n")
    file.add(two)
    file.remove(one.id)
    assert "# the keys of team A" in path.read_text()
    assert file.read() == [two]
    path.write_text("keys = [" + ", ".join(f"{{{_inline(r)}}}" for r in (one, two)) + "]\n")
    assert file.read() == [one, two]
    assert file.remove(one.id)  # not our layout, so the file is rewritten
    assert file.read() == [two]


def _inline(record: object) -> str:
    values = record.model_dump(mode="json", exclude_defaults=True)  # type: ignore[attr-defined]
    return ", ".join(f'{name} = "{value}"' for name, value in values.items())


@pytest.mark.parametrize("text", ["keys = 3", "[[keys]]\nid = 'x'", "[other]", "not toml at all ="])
def test_a_wrong_file_is_refused_and_says_which(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        KeyRing([str(path)])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        KeyRing([str(tmp_path / "none.toml")])
    with pytest.raises(ConfigError, match="--redis"):
        KeyRing(["redis"])


def test_without_sources_no_key_is_needed_and_with_an_empty_one_no_key_is_valid(tmp_path: Path) -> None:
    assert KeyRing().current.identify(None).admin
    path = tmp_path / "keys.json"
    path.write_text("")
    ring = KeyRing([str(path)])
    for header in (None, "", "Bearer", "Bearer x", "Basic abc"):
        refused(lambda header=header: ring.current.identify(header))


def test_priority_and_salt_of_a_key_bind_its_requests() -> None:
    low = Caller(tenant="a", key_id="1", priority=-2)
    assert [low.effective_priority(p) for p in (0, 5, -7)] == [-2, -2, -7]
    assert Caller().effective_priority(7) == 7
    high = Caller(tenant="a", key_id="1", cache_priority=1)
    assert [high.effective_cache_priority(p) for p in (0, 1, 2, -1)] == [1, 1, 1, -1]
    assert Caller().effective_cache_priority(2) == 2
    salts = {
        Caller(tenant="a", key_id="1", isolated=True).effective_salt(""),
        Caller(tenant="a", key_id="1", isolated=True).effective_salt("x"),
        Caller(tenant="b", key_id="2", isolated=True).effective_salt("x"),
        Caller(tenant="c", key_id="3").effective_salt("tenant:a:x"),
        Caller(tenant="c", key_id="3").effective_salt("salt:x"),
        Caller(tenant="c", key_id="3").effective_salt("x"),
        Caller(tenant="c", key_id="3").effective_salt(""),
    }
    assert len(salts) == 7
    for stranger in (Caller(), Caller(tenant="d", key_id="4"), Caller(tenant="d", key_id="4", isolated=True)):
        guesses = {stranger.effective_salt(salt, share_cache=True) for salt in (*salts, "", "x")}
        assert not guesses & salts
    shared = {Caller(tenant=t, key_id=t).effective_salt("x", share_cache=True) for t in ("c", "d")}
    assert shared == {Caller().effective_salt("x")}


def test_the_keys_command_creates_lists_and_revokes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_API_KEYS", raising=False)
    path = str(tmp_path / "keys.toml")
    run = CliRunner()
    made = run.invoke(app, ["keys", "create", "acme", "--api-keys", path, "--tokens-per-day", "1000", "--model", "m"])
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    caller = KeyRing([path]).current.identify(f"Bearer {key}")
    assert (caller.tenant, caller.models, caller.limits.tokens_per_day) == ("acme", ("m",), 1000)
    listed = run.invoke(app, ["keys", "list", "--api-keys", path])
    assert caller.key_id in listed.stdout.replace("\n", "")
    assert key.removeprefix(f"sk-baton-{caller.key_id}-") not in listed.stdout.replace("\n", "")
    assert tomllib.loads(Path(path).read_text())["keys"][0]["tenant"] == "acme"
    monkeypatch.setenv("BATON_API_KEYS", path)
    assert run.invoke(app, ["keys", "revoke", caller.key_id]).exit_code == 0
    assert isinstance(run.invoke(app, ["keys", "revoke", caller.key_id]).exception, BatonError)
    refused(lambda: KeyRing([path]).current.identify(f"Bearer {key}"))


def test_the_keys_command_sets_the_highest_cache_priority(tmp_path: Path) -> None:
    path, run = str(tmp_path / "keys.toml"), CliRunner()
    made = run.invoke(app, ["keys", "create", "acme", "--api-keys", path, "--cache-priority", "2"])
    assert made.exit_code == 0, made.output
    assert KeyRing([path]).current.identify(f"Bearer {made.stdout.strip()}").cache_priority == 2
    assert "cache priority 2" in " ".join(run.invoke(app, ["keys", "list", "--api-keys", path]).stdout.split())
    assert run.invoke(app, ["keys", "create", "acme", "--api-keys", path, "--cache-priority", "3"]).exit_code != 0


@pytest.mark.parametrize("argv", [["list"], ["create", "acme"], ["revoke", "0" * 12]])
def test_the_keys_command_does_not_change_a_file_that_is_not_text(argv: list[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff\xfe")
    error = CliRunner().invoke(app, ["keys", *argv, "--api-keys", str(path)]).exception
    assert isinstance(error, ConfigError)
    assert f"{path} is not UTF-8 text" in error.message
    assert path.read_bytes() == b"\xff\xfe"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["list"], "cannot read {path}: No such file or directory"),
        (["revoke", "0" * 12], "cannot write {path}: No such file or directory"),
        (["create", "not a name"], "tenant: invalid value 'not a name': expected 1 to 63 letters, digits"),
    ],
)
def test_the_keys_command_names_the_error(argv: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "keys.toml"
    error = CliRunner().invoke(app, ["keys", *argv, "--api-keys", str(path)]).exception
    assert isinstance(error, ConfigError)
    assert said.format(path=path) in error.message
    assert not path.parent.exists()


async def test_a_client_without_a_key_is_known_by_its_address() -> None:
    """Its grammars in proof are limited by its address, those of a key by the key."""
    callers: list[Caller] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        callers.append(caller_of(scope))

    key, record = create_key("acme")
    for keys, head in ((KeyRing().current, []), (KeySet([record]), [(b"authorization", f"Bearer {key}".encode())])):
        auth = AuthMiddleware(app, keys=SimpleNamespace(current=keys), open_metrics=True)  # type: ignore[arg-type]
        scope = {"type": "http", "path": "/v1/models", "headers": head, "client": ("10.1.2.3", 5)}
        await auth(scope, None, None)  # type: ignore[arg-type]
    assert [caller.client for caller in callers] == ["10.1.2.3", record.id]


def test_a_plain_key_is_that_of_the_operator() -> None:
    keys = KeyRing(plain=("open", "ünsafe")).current
    for key in ("open", "ünsafe"):
        caller = keys.identify(f"Bearer {key}")
        assert (caller.key_id, caller.admin) == ("api-key", True)
    for wrong in ("", "ope", "opens", "OPEN"):
        refused(lambda wrong=wrong: keys.identify(f"Bearer {wrong}"))
    refused(lambda: keys.identify(None))
    key, record = create_key("acme")
    both = KeySet([record], plain=["open"])
    assert both.identify(f"Bearer {key}").tenant == "acme"
    assert both.identify("Bearer open").admin
