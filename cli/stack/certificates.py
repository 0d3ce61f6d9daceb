"""Makes an authority and the certificates of services that it signs. common/tls.py describes the files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import ConfigError, describe
from common.process.atomic_file import write_file_atomically
from common.tls import CA_FILE, CERT_FILE, KEY_FILE, SERVER_NAME, spiffe_uri

CA_KEY_FILE = "ca-key.pem"
CA_DAYS = 3650
CLOCK_SKEW = timedelta(hours=1)  # A certificate begins this much earlier, for machines with a slow clock.
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Authority:
    """A certificate authority with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, days: int = CA_DAYS) -> Self:
        """Makes a new authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Baton cluster authority")])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = _builder(name, name, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads the authority that `save` wrote. Raises ConfigError."""
        try:
            certificate = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
            key = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            problem = f"cannot read the authority ({CA_FILE} and {CA_KEY_FILE}) in {directory}: {describe(error)}"
            raise ConfigError(f"certs: {problem}", field="directory") from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(certificate, key)

    def save(self, directory: Path) -> None:
        """Writes the authority; only the owner can read its key."""
        write_file_atomically(directory / CA_KEY_FILE, _key_pem(self.key), 0o600)
        write_file_atomically(directory / CA_FILE, self.certificate.public_bytes(_PEM), 0o644)

    def issue(self, directory: Path, role: str, name: str, days: int) -> datetime:
        """Writes a new key and certificate of one service, and the authority, to `directory`. Returns the expiry.

        A running service with this directory reads the new files.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role}/{name}"[:64])])
        names = [x509.DNSName(SERVER_NAME), x509.UniformResourceIdentifier(spiffe_uri(role, name))]
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = self.key.public_key()
        builder = _builder(subject, self.certificate.subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file_atomically(directory / CA_FILE, self.certificate.public_bytes(_PEM), 0o644)
        write_file_atomically(directory / KEY_FILE, _key_pem(key), 0o600)
        write_file_atomically(directory / CERT_FILE, certificate.public_bytes(_PEM), 0o644)
        return certificate.not_valid_after_utc


def make_private_directory(directory: Path) -> None:
    """Makes an empty directory that only this user can enter; removes an old one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    return builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + timedelta(days=days))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
