"""/v1/load_lora_adapter and /v1/unload_lora_adapter: names of LoRA adapters, in vLLM's form. For administrators."""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest
from common.types import AdapterEntry
from gateway.api.http.endpoint import HttpResponse
from gateway.api.openai.fields import RequestModel, param, validated
from gateway.serving.adapters import load_adapter, unload_adapter
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel
from gateway.serving.request import RequestContext


class UnloadAdapterRequest(RequestModel):
    """A body of /v1/unload_lora_adapter."""

    lora_name: str = param("Name of the adapter.", ..., min_length=1, max_length=128)
    base_model_name: str | None = param(
        "Name of the base model; needed if the gateway serves several.", min_length=1, max_length=1024
    )


class LoadAdapterRequest(UnloadAdapterRequest):
    """A body of /v1/load_lora_adapter."""

    lora_path: str = param("Folder of the adapter, below the pods' --adapter-dir.", ..., min_length=1, max_length=1024)


class AdapterHandler:
    """Answers both endpoints for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def load(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /v1/load_lora_adapter body; a RequestHandler."""
        r = validated(LoadAdapterRequest, body)
        model = self._model(context, r.base_model_name)
        if r.lora_name in self._gateway.models.by_name:
            raise InvalidRequest(f"lora_name is {r.lora_name!r}, the name of a model", field="lora_name")
        entry = await load_adapter(model, r.lora_name, r.lora_path)
        await response.send_json(200, adapter_json(entry, model))

    async def unload(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one /v1/unload_lora_adapter body; a RequestHandler."""
        r = validated(UnloadAdapterRequest, body)
        model = self._model(context, r.base_model_name)
        entry = await unload_adapter(model, r.lora_name)
        await response.send_json(200, {**adapter_json(entry, model), "deleted": True})

    def _model(self, context: RequestContext, name: str | None) -> ServedModel:
        models = list(self._gateway.models)
        if name is None and len(models) > 1:
            raise InvalidRequest(
                "base_model_name is missing: the gateway serves several models", field="base_model_name"
            )
        return self._gateway.model_for(context.caller, models[0].name if name is None else name)


def adapter_json(entry: AdapterEntry, model: ServedModel) -> dict[str, Any]:
    """Returns an adapter for clients."""
    shown = {"id": entry.name, "object": "adapter", "parent": model.name, "root": entry.path}
    return {**shown, "digest": entry.digest, "rank": entry.rank}
