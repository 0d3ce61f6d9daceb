"""`--help` of every command is complete, and its defaults are those of the settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.app import app, main
from common.settings.configs import GatewayConfig, PodConfig, UpConfig, WorkerConfig
from common.settings.table import Setting, declared, former_names


def _paths(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = command.commands.items() if isinstance(command, typer.core.TyperGroup) else ()
    return [path, *(p for name, sub in below for p in _paths(sub, (*path, name)))]


@pytest.mark.parametrize("path", _paths(typer.main.get_command(app)), ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "--help" in result.output


@pytest.mark.parametrize("path", _paths(typer.main.get_command(app)), ids=" ".join)
def test_help_is_not_cut_on_a_narrow_terminal(path: tuple[str, ...]) -> None:
    """No flag and no description is cut."""
    shown = CliRunner().invoke(app, [*path, "--help"], catch_exceptions=False, env={"COLUMNS": "80"}).output
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    names = {name for param in params for name in (*param.opts, *param.secondary_opts) if name[0] == "-"}
    assert not {name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", shown)}
    assert not re.search(r"…|\w\.\.\.$", shown, re.MULTILINE)


@pytest.mark.parametrize("argv", ["keys create", "keys list --nope", "batch", "--nope"])
def test_a_usage_error_names_the_help_command(
    argv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["baton", *argv.split()])
    with pytest.raises(SystemExit) as end:
        main()
    path = " ".join(["baton", *(word for word in argv.split() if word[0] != "-")])
    assert (end.value.code, capsys.readouterr().err.endswith(f"({path} --help)\n")) == (2, True)


def test_version_is_a_command_and_a_flag() -> None:
    flag, command = (CliRunner().invoke(app, [word]) for word in ("--version", "version"))
    assert (flag.exit_code, flag.output) == (0, command.output)


COMMANDS = {"up": UpConfig, "serve": PodConfig, "worker": WorkerConfig, "gateway": GatewayConfig}


def _named(setting: Setting, words: str) -> list[Any]:
    """The defaults in a help text that are valid values of the setting."""
    found = []
    for word in re.findall(r"default:? ([^\s);]+)", words) + re.findall(r"(\S+) \((?:the )?default\b", words):
        try:
            found.append(setting.kind.parse(word.rstrip(".,;)")))
        except ValueError:
            continue  # "the model's own", "any free one"
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_in_help_texts_are_those_of_the_settings(command: str) -> None:
    settings = declared(COMMANDS[command])
    options = {p.name: p.help or "" for p in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    wrong = {}
    for name, words in options.items():
        setting = settings.get(name)
        # What is 0, None or a switch means something automatic, which only words can say.
        if setting is None or not setting.default or setting.default is True:
            continue
        if setting.default not in (named := _named(setting, words)):
            wrong[name] = (words, setting.default, named)
    assert not wrong


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_is_an_option_and_every_former_name_a_hidden_one(command: str) -> None:
    params = {p.name: p for p in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    cls = COMMANDS[command]
    assert {s.name for s in declared(cls).values() if s.flag} <= params.keys()
    assert all(params[name].hidden for name in former_names(cls))


def test_the_flag_of_a_former_setting_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr("cli.commands.services.run_service", lambda settings, _: loaded.append(settings))
    for argv in (
        ["gateway", "--routing-policy", "round_robin", "--alias", "a=m", "--alias", "b=m", "--no-open-metrics"],
        ["serve", "--role", "both", "--token-budget", "64", "--no-cuda-graphs", "--allow-tcp"],
    ):
        assert CliRunner().invoke(app, argv, catch_exceptions=False).exit_code == 0
    gateway, pod = loaded
    assert (gateway.aliases(), gateway.open_metrics) == ({"a": "m", "b": "m"}, False)
    assert (pod.chunk_tokens, pod.cuda_graphs, pod.allow_tcp, pod.overlap) == (64, False, True, None)
