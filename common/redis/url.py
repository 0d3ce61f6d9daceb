"""Parses and checks the Redis URLs that services get.

    redis://[user:password@]host[:port][/db]              one server; rediss:// with TLS, unix://[user:password@]/path?db=0
    redis+sentinel://[user:password@]h1[:p1],h2/service[/db]   the primary of that service; sentinels listen on 26379
    redis+cluster://[user:password@]h1[:p1],h2            a cluster, found from any of its nodes

rediss+sentinel:// and rediss+cluster:// use TLS. Special characters in user and password are percent-encoded.
Parameters (?name=value&...): with TLS ssl_ca_certs, ssl_certfile, ssl_keyfile (PEM files), ssl_cert_reqs (required or
none; default required), ssl_check_hostname (true or false; default true). With sentinels sentinel_username and
sentinel_password. With sockets db.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

from common.errors import ConfigError

REDIS_PORT, SENTINEL_PORT = 6379, 26379
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")

_SENTINEL = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS settings of a connection, with the names of redis-py. Files are PEM."""

    ssl_ca_certs: str | None = None  # Certificate authorities; None: the system's authorities.
    ssl_certfile: str | None = None  # The client's certificate.
    ssl_keyfile: str | None = None
    ssl_cert_reqs: str = "required"  # required: verify the server's certificate; none.
    ssl_check_hostname: bool = True


_TLS = tuple(f.name for f in fields(TlsOptions))


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parts of a Redis URL."""

    nodes: tuple[tuple[str, int], ...] = ()  #: (host, port) of servers or sentinels; none for a socket.
    path: str = ""  # Path of a Unix socket; otherwise empty.
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: TlsOptions | None = None
    cluster: bool = False
    service: str = ""  # Name of the primary at the sentinels; empty without sentinels.
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses a URL. Raises ConfigError, without any password in its message."""
        parts = urlsplit(url)
        scheme = parts.scheme
        if scheme not in SCHEMES:
            raise _url_error(f"a URL starts with one of {', '.join(f'{s}://' for s in SCHEMES)}")
        base, _, kind = scheme.partition("+")
        allowed = _TLS * (base == "rediss") + _SENTINEL * (kind == "sentinel") + ("db",) * (base == "unix")
        options = _options(parts.query, allowed)
        userinfo, _, hosts = parts.netloc.rpartition("@")
        username, _, password = userinfo.partition(":")
        segments = [unquote(s) for s in parts.path.split("/") if s]
        service, path = "", ""
        nodes: tuple[tuple[str, int], ...] = ()
        if kind == "sentinel":
            if not segments:
                raise _url_error("the name of the service is missing: redis+sentinel://host:port/service")
            service = segments.pop(0)
        if base == "unix":
            path, db = unquote(parts.path), _db([options.pop("db", "0")])
            if hosts or len(path) < 2:
                raise _url_error("a socket needs a path: unix:///path/of/the.sock")
        else:
            nodes, db = _nodes(hosts, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT), _db(segments)
        if kind == "" and len(nodes) > 1:
            raise _url_error("several hosts need redis+sentinel:// or redis+cluster://")
        if kind == "cluster" and db:
            raise _url_error("a cluster has database 0 only")
        return cls(
            nodes=nodes,
            path=path,
            username=unquote(username) or None,
            password=unquote(password) or None,
            db=db,
            tls=_tls(options) if base == "rediss" else None,
            cluster=kind == "cluster",
            service=service,
            sentinel_username=options.get("sentinel_username"),
            sentinel_password=options.get("sentinel_password"),
        )

    def __str__(self) -> str:
        """Returns the URL without user, password and parameters, for messages."""
        if self.path:
            return f"unix://{self.path}"
        kind = "+cluster" if self.cluster else "+sentinel" * bool(self.service)
        scheme = ("rediss" if self.tls else "redis") + kind
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        return f"{scheme}://{hosts}" + f"/{self.service}" * bool(self.service) + f"/{self.db}" * bool(self.db)


def _url_error(what: str) -> ConfigError:
    return ConfigError(f"redis: {what}", field="redis")


def _options(query: str, allowed: tuple[str, ...]) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in allowed:
            allowed_names = f"allowed: {', '.join(allowed)}" if allowed else "none is allowed"
            raise _url_error(f"unknown parameter {name!r} for this kind of URL; {allowed_names}")
    return options


def _nodes(hosts: str, default_port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for node in hosts.split(","):
        host, port = node, ""
        if node.startswith("["):
            host, _, rest = node[1:].partition("]")
            port = rest.removeprefix(":")
        elif ":" in node:
            host, _, port = node.partition(":")
        number = int(port) if port.isascii() and port.isdecimal() else 0 if port else default_port
        if not host or not 0 < number < 65536:
            raise _url_error(f"{node!r} is not host or host:port (an IPv6 address needs brackets)")
        nodes.append((host, number))
    return tuple(nodes)


def _db(segments: list[str]) -> int:
    if len(segments) > 1 or any(not (s.isascii() and s.isdecimal()) for s in segments):
        raise _url_error(f"{'/'.join(segments)!r} is not the number of a database, like 0")
    return int(segments[0]) if segments else 0


def _tls(options: dict[str, str]) -> TlsOptions:
    verify = options.get("ssl_cert_reqs", "required")
    hostname = options.get("ssl_check_hostname", "true").lower()
    if verify not in ("required", "none"):
        raise _url_error("ssl_cert_reqs is required or none")
    if hostname not in ("true", "false"):
        raise _url_error("ssl_check_hostname is true or false")
    files = {name: options.get(name) for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")}
    return TlsOptions(**files, ssl_cert_reqs=verify, ssl_check_hostname=verify == "required" and hostname == "true")
