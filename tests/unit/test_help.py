"""Every command of `baton` shows its help: what stands in brackets is markup to the printer."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from common.cli import app


def _paths(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = command.commands.items() if isinstance(command, typer.core.TyperGroup) else ()
    return [path, *(p for name, sub in below for p in _paths(sub, (*path, name)))]


@pytest.mark.parametrize("path", _paths(typer.main.get_command(app)), ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "--help" in result.output
