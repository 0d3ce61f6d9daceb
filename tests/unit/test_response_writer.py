"""Events of a response: ordered and numbered, and each item is complete before the next one begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError
from common.types import FinishReason
from gateway.api.blocks import _piece_events, no_logprobs, write_blocks
from gateway.api.openai.responses.request import parse_response
from gateway.api.openai.responses.writer import ResponseWriter
from gateway.serving.choice import CompleteAnswer
from gateway.serving.request import Usage
from gateway.text.output import OutputPiece
from gateway.text.tools.format import ToolCallDelta
from gateway.text.tools.json_formats import HermesFormat

TEXT = st.text(max_size=3)
STEP = st.one_of(
    st.tuples(st.just("text"), TEXT),
    st.tuples(st.just("reasoning"), TEXT),
    st.tuples(st.just("call"), TEXT),
    st.tuples(st.just("arguments"), TEXT),
    st.tuples(st.just("broken"), TEXT),
)


CUT_CALL = ("function_call", "incomplete")


def others(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Returns the items that are not messages."""
    return (item for item in items if item["type"] != "message")


def said_in(items: list[dict[str, Any]]) -> str:
    """Returns the text of all messages."""
    return "".join(item["content"][0]["text"] for item in items if item["type"] == "message")


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """Returns the events as a client parses them."""
    events = []
    for event in raw.decode().split("\n\n")[:-1]:
        kind, data = event.split("\n")
        events.append(orjson.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def write(writer: ResponseWriter, steps: list[tuple[str, str]]) -> bytes:
    """Returns the events of these steps. A step that needs an open call is left out if there is none."""
    raw, in_call = b"", False
    for number, (kind, text) in enumerate(steps):
        if kind == "call":
            raw += writer.call(f"call_{number}", "f", text)
        elif kind == "arguments" and in_call:
            raw += writer.call("", "", text)
        elif kind == "broken" and in_call:
            raw += writer.invalid_call(text)
        elif kind == "text":
            raw += writer.text(text, ())
        elif kind == "reasoning":
            raw += writer.reasoning(text)
        else:
            continue
        in_call = kind in ("call", "arguments")
    return raw


@given(st.lists(STEP, max_size=12), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS]))
def test_done_events_hold_the_sum_of_the_deltas(steps: list[tuple[str, str]], finish: FinishReason) -> None:
    writer = ResponseWriter("resp_1", {"model": "m"})
    raw = writer.start(store=False) + write(writer, steps)
    whole, end = writer.end(finish, Usage(3, 4))
    events = parsed(raw + end + writer.final_event(whole))
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert whole["status"] == ("incomplete" if finish is FinishReason.LENGTH else "completed")
    assert whole["output"], "there is always an item"
    done: list[Any] = []
    open_item: dict[str, Any] = {}
    said = ""
    for e in events[2:-1]:
        kind = e["type"]
        assert e["output_index"] == len(done)
        if kind == "response.output_item.added":
            assert not open_item
            open_item, said = e["item"], ""
            continue
        if kind == "response.output_item.done":
            assert (e["item"]["id"], e["item"]["type"]) == (open_item["id"], open_item["type"])
            text = e["item"]["arguments"] if open_item["type"] == "function_call" else e["item"]["content"][0]["text"]
            assert text == said
            done.append(e["item"])
            open_item = {}
            continue
        assert e["item_id"] == open_item["id"]
        if kind.endswith(".delta"):
            said += e["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert e["text"] == said
        elif kind == "response.function_call_arguments.done":
            assert e["arguments"] == said
        else:
            assert kind in ("response.content_part.added", "response.content_part.done")
    assert not open_item
    # A malformed call is left out, and the messages around it become one. A call that max_tokens cuts comes last.
    kept = [item for item in done if item == done[-1] or (item["type"], item["status"]) != CUT_CALL]
    assert [*others(kept)] == [*others(whole["output"])]
    assert said_in(kept) == said_in(whole["output"])
    assert kept != done or kept == whole["output"]


def test_a_failure_hides_internals_and_keeps_complete_items() -> None:
    writer = ResponseWriter("resp_1", {"model": "m"})
    writer.start(store=True)
    writer.call("call_1", "f", "{}")
    writer.text("half", ())
    error, failed = parsed(writer.fail(InternalError("a secret")))
    assert error["type"] == "error"
    assert failed["response"]["status"] == "failed"
    assert [item["type"] for item in failed["response"]["output"]] == ["function_call"]
    assert "secret" not in f"{error}{failed}"


def test_a_malformed_call_is_incomplete_in_the_stream_and_left_out_of_the_response() -> None:
    writer = ResponseWriter("resp_1", {"model": "m"})
    writer.start(store=True)
    raw = write(writer, [("text", "Look: "), ("call", '{"a"'), ("broken", 'f({"a"oops'), ("text", " and more")])
    whole, end = writer.end(FinishReason.STOP, Usage())
    items = [e["item"] for e in parsed(raw + end) if e["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in items] == [
        ("message", "completed"),
        CUT_CALL,
        ("message", "completed"),
    ]
    [message] = whole["output"]
    assert (message["type"], message["status"], message["id"]) == ("message", "completed", items[0]["id"])
    assert message["content"][0]["text"] == 'Look: f({"a"oops and more'


TEXTS_WITH_CALLS = st.lists(
    st.sampled_from(
        [
            "Look: ",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", oops}}\n</tool_call>',
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo',
            '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        ]
    ),
    min_size=1,
    max_size=4,
).map("".join)


@given(TEXTS_WITH_CALLS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_a_streamed_response_has_the_same_output_as_a_whole_one(text: str, finish: FinishReason) -> None:
    parser = HermesFormat().new_parser(frozenset({"get_weather"}), None, {})
    pieces = [tuple(parser.feed(character)) for character in text]
    pieces.append(tuple(parser.finish(cut=finish is FinishReason.LENGTH)))
    deltas = tuple(delta for piece in pieces for delta in piece)
    ids, outputs = {d.id for d in deltas if isinstance(d, ToolCallDelta) and d.id}, []
    for stream in (True, False):
        writer = ResponseWriter("resp_1", {"model": "m"})
        writer.start(store=True)
        if stream:
            for piece in pieces:
                _piece_events(writer, OutputPiece("", (), (), None, piece), no_logprobs)
        else:
            write_blocks(writer, CompleteAnswer("", (), finish, None, None, (), deltas))
        whole, _ = writer.end(finish, Usage())
        outputs.append([{**item, "id": ""} for item in whole["output"]])
    assert outputs[0] == outputs[1]
    assert {item["call_id"] for item in outputs[0] if item["type"] == "function_call"} <= ids


def test_a_call_without_output_that_is_incomplete_is_not_in_the_next_prompt() -> None:
    def call(call_id: str, status: str, arguments: str) -> dict[str, Any]:
        head = {"type": "function_call", "call_id": call_id, "name": "f", "status": status}
        return {**head, "arguments": arguments}

    items = [
        {"role": "user", "content": "Hi"},
        call("call_1", "completed", "{}"),
        call("call_2", "incomplete", '{"city": "Oslo", '),
        call("call_3", "incomplete", "{}"),
        {"type": "function_call_output", "call_id": "call_1", "output": "warm"},
        {"type": "function_call_output", "call_id": "call_3", "output": "cold"},
    ]
    parsed_body = parse_response({"model": "m", "input": items})
    for chat in (parsed_body.chat(), parse_response({"model": "m", "input": "?"}).chat(parsed_body.input)):
        said = [message for message in chat.messages if message["role"] == "assistant"]
        assert [call["id"] for message in said for call in message["tool_calls"]] == ["call_1", "call_3"]
