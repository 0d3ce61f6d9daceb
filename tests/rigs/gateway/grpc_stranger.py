"""A gRPC client that knows nothing of Baton but proto/ (`stubs DIR`), or only what the server's reflection tells.

Prints one JSON object: what it was told. Run by test_grpc_strangers.py in a process of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class ByStubs:
    """Code that protoc made of proto/ alone."""

    def __init__(self, channel: grpc.Channel, directory: str) -> None:
        sys.path.insert(0, directory)
        from baton.v1 import inference_pb2, inference_pb2_grpc  # type: ignore[import-not-found]
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        self._messages = inference_pb2
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel), health_pb2

    def message(self, name: str, **fields: Any) -> Any:
        return getattr(self._messages, name)(**fields)

    def call(self, method: str, request: Any, **options: Any) -> Any:
        return getattr(self._stub, method)(request, **options)

    def healthy(self) -> bool:
        stub, pb = self._health
        return bool(stub.Check(pb.HealthCheckRequest(service="baton.v1.Inference")).status == 1)


class ByReflection:
    """Messages and methods as the server describes them."""

    def __init__(self, channel: grpc.Channel) -> None:
        from google.protobuf.descriptor_pool import DescriptorPool
        from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= set(database.get_services())
        self._channel = channel
        self._pool = DescriptorPool(database)
        self._service = self._pool.FindServiceByName("baton.v1.Inference")

    def _class(self, name: str) -> Any:
        from google.protobuf.message_factory import GetMessageClass

        return GetMessageClass(self._pool.FindMessageTypeByName(name))

    def message(self, name: str, **fields: Any) -> Any:
        return self._class(f"baton.v1.{name}")(**fields)

    def call(self, method: str, request: Any, **options: Any) -> Any:
        return self._invoke(self._service.FindMethodByName(method), request, **options)

    def _invoke(self, method: Any, request: Any, **options: Any) -> Any:
        path = f"/{method.containing_service.full_name}/{method.name}"
        kind = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        answer = self._class(method.output_type.full_name)
        stub = kind(path, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString)
        return stub(request, **options)

    def healthy(self) -> bool:
        method = self._pool.FindServiceByName("grpc.health.v1.Health").FindMethodByName("Check")
        request = self._class("grpc.health.v1.HealthCheckRequest")(service="baton.v1.Inference")
        return bool(self._invoke(method, request).status == 1)


def generated(client: Any, **fields: Any) -> dict[str, Any]:
    """What a request brings: its answer, or its error."""
    options = {"timeout": fields.pop("timeout")} if "timeout" in fields else {}
    try:
        got = list(client.call("Generate", client.message("GenerateRequest", **fields), **options))
    except grpc.RpcError as e:
        return error(e)
    return {
        "text": "".join(m.text for m in got),
        "tokens": [t.id for m in got for t in m.tokens],
        "finish": got[-1].finish_reason,
        "usage": [got[-1].usage.prompt_tokens, got[-1].usage.completion_tokens],
    }


def error(e: Any) -> dict[str, Any]:
    """A status with its details."""
    told: dict[str, Any] = {"code": e.code().name, "message": e.details()}
    status = rpc_status.from_call(e)
    for detail in status.details if status is not None else ():
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            told["reason"] = info.reason
        elif detail.Unpack(bad):
            told["field"] = bad.field_violations[0].field
        elif detail.Unpack(retry):
            told["retry_s"] = retry.retry_delay.ToTimedelta().total_seconds()
    return told


def main() -> None:
    address, model, how, *directory = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        client: Any = ByStubs(channel, directory[0]) if how == "stubs" else ByReflection(channel)
        chat = client.message("ChatPrompt", messages=[client.message("ChatMessage", role="user", content="Hello")])
        tokens = client.message("TokenPrompt", ids=[1, 2, 3])
        ids = client.call("Tokenize", client.message("TokenizeRequest", text="Hello there")).ids
        ask = {"model": model, "temperature": 0, "max_tokens": 6}
        print(
            json.dumps(
                {
                    "healthy": client.healthy(),
                    "models": [
                        [m.id, m.root, m.max_model_len, m.vocab_size]
                        for m in client.call("ListModels", client.message("ListModelsRequest")).models
                    ],
                    "text": generated(client, text="Hello", **ask),
                    "chat": generated(client, chat=chat, **ask),
                    "token_ids": generated(client, tokens=tokens, **ask),
                    "ids": list(ids),
                    "chat_ids": list(client.call("Tokenize", client.message("TokenizeRequest", chat=chat)).ids),
                    "back": client.call("Detokenize", client.message("DetokenizeRequest", ids=ids)).text,
                    "bad_field": generated(client, text="Hello", model=model, temperature=9),
                    "no_model": generated(client, text="Hello", model="other"),
                    "full": generated(client, text="full", model=model, max_tokens=3),
                    "late": generated(client, text="slow", model=model, max_tokens=40, timeout=1.0),
                }
            )
        )


if __name__ == "__main__":
    main()
