"""`--help` of every command is complete, and its defaults are those of the settings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.app import app, main
from cli.other_flags import OTHER_FLAGS
from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig, WorkerConfig
from common.settings.table import Setting, declared, former_names
from common.settings.up import UpConfig


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


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[UpConfig]:
    """The settings of the stacks that commands would run."""
    loaded: list[UpConfig] = []

    async def run(settings: UpConfig, **_: object) -> int:
        loaded.append(settings)
        return 0

    monkeypatch.setattr("cli.stack.up.run", run)
    return loaded


def ended(argv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The exit code and the error output of a command line."""
    monkeypatch.setattr("sys.argv", ["baton", *shlex.split(argv)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr().err


def test_serve_with_a_model_is_up(
    stacks: list[UpConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in ("serve my/model --prefill 2", "serve --model my/model --prefill 2", "up my/model --prefill 2"):
        assert ended(argv, monkeypatch, capsys) == (0, "")
    assert [(s.model, s.prefill) for s in stacks] == [("my/model", 2)] * 3
    pods: list[PodConfig] = []
    monkeypatch.setattr("cli.commands.services.run_service", lambda settings, _: pods.append(settings))
    assert ended("serve my/model --role decode --no-cuda-graphs", monkeypatch, capsys) == (0, "")
    monkeypatch.setenv("BATON_ROLE", "both")
    assert ended("serve my/model", monkeypatch, capsys) == (0, "")
    assert [(pod.model, str(pod.role)) for pod in pods] == [("my/model", "decode"), ("my/model", "both")]
    code, said = ended("serve my/model --prefill 2", monkeypatch, capsys)
    assert (code, said) == (2, "baton: --prefill: is a flag of a stack: baton up (baton serve --help)\n")
    monkeypatch.delenv("BATON_ROLE")
    code, said = ended("serve my/model --no-cuda-graphs", monkeypatch, capsys)
    assert (code, said.startswith("baton: --cuda-graphs: is a flag of one pod: baton serve --role ROLE")) == (2, True)
    code, said = ended("serve", monkeypatch, capsys)
    assert (code, "`baton serve MODEL` serves a model" in said) == (2, True)
    code, said = ended("serve my/model --model other", monkeypatch, capsys)
    assert (code, "other and my/model are two models" in said) == (2, True)


VLLM = (
    "serve Qwen/Qwen3-0.6B --max-num-seqs 32 --max-num-batched-tokens=512 --api-key k1 --served-model-name qwen "
    "-tp 1 --gpu-memory-utilization 0.8 --max_model_len 4096 --enable-prefix-caching --dtype bfloat16 "
    "--tool-call-parser hermes --enable-auto-tool-choice --reasoning-parser think --trust-remote-code "
    "--swap-space 4 --port 8001"
)


def test_a_command_line_of_vllm_works(
    stacks: list[UpConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ended(VLLM, monkeypatch, capsys)
    assert code == 0, said
    (config,) = stacks
    assert (config.model, config.served_name, config.port) == ("Qwen/Qwen3-0.6B", "qwen", 8001)
    assert (config.max_seqs, config.chunk_tokens, config.max_model_len) == (32, 512, 4096)
    assert (config.api_key, config.tensor_parallel_size, config.gpu_memory_utilization) == (("k1",), 1, 0.8)
    assert (config.tool_parser, config.reasoning_parser, config.dtype) == ("hermes", "think", "bfloat16")
    notes = [line.partition(" has no effect: ")[0] for line in said.splitlines()]
    assert notes == ["--enable-prefix-caching", "--enable-auto-tool-choice", "--trust-remote-code", "--swap-space"]


@pytest.mark.parametrize("flag", [flag for flag, other in OTHER_FLAGS.items() if not other.harmless])
def test_a_flag_of_vllm_without_a_counterpart_ends_with_what_to_do(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert not any(flag in param.opts for param in commands["up"].params), "the flag exists"
    code, said = ended(f"up {flag}=x", monkeypatch, capsys)
    assert (code, len(said.splitlines())) == (2, 1)
    assert OTHER_FLAGS[flag].hint in said


def test_hints_name_flags_that_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {name for c in commands.values() for param in c.params for name in (*param.opts, *param.secondary_opts)}
    for other in OTHER_FLAGS.values():
        assert set(re.findall(r"--[a-z][a-z-]+", other.hint)) <= known, other.hint


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("up --chunk-token 5", "; did you mean --chunk-tokens?"),
        ("up --gpu-memory-utilisation 5", "; did you mean --gpu-memory-utilization?"),
        ("up --max-sequences 5", ""),
        ("up --tls-cert x", "; it is an option of baton gateway"),
        ("worker --api-key x", "; it is an option of baton up, chat, bench, serve, gateway, batch, loadtest"),
        ("chat --modl x", "; did you mean --model?"),
        ("up --frobnicate", ""),
    ],
)
def test_advice_names_the_right_flag_or_none(
    argv: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, flag = argv.split()[:2]
    assert ended(argv, monkeypatch, capsys) == (2, f"baton: No such option: {flag}{advice} (baton {command} --help)\n")


def test_shells_complete_commands_and_flags() -> None:
    env = {**os.environ, "_BATON_COMPLETE": "complete_bash", "COMP_WORDS": "baton up --kv-m", "COMP_CWORD": "2"}
    script = "import sys; sys.argv = ['baton']; from cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["--kv-memory"]
