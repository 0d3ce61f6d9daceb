"""The observable effect of each generation parameter on an answer of SmolLM2.

An effect is a condition that is true for the answer with the parameter and false for the answer without it, all else
equal. It fails if the gateway, a prefill pod or a decode pod ignores the parameter. A parameter that acts on single
tokens has an effect on the first token (sampled by prefill) and on later tokens (sampled by decode).

ELSEWHERE has the parameters without a visible effect on a few tokens of SmolLM2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

PROMPT = "The capital of France is a city that"
MESSAGES = [{"role": "user", "content": "Name a city."}]
TOKENS = 6
EOS, START = 2, 1  # SmolLM2's <|im_end|> and <|im_start|>
SEED = 5
WILD: Json = {"temperature": 2.0, "seed": SEED}
WARM = PROMPT * 5  # a prompt of some blocks
REGEX = "[A-F]{2}-[0-9]{3}"
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer or an error."""

    texts: tuple[str, ...] = ()
    finishes: tuple[str, ...] = ()
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    #: Tokens with log-probabilities.
    scored: int = 0
    #: Different numbers of alternatives per token.
    alternatives: frozenset[int] = frozenset()
    #: Prompt tokens with log-probabilities.
    prompt_scores: int = 0
    calls: tuple[str, ...] = ()
    #: The parameter that the error names; "" for an answer.
    refused: str = ""
    #: Chunks of a stream, and chunks with usage.
    chunks: int = 0
    usages: int = 0

    @property
    def text(self) -> str:
        return self.texts[0] if self.texts else ""

    @property
    def finish(self) -> str:
        return self.finishes[0] if self.finishes else ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Reference answers of `transformers` to PROMPT."""

    #: Token ids of the greedy answer.
    greedy: tuple[int, ...]
    decode: Callable[[list[int]], str]
    encode: Callable[[str], list[int]]
    #: Computes the greedy answer with bias, penalties or allowed tokens.
    loop: Callable[..., str]
    beams: tuple[str, ...]
    seeded: str
    best: str

    @property
    def text(self) -> str:
        return self.decode(list(self.greedy))

    def word(self, number: int) -> str:
        """Returns a word of the greedy answer."""
        return self.text.split()[number]

    def ids(self, *words: str) -> list[int]:
        """Returns the token ids of words of one token each."""
        return [self.encode(word)[0] for word in words]


Value = Any | Callable[[Scene], Any]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one parameter."""

    #: Parameter, or `parameter.member`.
    name: str
    #: Value of the parameter, or a function of the scene.
    value: Value
    #: True for the answer with the parameter, False for the answer without it.
    holds: Callable[[Said, Scene], bool]
    #: Further fields of both requests. None removes a default.
    beside: Value = field(default_factory=dict)
    #: A chat request instead of a completion.
    chat: bool = False
    #: gRPC has no field for the parameter.
    rest_only: bool = False

    def bodies(self, scene: Scene, how: str) -> tuple[Json, Json]:
        """Returns the bodies with and without the parameter. `how` (rest or grpc) makes a cache salt unique."""
        beside = self.beside(scene) if callable(self.beside) else self.beside
        value = self.value(scene) if callable(self.value) else self.value
        start: Json = {"messages": MESSAGES} if self.chat else {"prompt": PROMPT}
        plain = {**start, "max_tokens": TOKENS, "temperature": 0.0, **beside}
        parent, _, member = self.name.partition(".")
        if member:
            value = {member: value}
        if self.name == "cache_salt":
            value = f"{value}-{how}"
        return _without_none({**plain, parent: value}), _without_none(plain)


def _without_none(body: Json) -> Json:
    return {name: value for name, value in body.items() if value is not None}


def _is_greedy(said: Said, scene: Scene) -> bool:
    return said.text == scene.text


def _few(scene: Scene) -> Json:
    """Few enough allowed tokens that they repeat."""
    return {"allowed_token_ids": scene.ids(" the", " of", " and"), "max_tokens": 10}


def _ended(scene: Scene) -> Json:
    """The stop token is the most likely token and ends the answer as soon as it is allowed."""
    [go, end] = scene.ids(" the", " of")
    return {"allowed_token_ids": [go, end], "logit_bias": {str(end): 100}, "stop_token_ids": [end]}


