"""/tokenize and /detokenize, in the shapes of vLLM: what the model's tokenizer and chat template make of a text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from gateway.fields import Fields, wrong_type
from gateway.http_endpoint import Response
from gateway.models import ServedModel
from gateway.service import Gateway, Ticket
from gateway.tokenizer import INLINE_CHARS
from gateway.validation import parse_messages, parse_token_ids, refuse_unserved

MAX_IDS = 1 << 20

_INERT: dict[str, tuple[object, ...]] = {
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "tools": ([],),
}


class Tokenize:
    """Answers both; needs no pods, which only know max_model_len (null while there are none)."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, body: Any, response: Response, ticket: Ticket) -> None:
        """See http_endpoint.Endpoint."""
        fields = Fields.of_body(body)
        refuse_unserved(fields, _INERT)
        model = self._model(fields)
        wanted = fields.boolean("add_special_tokens")
        strings = fields.boolean("return_token_strs") or False
        kwargs = fields.mapping("chat_template_kwargs") or {}
        messages, prompt = fields.raw("messages"), fields.raw("prompt")
        if (messages is None) == (prompt is None):
            raise InvalidRequest("either prompt or messages must be given", field="prompt")
        if messages is not None:
            text = model.template.render(parse_messages(messages), kwargs)
            special = wanted or False
        elif isinstance(prompt, str):
            text, special = prompt, wanted is not False
        else:
            raise wrong_type("prompt", "a string", prompt)
        tokens = await model.tokenizer.encode_async(text, add_special_tokens=special)
        ticket.timeline.mark("tokenized", prompt_tokens=len(tokens))
        answer = {"count": len(tokens), "max_model_len": _max_model_len(model), "tokens": tokens}
        await response.json(200, {**answer, "token_strs": _strings(model, tokens) if strings else None})

    async def detokenize(self, body: Any, response: Response, ticket: Ticket) -> None:
        """See http_endpoint.Endpoint."""
        fields = Fields.of_body(body)
        tokenizer = self._model(fields).tokenizer
        values = fields.raw("tokens")
        if not isinstance(values, list):
            raise wrong_type("tokens", "an array of token ids", values)
        if len(values) > MAX_IDS:
            raise InvalidRequest(f"tokens may have at most {MAX_IDS} entries", field="tokens")
        ids = parse_token_ids(values, "tokens")
        if ids and max(ids) >= tokenizer.vocab_size:
            text = f"tokens has {max(ids)}, but the vocabulary has {tokenizer.vocab_size} tokens"
            raise InvalidRequest(text, field="tokens")
        raw = tokenizer.raw
        if len(ids) > INLINE_CHARS:
            text = await asyncio.to_thread(raw.decode, list(ids), skip_special_tokens=False)
        else:
            text = raw.decode(list(ids), skip_special_tokens=False)
        await response.json(200, {"prompt": text})

    def _model(self, fields: Fields) -> ServedModel:
        """The named one; there is no need to name the only one."""
        models = self._gateway.models
        name = fields.string("model", 1024)
        if name is None and len(models) > 1:
            raise InvalidRequest("model is missing", field="model")
        return models.first if name is None else models.find(name)


def _strings(model: ServedModel, tokens: Sequence[int]) -> list[str]:
    return [model.tokenizer.raw.id_to_token(token) for token in tokens]


def _max_model_len(model: ServedModel) -> int | None:
    return model.limits().max_model_len if model.table.ready else None
