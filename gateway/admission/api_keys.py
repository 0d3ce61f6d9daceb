"""API keys: their records, their check, and what a caller may do.

A key is `sk-baton-<id>-<secret>`. The id finds the record, which holds only a salted BLAKE2b hash of the secret. A slow
hash like scrypt would protect secrets that can be guessed, and would cost each request about 50 ms of the event
loop. These secrets are 256 random bits, so a fast hash is enough. A comparison takes the same time for any difference,
and an unknown id costs a comparison too.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError, InvalidApiKey, Unavailable

_PRESENTED = re.compile(r"sk-baton-([0-9a-z]{12})-([A-Za-z0-9_-]{43})")
_PERSON = b"baton-api-key-1"
_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]+$")]
_Count = Annotated[int, Field(ge=0, le=2**53)]
TENANT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


def client_of(host: str) -> str:
    """Returns the client that an address belongs to: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class ApiKey(BaseModel):
    """The record of one key in a file or in Redis. A limit of 0 is no limit; Caller explains the other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    id: Annotated[str, Field(pattern=r"^[0-9a-z]{12}$")]
    tenant: Annotated[str, Field(pattern=TENANT)]
    salt: Annotated[_Hex, Field(min_length=32, max_length=32)]
    hash: Annotated[_Hex, Field(min_length=64, max_length=64)]
    created: datetime
    expires: datetime | None = None
    note: Annotated[str, Field(max_length=200)] = ""
    requests_per_minute: _Count = 0
    tokens_per_minute: _Count = 0
    tokens_per_day: _Count = 0
    concurrent: _Count = 0
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    cache_priority: Annotated[int, Field(ge=-1, le=2)] = 0
    models: tuple[str, ...] = ()
    isolated: bool = False
    admin: bool = False

    @classmethod
    def parse(cls, values: Any, where: str) -> ApiKey:
        """Returns a record read from `where`. Raises ConfigError that names the invalid field."""
        try:
            return cls.model_validate(values)
        except ValidationError as e:
            first = e.errors(include_url=False, include_input=False)[0]
            at = ".".join(str(part) for part in first["loc"]) or "key"
            raise ConfigError(f"api_keys: {where}: {at}: {first['msg']}", field="api_keys") from e

    @cached_property
    def caller(self) -> Caller:
        """The caller that the key identifies."""
        limits = KeyLimits(**self.model_dump(include={field.name for field in fields(KeyLimits)}))
        shared = self.model_dump(
            include={"tenant", "weight", "priority", "cache_priority", "models", "isolated", "admin"}
        )
        return Caller(key_id=self.id, limits=limits, **shared)

    def is_secret(self, secret: str) -> bool:
        """Compares with the key's secret, in constant time."""
        return hmac.compare_digest(_digest(secret, bytes.fromhex(self.salt)), bytes.fromhex(self.hash))

    def expired(self, now: datetime) -> bool:
        """The key has expired. A time without a zone is UTC."""
        expires = self.expires
        return expires is not None and now >= (expires if expires.tzinfo else expires.replace(tzinfo=UTC))


def create_key(tenant: str, **fields: Any) -> tuple[str, ApiKey]:
    """Returns a new key and its record. The key is stored nowhere. `fields` are of ApiKey. Raises ConfigError."""
    key_id = "".join(secrets.choice("0123456789abcdefghijklmnopqrstuvwxyz") for _ in range(12))
    secret, salt = secrets.token_urlsafe(32), secrets.token_bytes(16)
    known = {"id": key_id, "salt": salt.hex(), "hash": _digest(secret, salt).hex()}
    created = datetime.now(UTC).replace(microsecond=0)
    record = ApiKey.parse({"tenant": tenant, "created": created, **known, **fields}, "a new key")
    return f"sk-baton-{key_id}-{secret}", record


def _digest(secret: str, salt: bytes) -> bytes:
    return blake2b(secret.encode(), digest_size=32, salt=salt, person=_PERSON).digest()


#: Compared with if a key id is unknown, so that the check takes the same time.
_DUMMY_KEY = ApiKey(id="0" * 12, tenant="nobody", salt="0" * 32, hash="0" * 64, created=datetime.fromtimestamp(0, UTC))


