"""The work of `baton chat`: a conversation with a running server, in a terminal or through pipes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from cli.client import Answer, Server
from common.errors import BatonError, ConfigError

COMMANDS = {
    "/clear": "forgets the conversation",
    "/system [TEXT]": "sets the system message, or removes it",
    "/trace": "shows where the time of the last answer went",
    "/retry": "asks for the last answer again",
    "/model [NAME]": "uses another model, or lists the models",
    "/help": "shows this list",
    "/quit": "ends the chat, like Ctrl-D",
}
PROMPT = "> "
MORE = "\\"  # At the end of a line: the message continues on the next one.
HISTORY_LINES = 1000
#: Control characters except tab and line feed: a model's answer must not control the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class Chat:
    """One conversation with one server."""

    server: Server
    model: str
    options: Mapping[str, Any]  # Further fields of each request, like temperature.
    console: Console  # For the answers.
    notes: Console  # For everything else.
    trace: bool = False  # Show the waterfall after every answer.
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)  # Without the system message.
    last: Answer | None = None

    def ask(self, text: str) -> None:
        """Sends a message and prints its answer. Ctrl-C ends only the answer.

        The conversation keeps the part of an answer that arrived. A failed request does not change it.
        Raises Unavailable.
        """
        said = list[str]()
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        body = {**self.options, "model": self.model, "messages": [*system, *self.messages, question]}
        self.last = None
        try:
            self.last = self.server.stream_chat(body, self._show(said), self._show([], style="dim"))
        except KeyboardInterrupt:
            if not self.console.is_terminal:
                raise
            self.note("\n(stopped)")
        self.messages += [question, {"role": "assistant", "content": "".join(said)}]
        self.console.out()
        if self.last is not None and self.last.finish_reason == "length":
            self.note("(the answer reached the token limit; --max-tokens N allows more)")
        if self.trace:
            self.show_trace()

    def run(self, line: str) -> bool:
        """Runs a command. Returns False at the end of the chat. Raises Unavailable."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/clear":
            self.messages, self.last = [], None
            self.note("the conversation is empty")
        elif name == "/system":
            self.system = rest
            self.note("the system message is set" if rest else "there is no system message")
        elif name == "/trace":
            self.show_trace()
        elif name == "/retry":
            self._retry()
        elif name == "/model":
            self._use_model(rest)
        else:
            if name != "/help":
                self.note(f"there is no command {name}")
            for command, what in COMMANDS.items():
                self.note(f"  {command:<16} {what}")
        return True

    def show_trace(self) -> None:
        """Prints the waterfall of the last answer: its time in queue, prefill, transfer and decode."""
        if self.last is None:
            self.note("there is no complete answer yet")
            return
        from cli.demo.answer import show_phases

        try:
            timeline = self.server.timeline(self.last.request_id)
        except BatonError as error:
            self.note(f"no time line: {error.message}")
            return
        show_phases(self.notes, timeline, tokens=self.last.completion_tokens, end_s=self.last.last_s)
        self.note(self.last.figures)

    def _retry(self) -> None:
        if not self.messages:
            self.note("there is no message yet")
            return
        before = self.messages
        *self.messages, question, _answer = before
        try:
            self.ask(question["content"])
        except BatonError:
            self.messages = before
            raise

    def _use_model(self, name: str) -> None:
        names = self.server.models()
        if name in names:
            self.model = name
        elif name:
            self.note(f"{name} is not served")
        self.note(f"model {self.model}; served: {', '.join(names)}")

    def _show(self, said: list[str], style: str | None = None) -> Callable[[str], None]:
        """Prints and collects the parts of a text. Reasoning (with a style) is shown on a terminal only."""

        def show(text: str) -> None:
            said.append(text)
            if self.console.is_terminal:
                self.console.out(_CONTROL.sub("", text), end="", style=style, highlight=False)
            elif style is None:
                self.console.file.write(text)
                self.console.file.flush()

        return show

    def note(self, text: str) -> None:
        """Prints a line that is not part of an answer."""
        self.notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def talk(chat: Chat) -> int:
    """Reads messages and commands from the terminal until the user ends the chat. Returns the exit code."""
    chat.note(f"{chat.model} at {chat.server.url}; /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
    with _line_editing():
        while True:
            try:
                line = _read_message()
            except KeyboardInterrupt:
                chat.console.out()
                continue
            except EOFError:
                chat.console.out()
                return 0
            try:
                if line.startswith("/"):
                    if not chat.run(line):
                        return 0
                elif line.strip():
                    chat.ask(line)
            except KeyboardInterrupt:
                chat.console.out()
            except BatonError as error:
                chat.notes.print(error.message, style="red", markup=False, soft_wrap=True)


def answer_input(chat: Chat, source: TextIO, prompt: str | None) -> int:
    """Answers `prompt`, the text of `source`, or both as one message. Returns the exit code.

    Raises Unavailable, and ConfigError without a message.

    If a line of the text is a command, each line is a message or a command.
    """
    text = "" if source.isatty() else source.read()
    lines = text.splitlines()
    names = {command.partition(" ")[0] for command in COMMANDS}
    if prompt is None and any(line.split(" ")[0] in names for line in lines):
        for line in filter(str.strip, lines):
            if not line.startswith("/"):
                chat.ask(line)
            elif not chat.run(line):
                return 0
        return 0
    message = "\n\n".join(part for part in (prompt, text.strip()) if part)
    if not message:
        raise ConfigError("stdin has no text: pipe a message, or give --prompt TEXT", field="prompt")
    chat.ask(message)
    return 0


def _read_message() -> str:
    """One message from the terminal. Raises EOFError, KeyboardInterrupt."""
    lines = [input(PROMPT)]
    while lines[-1].endswith(MORE):
        lines[-1] = lines[-1].removesuffix(MORE)
        lines.append(input("  "))
    return "\n".join(lines)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Line editing and history for input(), if Python has readline. Only this user can read the history file."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME")
    file = (Path(state) if state else Path.home() / ".local" / "state") / "baton" / "chat_history"
    names = [command.partition(" ")[0] for command in COMMANDS]

    def complete(text: str, number: int) -> str | None:
        return dict(enumerate(name for name in names if name.startswith(text))).get(number)

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(file)


def run(chat_of: Callable[[Console, Console], Chat], prompt: str | None) -> int:
    """Talks in a terminal, or answers the text of a pipe. Returns the exit code. Raises Unavailable."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and prompt is None
    chat = chat_of(Console(highlight=False), Console(highlight=False, stderr=not interactive))
    return talk(chat) if interactive else answer_input(chat, sys.stdin, prompt)
