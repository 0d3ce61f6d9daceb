"""/tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json_fields import JsonFields, wrong_type
from gateway.api.openai.messages import parse_messages
from gateway.api.openai.requests import parse_token_ids, refuse_unsupported, template_variables
from gateway.api.openai.tools import parse_functions
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel
from gateway.serving.request_context import RequestContext

#: Texts of more characters take 0.1 s or more to tokenize.
LONG_CHARS = 1 << 18

#: Fields without support, and for each the values that have no effect.
_ACCEPTED_VALUES: dict[str, tuple[object, ...]] = {
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "mm_processor_kwargs": (),
}


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """A checked /tokenize body with a prompt or messages."""

    model: str | None
    prompt: str | None
    messages: tuple[dict[str, Any], ...] | None
    template_kwargs: dict[str, Any]
    tools: tuple[dict[str, Any], ...]
    #: None means the default: True for a prompt, False for messages.
    add_special_tokens: bool | None
    return_token_strings: bool


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    """A checked /detokenize body."""

    model: str | None
    tokens: tuple[int, ...]


def parse_tokenize(body: object) -> TokenizeBody:
    """Checks a /tokenize body. Raises InvalidRequest, which names the field."""
    fields = JsonFields.of_body(body)
    refuse_unsupported(fields, _ACCEPTED_VALUES)
    messages, prompt = fields.raw("messages"), fields.raw("prompt")
    if (messages is None) == (prompt is None):
        raise InvalidRequest("either prompt or messages must be given", field="prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise wrong_type("prompt", "a string", prompt)
    return TokenizeBody(
        model=fields.string("model", 1024),
        prompt=prompt,
        messages=None if messages is None else parse_messages(messages),
        template_kwargs=template_variables(fields),
        tools=parse_functions(fields, "tools"),
        add_special_tokens=fields.boolean("add_special_tokens"),
        return_token_strings=fields.boolean("return_token_strs") or False,
    )


def parse_detokenize(body: object) -> DetokenizeBody:
    """Checks a /detokenize body. Raises InvalidRequest, which names the field."""
    fields = JsonFields.of_body(body)
    values = fields.raw("tokens")
    if not isinstance(values, list):
        raise wrong_type("tokens", "an array of token ids", values)
    return DetokenizeBody(fields.string("model", 1024), parse_token_ids(values, "tokens"))


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """The tokens of a text."""

    ids: list[int]
    #: The model's context length, None while it has no pods.
    max_model_len: int | None
    #: The vocabulary's entries, None if the client did not ask for them.
    token_strings: list[str] | None


class TokenizeHandler:
    """Answers both endpoints, for REST and gRPC. Only max_model_len needs pods."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._long_texts = asyncio.Semaphore(1)

    async def tokenize(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /tokenize body; a RequestHandler."""
        result = await self.tokens(parse_tokenize(body), context)
        answer = {"count": len(result.ids), "max_model_len": result.max_model_len, "tokens": result.ids}
        await response.send_json(200, {**answer, "token_strs": result.token_strings})

    async def detokenize(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /detokenize body; a RequestHandler."""
        await response.send_json(200, {"prompt": await self.text(parse_detokenize(body), context)})

    async def tokens(self, body: TokenizeBody, context: RequestContext) -> TokenizeResult:
        """Returns the tokens of a text or a chat. Raises InvalidRequest."""
        model = self._model(context, body.model)
        if body.messages is None:
            assert body.prompt is not None, "a body has a prompt or messages"
            text, special = body.prompt, body.add_special_tokens is not False
        else:
            text = await model.chat_format.render(body.messages, body.template_kwargs, body.tools)
            special = body.add_special_tokens or False
        # Only one long text at a time, so that prompts of other requests find a free thread.
        async with self._long_texts if len(text) > LONG_CHARS else nullcontext():
            tokens = await model.tokenizer.encode_async(text, add_special_tokens=special)
        context.timeline.mark("tokenized", prompt_tokens=len(tokens))
        strings = await model.tokenizer.token_strings_async(tokens) if body.return_token_strings else None
        return TokenizeResult(tokens, _max_model_len(model), strings)

    async def text(self, body: DetokenizeBody, context: RequestContext) -> str:
        """Returns the text of token ids. Raises InvalidRequest."""
        ids, tokenizer = list(body.tokens), self._model(context, body.model).tokenizer
        if ids and max(ids) >= tokenizer.vocab_size:
            text = f"tokens has {max(ids)}, but the vocabulary has {tokenizer.vocab_size} tokens"
            raise InvalidRequest(text, field="tokens")
        return await tokenizer.decode_async(ids)

    def _model(self, context: RequestContext, name: str | None) -> ServedModel:
        """Returns the named model; without a name, the only one."""
        models = self._gateway.models
        if name is None and len(models) > 1:
            raise InvalidRequest("model is missing", field="model")
        return self._gateway.model_for(context.caller, models.first.name if name is None else name)


def _max_model_len(model: ServedModel) -> int | None:
    return model.limits().max_model_len if model.pod_table.ready else None
