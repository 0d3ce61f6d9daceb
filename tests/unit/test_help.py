"""Every command of `baton` shows its help: what stands in brackets is markup to the printer, and defaults are those of
the configuration.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from common.cli.command import app
from common.config import GatewayConfig, PodConfig, UpConfig, WorkerConfig


def _paths(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = command.commands.items() if isinstance(command, typer.core.TyperGroup) else ()
    return [path, *(p for name, sub in below for p in _paths(sub, (*path, name)))]


@pytest.mark.parametrize("path", _paths(typer.main.get_command(app)), ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "--help" in result.output


COMMANDS = {"up": UpConfig, "serve": PodConfig, "worker": WorkerConfig, "gateway": GatewayConfig}


def _named(setting: Field[Any], words: str) -> list[Any]:
    """What a help text calls the default, as far as it is a value of the setting's kind."""
    found = []
    for word in re.findall(r"default:? ([^\s);]+)", words) + re.findall(r"(\S+) \((?:the )?default\b", words):
        try:
            found.append(setting.metadata["kind"].parse(word.rstrip(".,;)")))
        except ValueError:
            continue  # "the model's own", "any free one"
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_in_the_help_are_those_of_the_configuration(command: str) -> None:
    settings = {f.name: f for f in fields(COMMANDS[command])}
    options = {p.name: p.help or "" for p in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    wrong = {}
    for name, words in options.items():
        setting = settings.get(name)
        # What is 0, None or a switch means something automatic, which only words can say.
        if setting is None or setting.default in (MISSING, None) or not setting.default or setting.default is True:
            continue
        if setting.default not in (named := _named(setting, words)):
            wrong[name] = (words, setting.default, named)
    assert not wrong
