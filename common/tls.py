"""Certificates of services: mutual TLS between gateways, pods and workers, and the public side of a gateway.

    tls_dir/ca.pem      the authorities that sign the certificates of peers
    tls_dir/cert.pem    this service's certificate: DNS name `baton`, one URI name spiffe://baton/ROLE/NAME
    tls_dir/key.pem     its private key

`baton certs DIR` makes them. The files are read again when they change, at most CHECK_S seconds later. A connection
keeps the certificates of its handshake. Files that do not fit each other are ignored until they do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from common.errors import ConfigError

SERVER_NAME = "baton"  #: DNS name of every service's certificate, so that addresses need no names.
ROLES = ("gateway", "prefill", "decode", "both", "worker", "operator")  #: Roles in the URI names of certificates.
CA_FILE, CERT_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
CHECK_S = 1.0  #: Pause between two looks at the files.
WARN_S = 7 * 86400.0  #: A certificate that expires within this time is logged.
_URI_PREFIX = "spiffe://baton/"

_log = logging.getLogger(__name__)


def spiffe_uri(role: str, name: str) -> str:
    """Returns the URI name of a service's certificate."""
    return f"{_URI_PREFIX}{role}/{name}"


def parse_identity(uri: str) -> tuple[str, str] | None:
    """Returns (role, name) of a certificate's URI name; None for a URI of another kind."""
    role, _, name = uri.removeprefix(_URI_PREFIX).partition("/")
    return (role, name) if uri.startswith(_URI_PREFIX) and role in ROLES and name else None


def peer_identity(context: Any) -> tuple[str, str] | None:
    """Returns (role, name) of the caller's certificate; None for a caller without one, over a plain connection.

    `context` is the servicer context of gRPC. The server has verified the certificate in the handshake.
    """
    uris = context.auth_context().get("peer_uri", ())
    identities = [parse_identity(uri.decode("utf-8", "replace")) for uri in uris]
    return identities[0] if len(identities) == 1 else None


