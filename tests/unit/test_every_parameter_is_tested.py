"""Every parameter has a test that fails if the parameter is ignored, over REST and over gRPC.

If a parameter that you added fails here: add its effect to tests/e2e/effects.py. If a small model cannot show the
effect, add the names of its tests to ELSEWHERE there, or to OTHERS here for the smaller endpoints.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from gateway.api.docs.parameter import Parameter, Support
from gateway.api.docs.parameters import BODIES, CHAT, COMMON, COMPLETION
from gateway.api.docs.tables import GRPC_FIELDS, grpc_fields
from tests.e2e.effects import CHATS, COMPLETIONS, ELSEWHERE, Effect
from tests.integration.test_same_everywhere import EVERYWHERE

ROOT = Path(__file__).parents[2]
_RESPONSES = "tests/integration/test_gateway_responses.py"
_EMBEDDINGS = "tests/integration/test_gateway_embeddings.py"
_TEXTS = "tests/integration/test_gateway_utilities.py"
_SAME = "tests/integration/test_same_everywhere.py"
_CREATED = (f"{_RESPONSES}::test_create_answers_and_repeats_the_request_fields",)
_ITEMS = (f"{_RESPONSES}::test_items_become_chat_messages",)
_KEPT = (f"{_RESPONSES}::test_a_stored_response_can_be_read_listed_continued_and_deleted",)
_OTHERWISE = (f"{_SAME}::test_parameters_with_another_name_in_responses_ask_the_same",)
_VECTORS = (f"{_EMBEDDINGS}::test_token_ids_salt_and_dimensions",)
_TO_TOKENS = (f"{_TEXTS}::test_a_text_goes_to_tokens_and_back",)
_AS_CHAT = (f"{_TEXTS}::test_messages_are_tokenized_as_a_chat_request_would_be",)
_BAD = (f"{_TEXTS}::test_bad_bodies_are_named",)
# Path -> parameter -> its tests; those of the generating endpoints are effects.
OTHERS: dict[str, dict[str, tuple[str, ...]]] = {
    "/v1/responses": {
        **dict.fromkeys(("instructions", "max_output_tokens", "metadata"), _CREATED),
        **dict.fromkeys(EVERYWHERE, (f"{_SAME}::test_responses_ask_the_same_of_the_pods",)),
        **dict.fromkeys(("text", "text.format", "tools", "tool_choice", "parallel_tool_calls"), _OTHERWISE),
        **dict.fromkeys(("include", "top_logprobs"), _OTHERWISE),
        **dict.fromkeys(("previous_response_id", "store"), _KEPT),
        **dict.fromkeys(
            ("reasoning", "reasoning.effort", "chat_template_kwargs"),
            (f"{_SAME}::test_template_variables_reach_the_template",),
        ),
        "input": _ITEMS,
        "model": (f"{_RESPONSES}::test_errors_use_the_field_names_of_this_endpoint",),
        "stop": (f"{_SAME}::test_stop_strings_end_answers_on_every_endpoint",),
        "stream": (f"{_RESPONSES}::test_a_stream_has_every_event_in_its_order",),
    },
    "/v1/embeddings": {
        **dict.fromkeys(("input", "dimensions", "cache_salt"), _VECTORS),
        "encoding_format": (f"{_EMBEDDINGS}::test_the_sdk_gets_the_same_as_base64_and_as_floats",),
        "model": (f"{_EMBEDDINGS}::test_errors_name_the_field",),
    },
    "/tokenize": {
        **dict.fromkeys(("prompt", "return_token_strs"), _TO_TOKENS),
        **dict.fromkeys(("messages",), _AS_CHAT),
        **dict.fromkeys(
            ("add_special_tokens", "tools", "chat_template_kwargs"),
            (f"{_TEXTS}::test_tokenize_options",),
        ),
        "model": _BAD,
    },
    "/detokenize": {"tokens": _TO_TOKENS, "model": _BAD},
}


def effective(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Returns the parameters with an effect. tests/unit/test_api_doc.py tests those that are rejected or ignored."""
    return [p for p in parameters if p.support is Support.SUPPORTED]


def shown(effects: Iterable[Effect], *, over_grpc: bool = False) -> set[str]:
    return {effect.name for effect in effects if not (over_grpc and effect.rest_only)}


@pytest.mark.parametrize(
    ("parameters", "effects"),
    [((*COMMON, *COMPLETION), COMPLETIONS), (CHAT, CHATS)],
    ids=["completions", "chats"],
)
def test_every_parameter_changes_an_answer_in_a_test(
    parameters: tuple[Parameter, ...], effects: tuple[Effect, ...]
) -> None:
    for p in effective(parameters):
        if p.name in ELSEWHERE or p.name == "stream_options":  # the members of stream_options are parameters
            continue
        assert p.name in shown(effects), p.name
        if grpc_fields(p) and p.grpc != "structured_output":
            assert p.name in shown(effects, over_grpc=True), f"{p.name}, over gRPC"


def test_every_field_of_generate_changes_an_answer_in_a_test() -> None:
    parameters = effective((*COMMON, *CHAT, *COMPLETION))
    seen = shown((*COMPLETIONS, *CHATS), over_grpc=True) | {name for name, tests in ELSEWHERE.items() if len(tests) > 1}
    for name in GRPC_FIELDS:
        same = [p for p in parameters if name in grpc_fields(p)]
        assert any(p.name in seen for p in same) or name in ("request_id", "user"), name


def test_the_tests_elsewhere_exist() -> None:
    listed = [*ELSEWHERE.values(), *(tests for group in OTHERS.values() for tests in group.values())]
    for name in {name for tests in listed for name in tests}:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in found, name


@pytest.mark.parametrize("path", [path for path in BODIES if "completions" not in path])
def test_every_parameter_of_the_other_endpoints_has_a_test(path: str) -> None:
    assert {p.name for p in effective(BODIES[path])} == set(OTHERS.get(path, ()))
