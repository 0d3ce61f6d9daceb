"""Options of the commands. The options for settings come from their declarations in common/settings."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cli.other_flags import translate
from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig, WorkerConfig
from common.settings.table import FLAG, Settings, declared, former_names, spelt
from common.settings.up import UpConfig

_Settings = TypeVar("_Settings", UpConfig, PodConfig, WorkerConfig, GatewayConfig)


def opt(help_text: str, *names: str, metavar: str | None = None) -> Any:
    """An option without shown default. `names` are needed if typer 0.27 would take the metavar for the name."""
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False)


Config = Annotated[
    Path | None, opt("TOML file with these settings (flat keys, underscores for dashes).", metavar="FILE")
]
Redis = Annotated[str | None, opt(declared(PodConfig)["redis"].description, metavar="URL")]


class SectionedCommand(typer.core.TyperCommand):
    """A command with many options. `--help` lists them by section, and flags of other servers get a hint."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        if self.name in ("up", "serve", "gateway"):
            args = translate(args, known, functools.partial(typer.echo, err=True))
        result: list[str] = super().parse_args(ctx, args)
        return result

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                title = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or title, []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def takes_settings(*classes: type[Settings], only: frozenset[str] | None = None) -> Callable[[Any], Any]:
    """Gives a command one option for each setting of the classes (or of `only`), and hidden ones for former names.

    The first class that has a setting declares its option.
    """
    settings = {name: s for cls in reversed(classes) for name, s in declared(cls).items()}
    ordered = dict.fromkeys(name for cls in classes for name in declared(cls))
    chosen = [s for name in ordered if (s := settings[name]).flag and (only is None or name in only)]
    former = dict.fromkeys(name for cls in classes for name in former_names(cls) if only is None)
    return _takes(
        [
            _parameter(s.name, s.kind.shape, s.description, s.metavar, s.section, s.default is not False, also=s.also)
            for s in chosen
        ]
        + [_parameter(name, str, "", "", hidden=True) for name in former]
    )


def takes_text(sections: Mapping[str, Sequence[tuple[str, str, str]]]) -> Callable[[Any], Any]:
    """Gives a command options as text that it parses itself: by section, the name, metavar and help of each option."""
    rows = [(title, *row) for title, of_section in sections.items() for row in of_section]
    return _takes([_parameter(name, str, help, metavar, title) for title, name, metavar, help in rows])


def _takes(options: Sequence[inspect.Parameter]) -> Callable[[Any], Any]:
    """Adds options to a command: a function of the values of these options by name, and of parameters of its own.

    A parameter of its own replaces the option of the same name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        names = {parameter.name for parameter in own}

        @functools.wraps(command)
        def run(**given: Any) -> None:
            mine = {name: given.pop(name) for name in names}
            command({name: _as_given(value) for name, value in given.items()}, **mine)

        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        added = [option for option in options if option.name not in names]
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _parameter(
    name: str,
    shape: type,
    help: str,
    metavar: str,
    section: str | None = None,
    negated: bool = True,
    also: Sequence[str] = (),
    **more: Any,
) -> inspect.Parameter:
    """An option that is None if it is not given. `shape` is as in SettingKind; a switch may have a `negated` form."""
    flag, switch = spelt(name, FLAG), shape is bool
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if switch and negated else flag,
        *(spelt(other, FLAG) for other in also),
        help=help,
        metavar=None if switch else metavar,
        show_default=False,
        rich_help_panel=section,
        **more,
    )
    kind: Any = bool if switch else list[str] if shape is tuple else str
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _as_given(value: Any) -> Any:
    """The value of a flag. A list is text with commas; typer turns a flag that is not given into an empty one."""
    return ",".join(value) if isinstance(value, list) and value else None if value == [] else value


def load(cls: type[_Settings], file: Path | None, flags: Mapping[str, Any]) -> _Settings:
    if file is None and (named := os.environ.get("BATON_CONFIG")):
        file = Path(named)
    return cls.load(file=file, env=os.environ, flags=flags)
