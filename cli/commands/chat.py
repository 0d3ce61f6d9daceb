"""`baton chat`: talks to a running server in the terminal, or through pipes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import opt
from common.settings.gateway import DEFAULT_PORT

if TYPE_CHECKING:  # imported only when the command runs
    from rich.console import Console

    from cli.chat import Chat

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
Url = Annotated[
    str,
    typer.Argument(
        metavar="[URL]", help=f"The server, with or without /v1 (default {DEFAULT_URL}).", show_default=False
    ),
]
ApiKey = Annotated[str | None, opt("API key (default: $OPENAI_API_KEY).", metavar="KEY")]
CaFile = Annotated[
    str | None, opt("Authorities (PEM) that verify an https server; default: the system's.", metavar="FILE")
]
Insecure = Annotated[bool, opt("Accept any certificate of an https server.", "--insecure", "-k")]


def chat(
    url: Url = DEFAULT_URL,
    model: Annotated[
        str | None, opt("Name of the model; default: the first that the server lists.", metavar="NAME")
    ] = None,
    system: Annotated[str, opt("System message.", metavar="TEXT")] = "",
    prompt: Annotated[
        str | None,
        opt("Answer this message, with the text of stdin below it, and stop.", "--prompt", "-p", metavar="TEXT"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, max=2, metavar="X", help="Sampling temperature; default: the server's.", show_default=False
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="X", help="Nucleus sampling; default: the server's.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Longest answer, in tokens; default: the server's.", show_default=False),
    ] = None,
    seed: Annotated[int | None, opt("Seed of sampling; default: random.", metavar="N")] = None,
    trace: Annotated[bool, opt("Show after each answer where its time went.", "--trace")] = False,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, metavar="N", help="Max seconds without a byte of the server.")
    ] = 600.0,
) -> None:
    """Talks to a running server.

    In a terminal it is a conversation: /help lists its commands, and Ctrl-C stops an answer. Through a pipe, the text
    of stdin is one message, and only its answer is printed.
    """
    from cli.chat import Chat, run
    from cli.client import Server

    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    key = api_key or os.environ.get("OPENAI_API_KEY")
    with Server(url, key, ca_file=ca_file, any_certificate=insecure, timeout_s=timeout_s) as server:

        def make(console: Console, notes: Console) -> Chat:
            name = model or next(iter(server.models()), "")
            return Chat(server, name, options, console, notes, trace, system)

        raise typer.Exit(run(make, prompt))
