"""Events of a response: ordered and numbered, and each item is complete before the next one begins."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError
from common.types import FinishReason
from gateway.api.openai.responses.writer import ResponseWriter
from gateway.serving.request import Usage

TEXT = st.text(max_size=3)
STEP = st.one_of(
    st.tuples(st.just("text"), TEXT),
    st.tuples(st.just("reasoning"), TEXT),
    st.tuples(st.just("call"), TEXT),
    st.tuples(st.just("arguments"), TEXT),
    st.tuples(st.just("broken"), TEXT),
)


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
    assert done == whole["output"]


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


def test_a_malformed_call_is_incomplete_and_its_text_follows() -> None:
    writer = ResponseWriter("resp_1", {"model": "m"})
    writer.start(store=True)
    write(writer, [("call", '{"a"'), ("broken", 'f({"a"oops'), ("text", " and more")])
    whole, _ = writer.end(FinishReason.STOP, Usage())
    assert [(item["type"], item["status"]) for item in whole["output"]] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert whole["output"][1]["content"][0]["text"] == 'f({"a"oops and more'
