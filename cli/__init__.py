"""The `baton` command. Only reads the command line: what a command does is imported when it runs, so help is quick.

Values of flags arrive here as text: common/settings/configs.py, with kinds.py, alone says what they may be, and in which
words it refuses them.
A new command is a function in a file of commands/ that app.py lists; a flag of several commands stands in options.py.
This package is the top floor: it may import every other one, and no other one imports it.
This file imports next to nothing, so that Ctrl-C finds `main` in charge as good as from the first moment on.
"""

from __future__ import annotations

import signal

from cli import exits

TYPE_CHECKING = False  # typing takes longer to import than all the rest of this
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the console script."""
    # Half a second of imports: an exception raised among them is a traceback, or is lost in what swallows it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, exits.at_once)
    from cli import app

    if signal.getsignal(signal.SIGINT) is exits.at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()
