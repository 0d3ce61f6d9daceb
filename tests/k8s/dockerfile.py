"""The Dockerfile without Docker: its stages, and their commands run in a local environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.k8s.manifests import ROOT

#: The stages that are images; the others are used by them.
TARGETS = ("gateway", "engine-cpu", "engine-gpu", "demo-model")


@dataclass(frozen=True)
class Stage:
    """A stage. `base` is an image or another stage; `steps` are (instruction, arguments) in order."""

    name: str
    base: str
    steps: tuple[tuple[str, str], ...]

    def last(self, instruction: str) -> str | None:
        return next((rest for word, rest in reversed(self.steps) if word == instruction), None)


@dataclass(frozen=True)
class Dockerfile:
    stages: dict[str, Stage]
    arguments: dict[str, str] = field(default_factory=dict)  # before the first stage

    @classmethod
    def parse(cls, text: str) -> Dockerfile:
        lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
        stages: dict[str, Stage] = {}
        arguments: dict[str, str] = {}
        name, base, steps = "", "", list[tuple[str, str]]()
        for line in [*filter(None, map(str.strip, lines)), "FROM end AS end"]:
            word, _, rest = line.partition(" ")
            if word == "FROM":
                if name:
                    stages[name] = Stage(name, base, tuple(steps))
                base, _, name = rest.partition(" AS ")
                steps = []
            elif name:
                steps.append((word, rest))
            elif word == "ARG":
                argument, _, value = rest.partition("=")
                arguments[argument] = value
        return cls(stages, arguments)

    def chain(self, name: str) -> Iterator[Stage]:
        """A stage, its base stage, and so on."""
        while name in self.stages:
            yield self.stages[name]
            name = self.stages[name].base

    def last(self, name: str, instruction: str) -> str | None:
        """The effective instruction of a stage: its own, or an inherited one."""
        return next((found for stage in self.chain(name) if (found := stage.last(instruction))), None)

    def image(self, name: str) -> str:
        """The base image of a stage."""
        *_, first = self.chain(name)
        return re.sub(r"\$\{(\w+)\}", lambda match: self.arguments[match[1]], first.base)


def read() -> Dockerfile:
    return Dockerfile.parse((ROOT / "Dockerfile").read_text())


class Workshop:
    """Runs the COPY and RUN commands of stages in a directory that replaces /."""

    def __init__(self, root: Path, dockerfile: Dockerfile, python: str, arguments: dict[str, str]) -> None:
        self.root = root
        self._dockerfile = dockerfile
        self._python = python
        self._arguments = arguments
        self._work = root / "build"

    def build(self, name: str) -> None:
        """Builds a stage and the stages that it needs."""
        for stage in reversed(list(self._dockerfile.chain(name))):
            arguments: dict[str, str] = {}
            for word, rest in stage.steps:
                if word == "WORKDIR":
                    self._work = self._path(rest)
                    self._work.mkdir(parents=True, exist_ok=True)
                elif word == "ARG":
                    argument, _, value = rest.partition("=")
                    arguments[argument] = self._arguments.get(argument, value)
                elif word == "COPY":
                    self._copy(rest.split())
                elif word == "RUN":
                    self._run(rest, arguments)

    def _path(self, path: str) -> Path:
        return self.root / path.removeprefix("/") if path.startswith("/") else self._work / path

    def _copy(self, words: list[str]) -> None:
        if words[0].startswith("--from="):
            stage = words.pop(0).removeprefix("--from=")
            work = self._work
            self.build(stage)
            self._work = work
            assert self._path(words[0]).exists(), f"{stage} did not make {words[0]}"
            return
        *sources, target = words
        for source in sources:
            place = self._path(target) / ("" if target != "./" or source == "." else Path(source).name)
            if source == ".":
                _context(place)
            elif (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, place)

    def _run(self, command: str, arguments: dict[str, str]) -> None:
        for path in ("/opt/baton", "/opt/model", "/wheel"):
            command = re.sub(rf"(?<![\w./]){path}\b", str(self._path(path)), command)
        command = command.replace("python -m venv ", f"{self._python} -m venv ")
        env = {"PATH": f"{self._path('/opt/baton/bin')}:/usr/bin:/bin", "HOME": str(self.root), "PIP_NO_COMPILE": "1"}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command],
            cwd=self._work,
            env={**{k: v for k, v in os.environ.items() if k.startswith("PIP_")}, **env, **arguments},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def context() -> list[str]:
    """The entries of the top directory that .dockerignore allows."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def _context(place: Path) -> None:
    for name in context():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        elif (ROOT / name).exists():
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