class KeySet:
    """The valid keys at one moment, by id. If two have the same id, the later one counts."""

    def __init__(
        self,
        records: Iterable[ApiKey] = (),
        *,
        plain: Iterable[str] = (),
        anonymous: bool = False,
        complete: bool = True,
    ) -> None:
        """`plain`: keys without a record. `anonymous`: no key is needed. `complete`: all sources have been read."""
        self._plain = [blake2b(key.encode(), person=_PERSON).digest() for key in plain]
        self._by_id = {record.id: record for record in records}
        self._anonymous = anonymous
        self._complete = complete

    def identify(self, authorization: str | None) -> Caller:
        """Returns the caller of the header `Authorization: Bearer KEY`.

        Raises:
            InvalidApiKey: The key is missing or not valid. The error does not name the reason.
            Unavailable: The key is not known, and a source has never answered.
        """
        if self._anonymous:
            return ANONYMOUS
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKey("an API key is missing: send the header Authorization: Bearer KEY")
        presented = blake2b(key.strip().encode("utf-8", "replace"), person=_PERSON).digest()
        if any(hmac.compare_digest(presented, known) for known in self._plain):
            return PLAIN_KEY
        match = _PRESENTED.fullmatch(key.strip())
        record = self._by_id.get(match[1], _DUMMY_KEY) if match else _DUMMY_KEY
        matches = record.is_secret(match[2] if match else "")
        if matches and record is not _DUMMY_KEY and not record.expired(datetime.now(UTC)):
            return record.caller
        if not self._complete:
            raise Unavailable("API keys cannot be checked: Redis has not answered yet", retry_after_s=1.0)
        raise InvalidApiKey("the API key is not valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of one key; 0 is no limit. Tokens are prompt and output tokens together."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    concurrent: int = 0

    def __bool__(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.concurrent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, and its rights."""

    tenant: str = ""  # requests of one tenant share its fair part of the pods
    key_id: str = ""  #: Empty for the anonymous caller.
    limits: KeyLimits = field(default_factory=KeyLimits)
    weight: float = 1.0  # share of the tenant relative to the others
    priority: int | None = None  #: Highest priority of its requests, and their default; None allows any.
    cache_priority: int | None = None  #: The same for the priority of its cached blocks.
    models: tuple[str, ...] = ()  # names of the models that may be used; empty for all
    isolated: bool = False  # the tenant shares its prefix cache with no other tenant, even with --share-cache
    admin: bool = False  # administrative routes and the requests of all tenants may be used
    address: str = ""  # address of a client without a key

    @property
    def client(self) -> str:
        """The API key, or the address of a client without a key. Limits of grammars in proof count by it."""
        return self.key_id or self.address

    def at(self, address: str) -> Caller:
        """Returns this caller, with the client address if it has no key."""
        return self if self.key_id else replace(self, address=address)

    def may_use(self, *names: str) -> bool:
        """Returns whether a model with these names and aliases may be used."""
        return not self.models or any(name in self.models for name in names)

    def effective_priority(self, wanted: int) -> int:
        """Returns the priority of a request that asks for `wanted`; 0 asks for none."""
        return wanted if self.priority is None else min(wanted or self.priority, self.priority)

    def effective_cache_priority(self, wanted: int) -> int:
        """Returns the priority of the cached blocks of a request that asks for `wanted`; 0 asks for none."""
        most = self.cache_priority
        return wanted if most is None else min(wanted or most, most)

    def effective_salt(self, wanted: str, *, share_cache: bool = False) -> str:
        """Returns the cache salt of a request that asks for `wanted`.

        Different tenants get different salts. With `share_cache`, tenants that are not isolated share their salts.
        """
        if self.key_id and (self.isolated or not share_cache):
            return f"tenant:{self.tenant}:{wanted}"
        return f"salt:{wanted}" if wanted.startswith(("tenant:", "salt:")) else wanted


ANONYMOUS = Caller(admin=True)
#: The caller with a key that has no record. It has the same rights as a caller of a gateway without keys.
PLAIN_KEY = Caller(tenant="default", key_id="api-key", admin=True)
