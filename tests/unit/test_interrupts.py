"""Ctrl-C while a command imports its modules: it exits with a code and prints nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = """
import os, signal, sys

class Interrupt:
    # Ctrl-C as a module is looked for; lost: by whoever imports it, as extensions may.
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if not lost:
                    raise

module, lost, ignored = sys.argv.pop(1), sys.argv.pop(1) == "True", sys.argv.pop(1) == "True"
if ignored:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Interrupt())
from cli import main
main()
"""


def interrupted(module: str, *argv: str, lost: bool = False, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """The end of a command that gets SIGINT while it imports the module."""
    command = [sys.executable, "-c", COMMAND, module, str(lost), str(ignored), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("typing", ("version",)),  # of the first ones
        ("typer", ("version",)),  # of every command line
        ("common.settings.gateway", ("up",)),
        ("uvicorn", ("gateway",)),  # of a service; without pods, so that it would end by itself
    ],
)
def test_ctrl_c_during_imports_ends_a_command_without_output(module: str, argv: tuple[str, ...], lost: bool) -> None:
    done = interrupted(module, *argv, lost=lost)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_background_job_keeps_ignoring_sigint() -> None:
    done = interrupted("typer", "version", ignored=True)
    assert done.returncode == 0
    assert done.stdout.startswith("baton ")