def socket_identity(sock: ssl.SSLSocket) -> tuple[str, str] | None:
    """Returns (role, name) of the peer's verified certificate; None without one URI name of a role."""
    names: Any = (sock.getpeercert() or {}).get("subjectAltName", ())  # Pairs of kind and value
    identities = [parse_identity(value) for kind, value in names if kind == "URI"]
    return identities[0] if len(identities) == 1 else None


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the files at one time."""

    cert: bytes
    key: bytes
    ca: bytes | None


class TlsFiles:
    """A certificate, its key and, for mutual TLS, the authorities of peers. Any thread."""

    def __init__(self, cert: Path, key: Path, ca: Path | None = None, *, setting: str = "tls_dir") -> None:
        """Reads the files. Raises ConfigError for `setting` if they cannot be used."""
        self._paths = {"cert": cert, "key": key, **({"ca": ca} if ca is not None else {})}
        self._setting = setting
        self._remedy = "" if ca is None else " (make certificates: baton certs DIR)"
        self._lock = threading.Lock()
        self._problem, self._next_warning = "", 0.0
        self._seen = self._stamp()
        self._pems = self._read()
        self._next_check = time.monotonic() + CHECK_S
        self._warn_before_expiry(time.monotonic())

    @classmethod
    def of_directory(cls, directory: str | Path | None, *roles: str) -> TlsFiles | None:
        """Returns the files of `tls_dir`; None for None. Raises ConfigError if the certificate has none of `roles`."""
        if directory is None:
            return None
        where = Path(directory)
        files = cls(where / CERT_FILE, where / KEY_FILE, where / CA_FILE)
        identity = files.identity()
        if identity is None or identity[0] not in roles:
            has = "no URI name of a role" if identity is None else f"the role {identity[0]}"
            make = f"baton certs DIR --role {roles[0]}"
            files._fail(f"{where / CERT_FILE} has {has}; expected {' or '.join(roles)} (make it: {make})")
        return files

    def identity(self) -> tuple[str, str] | None:
        """Returns (role, name) of the own certificate; None without one URI name of a role."""
        from cryptography import x509

        certificate = x509.load_pem_x509_certificate(self.pems().cert)
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return None
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        usable = len(uris) == 1 and SERVER_NAME in names.get_values_for_type(x509.DNSName)
        return parse_identity(uris[0]) if usable else None

    def expires_at(self) -> float:
        """Returns the POSIX time at which the present certificate expires."""
        self.pems()
        return self._expires.timestamp()

    def pems(self) -> Pems:
        """Returns the current contents of the files."""
        now = time.monotonic()
        if now < self._next_check:
            return self._pems
        with self._lock:
            self._next_check = now + CHECK_S
            try:
                if (stamp := self._stamp()) != self._seen:
                    self._pems = self._read()
                    self._seen, self._problem = stamp, ""
                    _log.info("certificates in %s are read again", self._paths["cert"].parent)
            except ConfigError as error:
                if self._problem != error.message:
                    self._problem = error.message
                    _log.warning("changed certificates are not used: %s", error.message)
            self._warn_before_expiry(now)
            return self._pems

    def _warn_before_expiry(self, now: float) -> None:
        """Logs once a day that the certificate expires within WARN_S."""
        if now >= self._next_warning and self._expires.timestamp() - time.time() < WARN_S:
            self._next_warning = now + 86400.0
            _log.warning("%s expires on %s", self._paths["cert"], f"{self._expires:%Y-%m-%d %H:%M} UTC")

    def _stamp(self) -> tuple[object, ...]:
        """Returns what changes with the files. Raises ConfigError if one is missing."""
        try:
            stats = [os.stat(path) for path in self._paths.values()]
        except OSError as error:
            self._fail(f"cannot read {error.filename}: {error.strerror}{self._remedy}")
        return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in stats)

    def _read(self) -> Pems:
        """Reads and checks the files. Raises ConfigError."""
        try:
            read = {name: path.read_bytes() for name, path in self._paths.items()}
        except OSError as error:
            self._fail(f"cannot read {error.filename}: {error.strerror}{self._remedy}")
        pems = Pems(read["cert"], read["key"], read.get("ca"))
        self._check(pems)
        return pems

    def _check(self, pems: Pems) -> None:
        """Raises ConfigError if the key does not belong to the certificate, or the certificate has expired."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        cert, shape = self._paths["cert"], (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        try:
            certificate = x509.load_pem_x509_certificate(pems.cert)
            key = serialization.load_pem_private_key(pems.key, None)
            if pems.ca is not None:
                x509.load_pem_x509_certificates(pems.ca)
        except (ValueError, TypeError) as error:
            self._fail(f"{cert} and the files beside it are not PEM files without a password: {error}")
        if key.public_key().public_bytes(*shape) != certificate.public_key().public_bytes(*shape):
            self._fail(f"{self._paths['key']} is not the key of {cert}")
        expires = certificate.not_valid_after_utc
        if expires <= datetime.now(UTC):
            self._fail(f"{cert} expired on {expires:%Y-%m-%d}{self._remedy}")
        self._expires = expires

    def _fail(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self._setting}: {problem}", field=self._setting)

    def server_context(self) -> ssl.SSLContext:
        """Returns a server's context. Each handshake uses the current contents."""
        newest, made = self._context(ssl.PROTOCOL_TLS_SERVER), self.pems()

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            nonlocal newest, made
            if (now := self.pems()) is not made:
                with contextlib.suppress(OSError):  # the files are just being replaced
                    newest, made = self._context(ssl.PROTOCOL_TLS_SERVER), now
            connection.context = newest

        front = self._context(ssl.PROTOCOL_TLS_SERVER)
        front.sni_callback = choose
        return front

    def client_context(self) -> ssl.SSLContext:
        """Returns a client's context, with the current contents. Use server_hostname=SERVER_NAME."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._paths["cert"], self._paths["key"])
        if "ca" in self._paths:  # between services
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if protocol == ssl.PROTOCOL_TLS_SERVER:
                context.num_tickets = 0  # a readable socket has a message
            context.load_verify_locations(self._paths["ca"])
            context.verify_mode = ssl.CERT_REQUIRED
        return context
