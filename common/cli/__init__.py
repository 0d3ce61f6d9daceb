"""The `baton` command. Only reads the command line: what a command does is imported when it runs, so help is quick.

Values of flags arrive here as text: common/config.py, with config_kinds.py, alone says what they may be, and in which
words it refuses them.
A new command is a function in a file here that command.py lists; a flag of several commands stands in options.py.
"""

from common.cli.command import app, main

__all__ = ["app", "main"]
