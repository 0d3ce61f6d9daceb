"""Builds one response: its output items, and the typed events of its stream.

    start -> (reasoning | text | call)* -> end or fail, once

Each method returns the events that it causes, in order; a caller that does not stream drops them. Invariants:
sequence_number counts all events from 0. At most one item is open, and it is closed before the next one begins. The
`done` events of an item hold the sum of its deltas.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from common.errors import BatonError, Overloaded
from common.types import FinishReason
from gateway.api.http.json import Json, encoded, error_body
from gateway.api.openai.responses.request import ResponseItem, new_item_id
from gateway.serving.request import Usage


class ResponseWriter:
    """Builds one response."""

    def __init__(
        self, response_id: str, echoed_fields: Json, *, created: int = 0, id_source: random.Random | None = None
    ) -> None:
        """`created`: seconds since the epoch. `id_source` gives the ids of items; None: the system does."""
        self.id = response_id
        self.output: list[ResponseItem] = []
        self._created = created
        self._id_source = id_source
        self._echoed_fields = echoed_fields
        self._sequence_number = 0
        self._open: ResponseItem | None = None
        self._malformed: set[str] = set()  #: Ids of calls that turned out to be malformed.
        self._text: list[str] = []  #: Deltas of the open item.
        self._logprobs: list[Json] = []

    def start(self, *, store: bool) -> bytes:
        """Returns the first events. store: the response will be stored."""
        self._echoed_fields = {**self._echoed_fields, "store": store}
        body = self.response("in_progress")
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def end(self, finish: FinishReason, usage: Usage) -> tuple[Json, bytes]:
        """Returns the complete response, and the last events except the one that carries it (see `final_event`)."""
        status = "incomplete" if finish is FinishReason.LENGTH else "completed"
        events = self._close(status)
        if not self.output:  # an empty answer still has a message
            events += self.text("", ()) + self._close(status)
        return self.response(status, usage), events

    def final_event(self, body: Json) -> bytes:
        """Returns the event that ends a stream."""
        return self._event(f"response.{body['status']}", response=body)

    def fail(self, error: BatonError) -> bytes:
        """Returns the events that end a failed stream."""
        shown = error_body(error)["error"]
        parts = {name: shown[name] for name in ("code", "message", "param")}
        events = self._event("error", **{**parts, "code": parts["code"] or shown["type"]})
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        failed = {**self.response("failed"), "error": {"code": code, "message": shown["message"]}}
        return events + self._event("response.failed", response=failed)

    def response(self, status: str, usage: Usage | None = None) -> Json:
        """Returns the response object as it is now."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._valid_output(),
            "truncation": "disabled",
            "service_tier": "default",
            **({} if usage is None else {"usage": _usage(usage)}),
            **self._echoed_fields,
        }

    def reasoning(self, text: str) -> bytes:
        """Adds to the reasoning section."""
        events = self._ensure_item("reasoning", {"summary": [], "content": []})
        self._text.append(text)
        return events + self._event("response.reasoning_text.delta", **self._where(0), delta=text)

    def text(self, text: str, logprobs: Sequence[Json]) -> bytes:
        """Adds text, with the log-probabilities of its tokens if the client asked for them."""
        events = self._ensure_item("message", {"role": "assistant", "content": []})
        self._text.append(text)
        self._logprobs.extend(logprobs)
        if not text and not logprobs:
            return events
        return events + self._event("response.output_text.delta", **self._where(0), delta=text, logprobs=list(logprobs))

    def call(self, call_id: str, name: str, arguments: str) -> bytes:
        """Begins a call if there is a name, else adds arguments to the open call."""
        events = b""
        if name:
            events = self._close("completed")
            events += self._ensure_item("function_call", {"call_id": call_id, "name": name, "arguments": ""})
        if not arguments:
            return events
        self._text.append(arguments)
        return events + self._event("response.function_call_arguments.delta", **self._where(), delta=arguments)

    def invalid_call(self, text: str) -> bytes:
        """Ends the open call, which turned out to be malformed; its text becomes content.

        The stream has shown the call. The response leaves it out, as an answer without a stream does.
        """
        if self._open is not None:
            self._malformed.add(self._open["id"])
        return self._close("incomplete") + self.text(text, ())

    def _valid_output(self) -> list[ResponseItem]:
        """Returns the output without malformed calls. The messages before and after one of these become one message."""
        output: list[ResponseItem] = []
        left_out = False
        for item in self.output:
            if item["id"] in self._malformed:
                left_out = True
                continue
            if left_out and item["type"] == "message" and output and output[-1]["type"] == "message":
                [before], [after] = output[-1]["content"], item["content"]
                part = _part("message", before["text"] + after["text"], before["logprobs"] + after["logprobs"])
                output[-1] = {**output[-1], "content": [part], "status": item["status"]}
            else:
                output.append(item)
            left_out = False
        return output

    def _ensure_item(self, kind: str, members: Json) -> bytes:
        """Opens an item of this kind unless it is open already."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        events = self._close("completed")
        self._open = {"id": new_item_id(kind, self._id_source), "type": kind, "status": "in_progress", **members}
        events += self._event("response.output_item.added", output_index=len(self.output), item=dict(self._open))
        if kind != "function_call":
            events += self._event("response.content_part.added", **self._where(0), part=_part(kind, "", []))
        return events

    def _close(self, status: str) -> bytes:
        """Closes the open item, if any."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text, logprobs = "".join(self._text), self._logprobs
        self._text, self._logprobs = [], []
        place = {"item_id": item["id"], "output_index": len(self.output)}
        if item["type"] == "function_call":
            item = {**item, "arguments": text, "status": status}
            events = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = _part(item["type"], text, logprobs)
            item = {**item, "content": [part], "status": status}
            place = {**place, "content_index": 0}
            done = {"text": text} if item["type"] == "reasoning" else {"text": text, "logprobs": logprobs}
            events = self._event(f"response.{part['type']}.done", **place, **done)
            events += self._event("response.content_part.done", **place, part=part)
        events += self._event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        return events

    def _where(self, content: int | None = None) -> Json:
        assert self._open is not None
        place: Json = {"item_id": self._open["id"], "output_index": len(self.output)}
        return place if content is None else {**place, "content_index": content}

    def _event(self, kind: str, **members: Any) -> bytes:
        body = encoded({"type": kind, "sequence_number": self._sequence_number, **members})
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _part(kind: str, text: str, logprobs: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