def _penalised(name: str, value: float) -> Effect:
    return Effect(
        name=name,
        value=value,
        beside=_few,
        holds=lambda said, scene: (
            said.text == scene.loop(10, allowed=_few(scene)["allowed_token_ids"], **{name: value})
        ),
    )


def _chosen(name: str, value: Any, text: str, **more: Any) -> Effect:
    """A format that only one text matches."""
    return Effect(name=name, value=value, beside={"max_tokens": 12}, holds=lambda said, _: said.text == text, **more)


def _banned(scene: Scene) -> dict[int, float]:
    """Returns a bias that bans the first token and a later one."""
    return {scene.greedy[0]: -100.0, scene.greedy[2]: -100.0}


COMPLETIONS: tuple[Effect, ...] = (
    Effect(name="model", value="nobody", holds=lambda said, _: said.refused == "model"),
    Effect(name="prompt", value="Once upon", holds=lambda said, scene: said.prompt == len(scene.encode("Once upon"))),
    Effect(name="temperature", value=0.0, beside={"temperature": None, "seed": SEED}, holds=_is_greedy),
    Effect(name="top_p", value=1e-6, beside=WILD, holds=_is_greedy),
    Effect(name="top_k", value=1, beside=WILD, holds=_is_greedy),
    Effect(name="min_p", value=1.0, beside=WILD, holds=_is_greedy),
    Effect(name="seed", value=7, beside={"temperature": 2.0}, holds=lambda said, scene: said.text == scene.seeded),
    Effect(
        name="repetition_penalty",
        value=1.9,
        holds=lambda said, scene: said.text == scene.loop(TOKENS, repetition_penalty=1.9),
    ),
    _penalised("presence_penalty", 2.0),
    _penalised("frequency_penalty", 1.5),
    Effect(
        name="logit_bias",
        value=lambda scene: {str(token): bias for token, bias in _banned(scene).items()},
        holds=lambda said, scene: said.text == scene.loop(TOKENS, bias=_banned(scene)),
    ),
    Effect(name="min_tokens", value=3, beside=_ended, holds=lambda said, _: said.completion == 4),
    Effect(name="max_tokens", value=1, beside={"max_tokens": None}, holds=lambda said, _: said.completion == 1),
    Effect(name="max_tokens", value=3, beside={"max_tokens": None}, holds=lambda said, _: said.completion == 3),
    Effect(name="stop", value=lambda scene: [scene.word(0)], holds=lambda said, _: said.text.strip() == ""),
    Effect(
        name="stop",
        value=lambda scene: [scene.word(2)],
        holds=lambda said, scene: said.text == scene.text[: scene.text.index(scene.word(2))],
    ),
    Effect(name="stop_token_ids", value=lambda scene: [scene.greedy[0]], holds=lambda said, _: said.completion == 1),
    Effect(
        name="stop_token_ids",
        value=lambda scene: [scene.greedy[3]],
        holds=lambda said, scene: said.completion == scene.greedy.index(scene.greedy[3]) + 1 and said.finish == "stop",
    ),
    Effect(
        name="ignore_eos",
        value=True,
        beside={"logit_bias": {str(EOS): 100}},
        holds=lambda said, _: said.completion == TOKENS,
    ),
    Effect(
        name="ignore_eos",
        value=True,
        beside={"logit_bias": {str(EOS): 100}, "min_tokens": 2},
        holds=lambda said, _: said.completion == TOKENS,
    ),
    Effect(name="cache_salt", value="own", beside={"prompt": WARM}, holds=lambda said, _: said.cached == 0),
    Effect(name="n", value=2, holds=lambda said, scene: said.texts == (scene.text, scene.text)),
    Effect(name="use_beam_search", value=True, beside={"n": 2}, holds=lambda said, scene: said.texts == scene.beams),
    Effect(
        name="allowed_token_ids",
        value=lambda scene: scene.ids("a", "b", "c"),
        holds=lambda said, _: set(said.text) <= set("abc"),
    ),
    Effect(
        name="bad_words",
        value=lambda scene: [scene.word(0), scene.word(2)],
        holds=lambda said, scene: not {scene.word(0), scene.word(2)} & set(said.text.split()),
    ),
    Effect(
        name="include_stop_str_in_output",
        value=True,
        beside=lambda scene: {"stop": [scene.word(2)]},
        holds=lambda said, scene: said.text.endswith(scene.word(2)),
    ),
    Effect(
        name="prompt_logprobs",
        value=1,
        holds=lambda said, scene: said.prompt_scores == len(scene.encode(PROMPT)) - 1 and said.cached == 0,
    ),
    Effect(
        name="structured_outputs",
        value={"regex": REGEX},
        beside={"max_tokens": 12},
        holds=lambda said, _: re.fullmatch(REGEX, said.text) is not None,
    ),
    _chosen(
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["zebra"]}}},
        '"zebra"',
        rest_only=True,
    ),
    _chosen("guided_json", {"enum": ["zebra"]}, '"zebra"', rest_only=True),
    _chosen("guided_regex", "zeb(ra)", "zebra", rest_only=True),
    _chosen("guided_choice", ["zebra"], "zebra", rest_only=True),
    _chosen("guided_grammar", 'start: "zebra"', "zebra", rest_only=True),
    Effect(
        name="skip_special_tokens",
        value=False,
        beside={"logit_bias": {str(START): 100}, "max_tokens": 3},
        holds=lambda said, _: said.text == 3 * "<|im_start|>",
    ),
    Effect(name="echo", value=True, holds=lambda said, scene: said.text == PROMPT + scene.text),
    Effect(
        name="logprobs", value=2, holds=lambda said, _: (said.scored, said.alternatives) == (TOKENS, frozenset({2}))
    ),
    Effect(
        name="best_of", value=4, beside=WILD, holds=lambda said, scene: said.text == scene.best and len(said.texts) == 1
    ),
    Effect(name="stream", value=True, holds=lambda said, _: said.chunks >= TOKENS, rest_only=True),
    Effect(
        name="stream_options.include_usage",
        value=True,
        beside={"stream": True},
        holds=lambda said, _: (said.usages, said.completion) == (1, TOKENS),
        rest_only=True,
    ),
    Effect(
        name="stream_options.continuous_usage_stats",
        value=True,
        beside={"stream": True},
        holds=lambda said, _: said.usages >= TOKENS,
        rest_only=True,
    ),
)
CHATS: tuple[Effect, ...] = (
    Effect(
        name="messages",
        value=[*MESSAGES, {"role": "assistant", "content": "Oslo."}, {"role": "user", "content": "One more."}],
        holds=lambda said, scene: said.prompt > 45,
        chat=True,
    ),
    Effect(
        name="max_completion_tokens",
        value=3,
        beside={"ignore_eos": True},
        holds=lambda said, _: said.completion == 3,
        chat=True,
    ),
    Effect(
        name="max_tokens",
        value=1,
        holds=lambda said, _: said.completion == 1,
        chat=True,
    ),
    Effect(name="logprobs", value=True, holds=lambda said, _: said.scored == said.completion > 0, chat=True),
    Effect(
        name="top_logprobs",
        value=2,
        beside={"logprobs": True},
        holds=lambda said, _: said.alternatives == frozenset({2}),
        chat=True,
    ),
    Effect(name="tools", value=[TOOL], holds=lambda said, _: said.prompt > 60, chat=True),
    Effect(
        name="tool_choice",
        value="required",
        beside={"tools": [TOOL], "max_tokens": 40},
        holds=lambda said, _: said.calls[:1] == ('pick({"city": "Oslo"})',),
        chat=True,
    ),
)

#: Tested with fake pods in tests/integration: test_gateway_rest, _beams, _reasoning, _tools and _tools_grpc.
ELSEWHERE = frozenset(
    {
        "priority",
        "cache_priority",
        "cache_ttl_s",
        "length_penalty",
        "early_stopping",
        "chat_template_kwargs",
        "reasoning_effort",
        "parallel_tool_calls",
        "include_reasoning",
        "functions",
        "function_call",
        # Without effect
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "extra_body",
    }
)
