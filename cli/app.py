"""The list of commands. Each end of a command becomes an exit code and at most one error line on stderr."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer

from cli import exits
from cli.commands.batch import batch
from cli.commands.bench import bench
from cli.commands.certs import certs
from cli.commands.chat import chat
from cli.commands.checks import doctor, probe
from cli.commands.keys import keys
from cli.commands.loadtest import loadtest
from cli.commands.models import models
from cli.commands.plan import plan
from cli.commands.planner import planner
from cli.commands.pull import pull
from cli.commands.role import role
from cli.commands.services import gateway, serve, up, worker
from cli.options import SectionedCommand
from common.errors import BatonError, ConfigError
from common.settings.table import misspelt

# Base class of all parser errors. typer does not export it; older versions of typer use click's.
CommandLineError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=True,  # the flags --install-completion and --show-completion
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's table cuts long flags and values on terminals with 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Prints the version."""
    from importlib import metadata

    typer.echo(f"baton {metadata.version('baton-serving')}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def baton(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serves large language models with prefill and decode in different processes, on one machine or on many.

    `baton serve Qwen/Qwen3-0.6B` starts a server; `baton chat` talks to it.
    """


COMMANDS = (
    *(up, chat, bench, pull, models, serve, worker, gateway),
    *(role, planner, certs, batch, doctor, probe, loadtest, version),
)
for command in COMMANDS:
    app.command(cls=SectionedCommand)(command)
app.add_typer(keys, name="keys")
app.add_typer(plan, name="plan")


def main() -> NoReturn:
    """Runs the command of this process's command line."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="baton", standalone_mode=False)
    except CommandLineError as error:
        code = _complain(f"{_without_wrong_advice(error)} {_hint()}", exits.USAGE)
    except ConfigError as error:
        code = _complain(f"{error.message} {_hint()}" if error.message.startswith("--") else error.message, exits.USAGE)
    except BatonError as error:
        code = _complain(error.message, exits.FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = exits.INTERRUPTED
    sys.exit(code or 0)


def _hint() -> str:
    """The command line that prints the help of this command."""
    path, command = ["baton"], typer.main.get_command(app)
    for name in sys.argv[1:]:
        if not isinstance(command, typer.core.TyperGroup) or name not in command.commands:
            break
        path, command = [*path, name], command.commands[name]
    return f"({' '.join(path)} --help)"


def _without_wrong_advice(error: Any) -> str:
    """The text of a parser's error, with a suggestion only if the flag misspells a known one (see `misspelt`)."""
    flag, ctx = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not hasattr(error, "possibilities") or flag is None or ctx is None:
        return str(error.format_message())
    message = f"No such option: {flag}"
    if meant := misspelt(flag, _flags(ctx.command)):
        return f"{message}; did you mean {meant}?"
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    others = [name for name, command in commands.items() if flag in _flags(command)]
    return f"{message}; it is an option of baton {', '.join(others)}" if others else message


def _flags(command: Any) -> list[str]:
    """The long flags of a command that its help shows."""
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    return [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]


def _complain(message: str, code: int) -> int:
    """Prints an error: one line, and lines of a process's log that the message contains."""
    typer.echo(f"baton: {message.strip()}", err=True)
    return code
