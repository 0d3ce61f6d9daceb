"""/tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import model_validator

from common.errors import InvalidRequest
from gateway.admission.api_keys import Caller
from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json import Json
from gateway.api.openai.conversation import (
    Messages,
    TemplateVariables,
    Tools,
    chat_messages,
    declared_functions,
    template_variables,
)
from gateway.api.openai.fields import MAX_IDS, Only, Refused, RequestModel, TokenIds, param, validated
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel
from gateway.serving.request import RequestContext


class TokenizeRequest(RequestModel):
    """A body of /tokenize."""

    model: str | None = param("Name of a served model, see /v1/models.", max_length=1024)
    prompt: str | None = param("A text; either this or messages.")
    messages: Messages | None = param("A conversation, as in a chat; either this or prompt.")
    add_special_tokens: bool | None = param("Adds what the tokenizer puts around a text.", words="true for a prompt")
    return_token_strs: bool = param("Also returns each token's text in the vocabulary.", False)
    chat_template_kwargs: TemplateVariables | None = param("Variables for the chat template.")
    continue_final_message: Annotated[Any, Only(False)] = param("Goes on with the last message.")
    add_generation_prompt: Annotated[Any, Only(True)] = param("The template's start of an answer.")
    tools: Tools = param("Functions that the model may call.", [])
    chat_template: Refused = param("A template of the client's own.")
    mm_processor_kwargs: Refused = param("Images and the like.")

    @model_validator(mode="before")
    @classmethod
    def _require_one(cls, body: Any) -> Any:
        if isinstance(body, dict) and (body.get("prompt") is None) == (body.get("messages") is None):
            raise InvalidRequest("either prompt or messages must be given", field="prompt")
        return body


class DetokenizeRequest(RequestModel):
    """A body of /detokenize."""

    model: str | None = param("Name of a served model, see /v1/models.", max_length=1024)
    tokens: TokenIds = param("Token ids.", ..., max_length=MAX_IDS)


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """The tokens of a text."""

    ids: list[int]
    max_model_len: int | None  #: The model's context length, None while it has no pods.
    token_strings: list[str] | None  #: The vocabulary's entries, None if the client did not ask for them.


class TokenizeHandler:
    """Answers both endpoints, for REST and gRPC. Only max_model_len needs pods."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /tokenize body; a RequestHandler."""
        result = await self.tokens(body, context)
        answer = {"count": len(result.ids), "max_model_len": result.max_model_len, "tokens": result.ids}
        await response.send_json(200, {**answer, "token_strs": result.token_strings})

    async def detokenize(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /detokenize body; a RequestHandler."""
        await response.send_json(200, {"prompt": await self.text(body, context)})

    async def tokens(self, body: object, context: RequestContext) -> TokenizeResult:
        """Returns the tokens of a text or a chat. Raises InvalidRequest."""
        r = validated(TokenizeRequest, body)
        declared_functions([tool["function"] for tool in r.tools], "tools", ".function")  # checks them
        messages = () if r.messages is None else chat_messages(r.messages)
        model = self._model(context.caller, r.model)
        if r.prompt is not None:
            text, special = r.prompt, r.add_special_tokens is not False
            encode = partial(model.tokenizer.encode_async, text, add_special_tokens=special)
        else:
            variables = template_variables(r.chat_template_kwargs)
            chat = await model.chat_format.render(messages, variables, tuple({**tool} for tool in r.tools))
            text, special = chat.text, r.add_special_tokens or False
            encode = partial(model.tokenizer.encode_chat, chat, add_special_tokens=special)
        async with model.tokenizer.turn(text):
            tokens = await encode()
        context.timeline.mark("tokenized", prompt_tokens=len(tokens))
        strings = await model.tokenizer.token_strings_async(tokens) if r.return_token_strs else None
        max_model_len = model.pod_table.limits().max_model_len if model.pod_table.ready else None
        return TokenizeResult(tokens, max_model_len, strings)

    async def text(self, body: object, context: RequestContext) -> str:
        """Returns the text of token ids. Raises InvalidRequest."""
        r = validated(DetokenizeRequest, body)
        ids, tokenizer = list(r.tokens), self._model(context.caller, r.model).tokenizer
        if ids and max(ids) >= tokenizer.vocab_size:
            text = f"tokens has {max(ids)}, but the vocabulary has {tokenizer.vocab_size} tokens"
            raise InvalidRequest(text, field="tokens")
        return await tokenizer.decode_async(ids)

    def info(self, caller: Caller, name: str | None) -> Json:
        """Answers GET /tokenizer_info: tokenizer_config.json, with special tokens as texts, and the chat template.

        Raises InvalidRequest.
        """
        model = self._model(caller, name)
        tokenizer = model.tokenizer
        shown = {key: _plain(value) for key, value in tokenizer.config.items()}
        shown.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if not shown.get("eos_token") and tokenizer.eos_ids:
            shown["eos_token"] = tokenizer.raw.id_to_token(tokenizer.eos_ids[0])
        return {**shown, "chat_template": model.chat_format.template_source or None}

    def _model(self, caller: Caller, name: str | None) -> ServedModel:
        """Returns the named model; without a name, the only one."""
        models = list(self._gateway.models)
        if name is None and len(models) > 1:
            raise InvalidRequest("model is missing", field="model")
        return self._gateway.model_for(caller, models[0].name if name is None else name)


def _plain(value: Any) -> Any:
    """Returns a value of tokenizer_config.json with the text in place of each token that is written as an object.

    An integer of more than 64 bits, which stands for no limit, becomes a floating-point number.
    """
    if isinstance(value, dict):
        text = value.get("content")
        return text if isinstance(text, str) else {key: _plain(item) for key, item in value.items()}
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return float(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value
