"""Redis URLs: their parts, and errors of wrong ones, which contain no password."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.redis.url import RedisUrl, TlsOptions


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis://h", RedisUrl((("h", 6379),))),
        ("redis://h:7/3", RedisUrl((("h", 7),), db=3)),
        ("redis://[::1]:7/0", RedisUrl((("::1", 7),))),
        ("redis://:pw@h/", RedisUrl((("h", 6379),), password="pw")),
        ("redis://bob:p%40%3A%2Fw@h", RedisUrl((("h", 6379),), username="bob", password="p@:/w")),
        ("unix:///run/a%20b.sock?db=2", RedisUrl(path="/run/a b.sock", db=2)),
        ("unix://bob:pw@/run/r.sock", RedisUrl(path="/run/r.sock", username="bob", password="pw")),
        ("rediss://h", RedisUrl((("h", 6379),), tls=TlsOptions())),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem&ssl_check_hostname=false",
            RedisUrl((("h", 6379),), tls=TlsOptions("/ca.pem", "/c.pem", "/k.pem", "required", False)),
        ),
        (
            "rediss://h?ssl_cert_reqs=none",
            RedisUrl((("h", 6379),), tls=TlsOptions(ssl_cert_reqs="none", ssl_check_hostname=False)),
        ),
        (
            "redis+sentinel://bob:pw@a:1,b/main/4?sentinel_username=s&sentinel_password=q",
            RedisUrl(
                (("a", 1), ("b", 26379)),
                username="bob",
                password="pw",
                db=4,
                service="main",
                sentinel_username="s",
                sentinel_password="q",
            ),
        ),
        ("rediss+sentinel://a/main", RedisUrl((("a", 26379),), tls=TlsOptions(), service="main")),
        ("redis+cluster://a:1,[fe80::1]:2", RedisUrl((("a", 1), ("fe80::1", 2)), cluster=True)),
        ("rediss+cluster://a/0", RedisUrl((("a", 6379),), tls=TlsOptions(), cluster=True)),
    ],
)
def test_the_parts_of_urls(url: str, parts: RedisUrl) -> None:
    assert RedisUrl.parse(url) == parts
    assert "pw" not in f"{parts} {parts!r}"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h", "starts with one of redis://"),
        ("h:6379", "starts with one of"),
        ("redis://", "not host"),
        ("redis://h:x", "not host"),
        ("redis://h:0", "not host"),
        ("redis://h:70000", "not host"),
        ("redis://fe80::1", "not host"),
        ("redis://a,b", "redis+sentinel:// or redis+cluster://"),
        ("redis://h/zero", "number of a database"),
        ("redis://h/1/2", "number of a database"),
        ("redis://h?ssl_ca_certs=/x", "'ssl_ca_certs' for this kind of URL; none is allowed"),
        ("rediss://h?ssl_cacerts=/x", "'ssl_cacerts' for this kind of URL; allowed: ssl_ca_certs"),
        ("rediss://h?ssl_cert_reqs=maybe", "required or none"),
        ("rediss://h?ssl_check_hostname=1", "true or false"),
        ("redis+sentinel://a:1", "service is missing"),
        ("redis+cluster://a/1", "database 0"),
        ("unix://run/x", "needs a path"),
        ("unix:///x?db=y", "number of a database"),
        ("redis+sentinel://u:pw@a:1", "service is missing"),
    ],
)
def test_wrong_urls_are_refused_with_the_reason(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisUrl.parse(url)
    assert said in caught.value.message
    assert caught.value.field == "redis"
    assert "pw" not in caught.value.message


def test_the_printed_url_has_no_user_password_or_parameters() -> None:
    shown = {
        url: str(RedisUrl.parse(url))
        for url in ("rediss://u:p@h/2", "redis+sentinel://:p@a,[::1]:3/m/1?sentinel_password=q")
    }
    assert list(shown.values()) == ["rediss://h:6379/2", "redis+sentinel://a:26379,[::1]:3/m/1"]
    assert str(RedisUrl.parse("redis+cluster://a,b")) == "redis+cluster://a:6379,b:6379"
    assert str(RedisUrl.parse("unix://u:p@/r.sock")) == "unix:///r.sock"
