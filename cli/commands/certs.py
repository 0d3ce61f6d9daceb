"""`baton certs`: an authority and the certificates of services, for TLS between them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import opt
from common.errors import ConfigError
from common.settings import kinds
from common.settings.table import FLAG, Setting
from common.tls import ROLES


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the authority and the certificates.")],
    role: Annotated[str | None, opt(f"One role only: {', '.join(ROLES)}; default: all.", metavar="ROLE")] = None,
    name: Annotated[str | None, opt("Name of that service; default: its role.", metavar="NAME")] = None,
    days: Annotated[
        int, typer.Option(min=1, max=3650, metavar="N", help="Days that the certificates are valid.")
    ] = 365,
) -> None:
    """Makes certificates for TLS between services.

    DIR/ca.pem and DIR/ca-key.pem are the authority, made once. DIR/NAME is the --tls-dir of one service. Run it again
    to renew the certificates; running services read them.
    """
    if role is None and name is not None:
        raise ConfigError("--role: missing: --name needs the role of the service", field="role")
    chosen = ROLES if role is None else (Setting(kind=kinds.choice(*ROLES), help="", name="role").parse(role, FLAG),)
    if name is not None:
        name = Setting(kind=kinds.NAME, help="", name="name").parse(name, FLAG)
    from cli.stack.certificates import CA_KEY_FILE, Authority
    from common.tls import CA_FILE

    if (directory / CA_KEY_FILE).exists():
        authority = Authority.load(directory)
    elif (directory / CA_FILE).exists():
        remedy = "bring the key back, or remove ca.pem to make a new authority"
        raise ConfigError(f"certs: {directory} has {CA_FILE} without {CA_KEY_FILE}: {remedy}", field="directory")
    else:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = Authority.create()
        authority.save(directory)
    for each in chosen:
        into = directory / (name or each)
        expires = authority.issue(into, each, name or each, days)
        typer.echo(f"{into}: {each} {name or each}, until {expires:%Y-%m-%d}")
