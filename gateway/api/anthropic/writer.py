"""Builds one message: its content blocks, and the events of its stream.

    start -> (reasoning | text | call)* -> end or fail, once

Each method returns the events that it causes, in order; a caller that does not stream drops them. At most one block is
open, and it is closed before the next one begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pydantic_core

from common.errors import BatonError
from gateway.api.anthropic.errors import AnthropicErrors
from gateway.api.http.json import Json, encoded
from gateway.serving.request import Usage

#: The `signature` of thinking blocks. Clients send it back; Baton signs and checks nothing.
SIGNATURE = "unsigned"
#: Shows that a silent stream is alive. One follows the start of the first block, as at Anthropic.
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


#: Reads JSON as other parsers do: no NaN, and numbers of any length.
_parse_json = json.JSONDecoder(parse_int=float, parse_constant=_refuse_constant).decode


class MessageWriter:
    """Builds one message."""

    def __init__(self, message_id: str, model: str, request_id: str) -> None:
        self.content: list[Json] = []  #: The complete blocks.
        self._head: Json = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._request_id = request_id
        self._open: Json | None = None
        self._parts: list[str] = []  #: Deltas of the open block.
        self._text_event = b""  #: The bytes of a text delta of the open block before its text.
        self._pinged = False

    def start(self, usage: Usage) -> bytes:
        """Returns the first event. `usage` has the prompt's tokens as far as they are known."""
        shown = {**usage_json(usage), "output_tokens": 0}
        return _event("message_start", message={**self._message(None, None), "usage": shown})

    def end(self, stop_reason: str, stop_sequence: str | None, usage: Usage) -> tuple[Json, bytes]:
        """Returns the complete message and the last events."""
        events = self._close()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        events += _event("message_delta", delta=delta, usage=usage_json(usage)) + _event("message_stop")
        return {**self._message(stop_reason, stop_sequence), "usage": usage_json(usage)}, events

    def fail(self, error: BatonError) -> bytes:
        """Returns the event that ends a failed stream."""
        body = AnthropicErrors().body(error, self._request_id)
        return b"event: error\ndata: " + encoded(body) + b"\n\n"

    def reasoning(self, text: str) -> bytes:
        """Adds to the reasoning section."""
        return self._ensure_block({"type": "thinking", "thinking": "", "signature": ""}) + self._delta(
            text, type="thinking_delta", thinking=text
        )

    def text(self, text: str, _logprobs: Sequence[Json] = ()) -> bytes:
        """Adds text."""
        if not text:
            return b""
        events = self._ensure_block({"type": "text", "text": ""})
        self._parts.append(text)
        return events + self._text_event + orjson.dumps(text) + b"}}\n\n"

    def call(self, call_id: str, name: str, arguments: str) -> bytes:
        """Begins a call if there is a name, else adds arguments to the open call."""
        events = b""
        if name:
            events = self._close()
            block_id = f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id
            events += self._ensure_block({"type": "tool_use", "id": block_id, "name": name, "input": {}})
        if not arguments:
            return events
        return events + self._delta(arguments, type="input_json_delta", partial_json=arguments)

    def invalid_call(self, text: str) -> bytes:
        """Ends the open call, which is malformed; its text becomes a block of text."""
        return self._close() + self.text(text)

    def _message(self, stop_reason: str | None, stop_sequence: str | None) -> Json:
        ends = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return {**self._head, "content": list(self.content), **ends}

    def _ensure_block(self, block: Json) -> bytes:
        """Opens a block of this type unless it is open already. A ping follows the first block's start."""
        if self._open is not None and self._open["type"] == block["type"]:
            return b""
        events = self._close()
        self._open = block
        index = len(self.content)
        self._text_event = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % index
        )
        events += _event("content_block_start", index=index, content_block=block)
        if not self._pinged:
            self._pinged = True
            events += PING
        return events

    def _delta(self, part: str, **delta: str) -> bytes:
        self._parts.append(part)
        return _event("content_block_delta", index=len(self.content), delta=delta)

    def _close(self) -> bytes:
        """Closes the open block, if any."""
        block, self._open = self._open, None
        if block is None:
            return b""
        whole, events, index = "".join(self._parts), b"", len(self.content)
        self._parts = []
        match block["type"]:
            case "text":
                block = {**block, "text": whole}
            case "thinking":
                block = {**block, "thinking": whole, "signature": SIGNATURE}
                delta = {"type": "signature_delta", "signature": SIGNATURE}
                events = _event("content_block_delta", index=index, delta=delta)
            case _:
                block = {**block, "input": call_input(whole)}
        self.content.append(block)
        return events + _event("content_block_stop", index=index)


def _event(kind: str, **members: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encoded({"type": kind, **members}) + b"\n\n"


def call_input(arguments: str) -> Any:
    """Returns the `input` of a call: the object that the model wrote, or the beginning of one that was cut.

    A complete object stays as it was written, because orjson refuses long numbers and half surrogate pairs.
    """
    try:
        if isinstance(_parse_json(arguments), dict):
            return orjson.Fragment(arguments)
    except (ValueError, RecursionError):
        pass
    try:
        begun = pydantic_core.from_json(arguments, allow_partial=True)
        orjson.dumps(begun)
    except (ValueError, TypeError):
        return {}
    return begun if isinstance(begun, dict) else {}


def usage_json(usage: Usage) -> Json:
    """Returns the usage in Anthropic's form, in which input_tokens has no cached tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
