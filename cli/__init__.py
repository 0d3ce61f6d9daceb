"""The `baton` command.

A command's module only declares its flags and imports its work when it runs, so that `--help` is quick. Flag values are
text; common/settings parses and checks them. A new command is a function in commands/ that app.py lists. Flags of
several commands are in options.py. This package may import all others; no other package imports it.

This file imports almost nothing, so that `main` handles Ctrl-C nearly from the start of the process.
"""

from __future__ import annotations

import signal

from cli import exits

TYPE_CHECKING = False  # importing typing takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the console script."""
    # The imports take half a second. KeyboardInterrupt among them would print a traceback, or be swallowed.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs of a shell ignore SIGINT
        signal.signal(signal.SIGINT, exits.at_once)
    from cli import app

    if signal.getsignal(signal.SIGINT) is exits.at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()
