"""`baton role`: changes the role of a running pod."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import Annotated

import typer

from cli.commands.checks import TlsDir
from cli.options import Redis, opt
from common.errors import ConfigError
from common.settings.process import DEFAULT_SECRET
from common.types import Role


def role(
    pod: Annotated[str, typer.Argument(metavar="POD", help="Its name in the prefix index, or HOST:PORT.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or both.")],
    redis: Redis = None,
    tls_dir: TlsDir = None,
    drain_s: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="N", help="Max seconds for prompts that are being computed.")
    ] = 30.0,
    force: Annotated[bool, opt("Also for the last pod of its role.", "--force")] = False,
) -> None:
    """Changes the role of a running pod, without a restart.

    The pod keeps weights and prefix cache. Its running answers go on on other pods. $BATON_SECRET is the cluster's.
    """
    if role not in (known := [each.value for each in Role]):
        raise ConfigError(
            f"ROLE: invalid value {role!r}: expected {', '.join(known[:-1])} or {known[-1]}", field="role"
        )
    asyncio.run(_switch(pod, Role(role), redis or os.environ.get("BATON_REDIS"), tls_dir, drain_s, force))


async def _switch(named: str, role: Role, redis: str | None, tls_dir: str | None, drain_s: float, force: bool) -> None:
    from common.auth import OPERATOR
    from common.tls import TlsFiles
    from fleet.roles import find_pod, operator_signer, require_another, switch_role

    tls = TlsFiles.of_directory(tls_dir or os.environ.get("BATON_TLS_DIR") or None, OPERATOR)
    pod, records = await find_pod(named, redis, tls)
    if not force:
        require_another(pod, role, records)
    secret = os.environ.get("BATON_SECRET") or DEFAULT_SECRET
    signer = operator_signer(secret, f"role-{secrets.token_hex(4)}")
    done = await switch_role(pod, role, signer, drain_s=drain_s, tls=tls)
    if done.former is role:
        typer.echo(f"pod {pod.name} has the role {role} already")
        return
    typer.echo(
        f"pod {pod.name}: {done.former} -> {role}, {done.moved} requests moved, drained in {done.drained_s:.2f} s, "
        f"ready {done.ready_s:.2f} s later"
    )
