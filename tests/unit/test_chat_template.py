"""Chat templates: the same text as `transformers`, errors that name the template's line, bounded memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, InvalidRequest
from common.model.chat_template import ChatTemplate
from common.model.template_environment import MAX_TEXT

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hi é<&>'"},
    {"role": "assistant", "content": "yo", "reasoning": "because"},
    {"role": "user", "content": "x"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "é<&>",
            "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}},
        },
    }
]


def template(folder: Path, source: str, **more: Any) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, **more)


def refusal(folder: Path, source: str, **variables: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        template(folder, source).render(CHAT, variables)
    assert caught.value.field == "messages"
    return caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
        "{% for m in messages %}{% generation %}\n{{ m.role }}{% endgeneration -%}  \n{% endfor %}",
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ tools | tojson(indent=2) }}{{ tools | tojson(true) }}{{ tools | tojson(false, 4, ('|', '=')) }}",
        "{{ messages | tojson(ensure_ascii=true) }}{{ 'a' | tojson }}{{ none | tojson }}",
        "{{ tools | tojson(indent='\t') }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% set ns.b = dict(x=ns.a) %}{{ ns.b.x }}{{ dict.fromkeys(['a']) }}",
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}{{ m | length }}{% endfor %}",
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ documents }}{{ add_generation_prompt }}{{ x }}",
        "{% macro m(a, b='c') %}{{ a ~ b ~ 1 }}{% endmacro %}{{ m('x') }}{{ ['a', 1] | join('-') }}{{ 'x' * 3 + '' }}",
        "{{ '20250101 %s|%5d' % ('a', 3) }}{{ '{:>4}{}'.format('a', 3) }}{{ '%s' | format('x') }}",
        "{{ 'ab'.replace('a', 'c') }}{{ '{a}'.format_map({'a': 1}) }}{{ 'x'.center(5) }}{{ 1.25 | round(1) }}",
        "  {% if true %}\n  a\n  {%- endif %}\n{# comment #}\n b {{ messages[-1]['content'] | trim | upper }}\n",
        "{% set x %}{{ messages[0].content }}{% endset %}{{ x | replace('h', 'H') | indent(2) }}{{ 7 ** 3 % 5 }}",
        "{% macro m(v) %}{{ caller(v) }}{% endmacro %}{% call(x) m('b') %}{{ x }}{% endcall %}",
        "{{ range(3) | list }}{{ messages | map(attribute='role') | unique | list }}{{ [1, [2]] + [3] }}{{ 3.0 }}",
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"bos_token": "<s>", "eos_token": "</s>", "x": 5}
    expected, _ = render_jinja_template([CHAT], TOOLS, None, source, add_generation_prompt=True, **names)
    assert template(tmp_path, source).render(CHAT, {"x": 5}, TOOLS) == expected[0]


def test_nulls_in_messages_are_absent_as_in_transformers(tmp_path: Path) -> None:
    made = template(tmp_path, "{{ messages[0] | tojson }}")
    assert made.render([{"role": "user", "content": "a", "name": None}]) == '{"role": "user", "content": "a"}'


def test_half_characters_of_a_message_have_an_encoding(tmp_path: Path) -> None:
    made = template(tmp_path, "{{ messages[0].content }}|{{ messages[0] | tojson }}")
    chat = [{"role": "user", "content": "é \ud83d a \ud83d\ude00 \udc00"}]
    content = "é \ufffd a \U0001f600 \ufffd"
    assert made.render(chat) == f'{content}|{{"role": "user", "content": "{content}"}}'


def test_the_time_is_local(tmp_path: Path) -> None:
    text = template(tmp_path, "{{ strftime_now('%d %b %Y') }}").render(CHAT)
    assert abs((datetime.strptime(text, "%d %b %Y") - datetime.now()).days) <= 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n{{ raise_exception('roles must\nalternate') }}", "(line 2 of the template): roles must\nalternate"),
        ("\n\n{{ 10 // (messages | length - 3) }}", "(line 3 of the template): ZeroDivisionError"),
        ("{% macro deep(n) %}\n{{ deep(n + 1) }}{% endmacro %}\n{{ deep(0) }}", "template): RecursionError"),
        ("{{ messages[0].nothing.more }}", "(line 1 of the template): UndefinedError: 'dict object' has no attribute"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "SecurityError"),
        ("{% include 'other' %}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 'a'.encode('no') }}", "LookupError"),
    ],
)
def test_an_error_of_a_template_names_its_place(tmp_path: Path, source: str, said: str) -> None:
    assert said in refusal(tmp_path, source)


def test_a_long_error_of_a_template_is_cut(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, "{{ raise_exception('x' * 100000) }}")) < 1000


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * (10 ** 12) }}",
        "{{ (10 ** 12) * 'x' }}",
        "{{ [0] * 10 ** 9 }}",
        "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = m(n.x) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 60000 }}{% endfor %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['y' * 1000000] %}{% endfor %}",
        "{{ 'x' | center(10 ** 11) }}",
        "{{ 'x'.ljust(10 ** 11) }}{{ 'x'.zfill(10 ** 11) }}",
        "{{ ('a\n' * 60000) | indent(60000) }}",
        "{{ '%100000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 11, 1) }}",
        "{{ '{:>100000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 11) }}",
        "{{ '{x:{w}}'.format_map({'x': 1, 'w': 10 ** 11}) }}",
        "{{ '%(x)s' * 60000 % {'x': 'y' * 60000} }}",
        "{{ ('{0}' * 60000).format('y' * 60000) }}",
        "{{ '%100000000000d' | format(1) }}",
        "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
        "{{ ('a' * 60000) | replace('a', 'b' * 60000) }}",
        "{{ ('x' * 100000).join(range(99999) | map('string')) }}",
        "{{ range(99999) | join('x' * 100000) }}",
        "{{ (10 ** 1000) ** 1000 }}",
        "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "{{ (1).to_bytes(10 ** 11, 'big') }}",
        "{{ 1.5 | round(10 ** 11, 'floor') }}",
        "{{ [[1]] | tojson(indent=10 ** 11) }}",
        "{{ ('a' * 60000).translate({97: 'b' * 60000}) }}",
        "{{ [1] | batch(10 ** 11, 0) | list }}",
        "{{ lipsum(10 ** 9) }}",
    ],
)
def test_a_template_that_makes_too_much_is_a_400(tmp_path: Path, source: str) -> None:
    made = template(tmp_path, source)  # nothing of it is computed when it is compiled
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(InvalidRequest, match=r"out of memory|OverflowError|UndefinedError") as caught:
            made.render(CHAT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "of the template" in caught.value.message
    assert peak < 12 * MAX_TEXT
    assert time.perf_counter() - began < 30


def test_a_limit_counts_for_one_rendering(tmp_path: Path) -> None:
    made = template(tmp_path, "{{ 'x' * 60000000 }}")
    for _ in range(12):
        assert len(made.render(CHAT)) == 60_000_000


def test_a_template_that_does_not_compile_is_an_error_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not compile: TemplateSyntaxError: .*\(line 2\)") as caught:
        template(tmp_path, "a\n{% for %}")
    assert caught.value.field == "model"


def test_a_file_replaces_the_templates_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own {{ tools is none }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    made = template(tmp_path, "model", file=file)
    assert (made.render(CHAT), made.render(CHAT, tools=TOOLS)) == ("own True", "own False")
    assert made.source == "own {{ tools is none }}"
    file.write_bytes(b"\xff")
    for wrong, said in (
        (file, "is not UTF-8 text"),
        (tmp_path / "none.jinja", "cannot read .*none.jinja: No such file"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            template(tmp_path, "model", file=wrong)
        assert caught.value.field == "chat_template"
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"^chat_template: the chat template does not compile"):
        template(tmp_path, "model", file=file)


def test_variables_of_a_request_have_precedence_over_defaults(tmp_path: Path) -> None:
    made = template(tmp_path, "{{ a }}{{ b }}{{ messages | length }}", variables={"a": 1, "b": 2, "messages": "no"})
    assert made.render(CHAT) == "123"
    assert made.render(CHAT, {"a": 7}) == "723"
    assert json.loads(template(tmp_path, "{{ a | tojson }}", variables={"a": {"b": [1]}}).render(CHAT)) == {"b": [1]}
