"""Runs many `baton` commands, each in a forked process, with one start of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_PARENT = """
import json, os, sys, tempfile, traceback
exec(sys.argv[1])
import cli.app
from cli import main
def end(argv):
    while argv and "=" in argv[0] and not argv[0].startswith("-"):
        name, _, value = argv.pop(0).partition("=")
        os.environ[name] = value
    sys.argv, code = ["baton", *argv], 1
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
def one(argv):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            end(argv)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, *(file.seek(0) or file.read() for file in (out, err))
print(json.dumps([one(argv) for argv in json.loads(sys.argv[2])]))
"""


def forked(argvs: Sequence[Sequence[str]], *, before: str = "") -> list[subprocess.CompletedProcess[str]]:
    """Runs the command lines and returns their results.

    A command line may begin with NAME=VALUE words for its environment. `before` is Python code that runs once, before
    the forks.
    """
    command = [sys.executable, "-P", "-c", _PARENT, before, json.dumps(argvs)]
    parent = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert parent.returncode == 0, parent.stderr
    ends = json.loads(parent.stdout)
    return [subprocess.CompletedProcess(argv, *end) for argv, end in zip(argvs, ends, strict=True)]
