"""The workloads of rendered manifests, and the settings that their command lines and environments give to Baton."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import typer

from cli.app import CommandLineError, app
from common.errors import ConfigError
from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig, WorkerConfig
from tests.k8s.manifests import (
    WORKLOADS,
    Object,
    command,
    environment,
    group_parts,
    main_container,
    of_kind,
)

Problems = Iterator[str]
Settings = PodConfig | WorkerConfig | GatewayConfig

FIELDS = {"status.podIP": "192.0.2.7", "metadata.name": "pod-0"}
ENGINES = ("prefill", "decode")
PLANNER = "planner"  # it serves no port, and may be evicted at any time


def worker_of(engine: str) -> str:
    """The component of a group's worker pods."""
    return f"{engine}-worker"


def workloads(objects: list[Object]) -> list[Object]:
    return of_kind(objects, *WORKLOADS) + group_parts(objects)


def servers(objects: list[Object]) -> list[Object]:
    """Workloads that do not end by themselves."""
    return of_kind(objects, "Deployment", "StatefulSet") + group_parts(objects)


def settings_of(objects: list[Object], workload: Object) -> Settings | None:
    """Returns the settings that a container's command line and environment give, by Baton's own parser.

    Returns None for a command other than serve, worker and gateway. Raises ConfigError, or an error of the command
    line, if the parser refuses them.
    """
    container = main_container(workload)
    env = environment(objects, container, FIELDS)
    words = command(container, env)
    if words[0] != "baton" or words[1] not in ("serve", "worker", "gateway"):
        return None
    found: list[Settings] = []
    with (
        mock.patch("cli.commands.services.run_service", lambda settings, _: found.append(settings)),
        mock.patch.dict(os.environ, env, clear=True),
    ):
        command_line().main(words[1:], standalone_mode=False)
    return found[0]


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(app)


def settings_or_none(objects: list[Object], workload: Object) -> Settings | None:
    """Returns the settings, or None if they are refused. Another check reports the refusal."""
    try:
        return settings_of(objects, workload)
    except (KeyError, ConfigError, CommandLineError):
        return None
