"""Certificates: the files of a service, their errors and their reload, and `baton certs`."""

from __future__ import annotations

import logging
import shutil
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from cli.app import app
from cli.stack.certificates import Authority
from common import tls
from common.errors import ConfigError
from common.settings.gateway import GatewayConfig
from common.tls import TlsFiles, parse_identity, spiffe_uri


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create()


def issued(authority: Authority, directory: Path, role: str = "decode", days: int = 30) -> Path:
    authority.issue(directory, role, f"{role}-0", days)
    return directory


def files(directory: Path, *roles: str) -> TlsFiles:
    found = TlsFiles.of_directory(directory, *(roles or ("decode",)))
    assert found is not None
    return found


def test_a_service_has_the_role_and_name_of_its_certificate(authority: Authority, tmp_path: Path) -> None:
    assert files(issued(authority, tmp_path)).identity() == ("decode", "decode-0")
    assert TlsFiles.of_directory(None, "decode") is None


@pytest.mark.parametrize("uri", ["", "spiffe://baton/chef/a", "spiffe://other/decode/a", "spiffe://baton/decode/", "x"])
def test_another_uri_is_no_identity(uri: str) -> None:
    assert parse_identity(uri) is None
    assert parse_identity(spiffe_uri("worker", "a/b")) == ("worker", "a/b")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "key.pem").unlink(), r"cannot read .*key\.pem: No such file.*baton certs DIR"),
        (lambda d: (d / "cert.pem").write_text("no PEM"), r"cert\.pem and the files beside it are not PEM files"),
        (lambda d: (d / "ca.pem").write_text(""), r"are not PEM files"),
        (lambda d: issued(Authority.create(), d / "x") and shutil.copy(d / "x/key.pem", d), r"is not the key of"),
        (lambda d: issued(Authority.create(), d, "prefill"), r"has the role prefill; expected decode .*--role decode"),
        (lambda d: issued(Authority.create(), d, days=0), r"expired on .*baton certs DIR"),
    ],
)
def test_files_that_cannot_be_used_are_an_error_with_a_remedy(
    damage: object, message: str, authority: Authority, tmp_path: Path
) -> None:
    issued(authority, tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as error:
        files(tmp_path)
    assert error.value.field == "tls_dir"


def test_files_are_read_again_when_they_change(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "CHECK_S", 0.0)
    found = files(issued(authority, tmp_path))
    first = found.pems()
    assert found.pems() is first
    issued(Authority.create(), tmp_path)
    second = found.pems()
    assert second != first
    assert second.cert == (tmp_path / "cert.pem").read_bytes()
    (tmp_path / "key.pem").write_bytes(first.key)  # not yet the key of the certificate
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert found.pems() is second
    assert caplog.text.count("changed certificates are not used") == 1
    (tmp_path / "cert.pem").write_bytes(first.cert)
    assert found.pems().cert == first.cert


def test_a_certificate_that_expires_soon_is_logged(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        files(issued(authority, tmp_path / "long", days=30))
        assert not caplog.text
        files(issued(authority, tmp_path / "short", days=2))
    assert "cert.pem expires on" in caplog.text


def test_contexts_between_services_need_certificates_of_both_ends(authority: Authority, tmp_path: Path) -> None:
    found = files(issued(authority, tmp_path))
    for context in (found.server_context(), found.client_context()):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    public = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem", setting="tls_cert")
    assert public.server_context().verify_mode is ssl.CERT_NONE


def test_the_public_certificate_needs_its_key() -> None:
    for given, missing in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        with pytest.raises(ConfigError, match=f"{missing}: missing") as error:
            GatewayConfig.load(file=None, env={}, flags={given: "file.pem"})
        assert error.value.field == missing


def test_the_command_makes_and_renews_certificates(tmp_path: Path) -> None:
    directory = tmp_path / "certs"

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["certs", str(directory), *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert len(run().splitlines()) == len(tls.ROLES)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    keys = [directory / "ca-key.pem", *directory.glob("*/key.pem")]
    assert len(keys) == 1 + len(tls.ROLES)
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    before = {role: (directory / role / "cert.pem").read_bytes() for role in tls.ROLES}
    ca = (directory / "ca.pem").read_bytes()
    run("--role", "decode", "--name", "pod-7", "--days", "3")
    assert files(directory / "pod-7").identity() == ("decode", "pod-7")
    run()  # renews all, by the same authority
    assert (directory / "ca.pem").read_bytes() == ca
    for role in tls.ROLES:
        renewed = files(directory / role, role)
        assert renewed.identity() == (role, role)
        assert renewed.pems().cert != before[role]
        x509.load_pem_x509_certificate(renewed.pems().cert).verify_directly_issued_by(
            x509.load_pem_x509_certificate(ca)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "chef"], "--role: invalid value 'chef': expected one of gateway, prefill"),
        (["--name", "a"], "--role: missing"),
        (["--role", "decode", "--name", "a/b"], "--name: invalid value 'a/b'"),
    ],
)
def test_the_command_refuses_what_makes_no_certificate(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["certs", str(tmp_path / "new"), *arguments], catch_exceptions=False)
    assert not (tmp_path / "new").exists()


def test_the_command_keeps_an_authority_whose_key_is_elsewhere(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["certs", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "ca-key.pem").unlink()
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(ConfigError, match=r"has ca\.pem without ca-key\.pem: bring the key back"):
        CliRunner().invoke(app, ["certs", str(tmp_path)], catch_exceptions=False)
    assert (tmp_path / "ca.pem").read_bytes() == before
