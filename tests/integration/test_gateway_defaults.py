"""The model's own defaults and the chat template settings at a gateway: what requests to the pods become."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.settings.gateway import GatewayConfig
from common.types import SamplingParams
from gateway.server import make_gateway
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster

OWN = {"temperature": 0.25, "top_p": 0.5, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.25, "max_new_tokens": 7}
USER = [{"role": "user", "content": "x"}]


@pytest.fixture
def model_dir(smollm2_dir: Path, tmp_path: Path) -> Path:
    """SmolLM2's tokenizer with a generation_config.json of its own, and end tokens that differ between files."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    config = json.loads((smollm2_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({**OWN, "eos_token_id": [5, 0]}))
    return tmp_path


@pytest.fixture
async def gw(cluster: FakeCluster, model_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, model_dir) as running:
        yield running


def asked(gw: Rig) -> SamplingParams:
    return gw.cluster.prefills[0].seen.prefilled[-1].sampling


async def post(gw: Rig, path: str, **fields: Any) -> SamplingParams:
    answered = await gw.http.post(path, json={"model": MODEL, **fields})
    assert answered.status_code == 200, answered.text
    return asked(gw)


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_request_without_parameters_has_the_models(gw: Rig, path: str, body: dict[str, Any]) -> None:
    got = await post(gw, path, **body)
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.25, 0.5, 20, 0.125)
    assert got.repetition_penalty == 1.25
    assert got.stop_token_ids == (5, 0, 2)
    assert got.max_tokens == (16 if path == "/v1/completions" else 7)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_field_of_the_request_wins_even_with_openais_default(gw: Rig, path: str, body: dict[str, Any]) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    got = await post(gw, path, **body, temperature=1, top_p=1.0, top_k=None, **{limit: 3})
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (1.0, 1.0, 20, 0.125)  # null counts as absent
    assert got.max_tokens == 3


async def test_beam_search_has_no_default_that_it_could_not_have(gw: Rig) -> None:
    got = await post(gw, "/v1/completions", prompt="x", use_beam_search=True, n=2, max_tokens=2)
    assert got.repetition_penalty == 1.0


async def test_the_model_card_shows_the_defaults_in_effect(gw: Rig, cluster: FakeCluster, model_dir: Path) -> None:
    card = (await gw.http.get("/v1/models")).json()["data"][0]
    own = {name: value for name, value in OWN.items() if name != "max_new_tokens"}
    assert card["generation_defaults"] == {**own, "max_tokens": 7}
    async with rig(cluster, model_dir, generation_config="none") as plain:
        assert "generation_defaults" not in (await plain.http.get("/v1/models")).json()["data"][0]
        got = await post(plain, "/v1/chat/completions", messages=USER)
        assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
        assert got.max_tokens > 7
        assert got.stop_token_ids == (5, 0, 2)  # the end tokens belong to the model, whatever its defaults are


async def test_a_template_file_and_default_variables(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own {{ a }} {{ b }} {{ messages[0].content }}")
    settings = {"chat_template": str(file), "default_chat_template_kwargs": '{"a": 1, "b": [true]}'}
    names = {"models": (), "model": str(smollm2_dir), "served_name": MODEL}
    async with rig(cluster, smollm2_dir, **names, **settings) as gw:
        for fields, expected in (({}, "own 1 [True] x"), ({"chat_template_kwargs": {"a": 2}}, "own 2 [True] x")):
            body = {"model": MODEL, "messages": USER, **fields}
            tokens = (await gw.http.post("/tokenize", json=body)).json()["tokens"]
            assert gw.gateway.tokenizer.decode(tokens) == expected


async def test_what_a_template_raises_is_a_400_on_every_route(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("a\n{{ 10 // (messages | length - 1) }}{{ messages[-1].content }}")
    names = {"models": (), "model": str(smollm2_dir), "served_name": MODEL}
    said = (
        "cannot render these messages (line 2 of the template): ZeroDivisionError: integer division or modulo by zero"
    )
    async with rig(cluster, smollm2_dir, **names, chat_template=str(file)) as gw:
        for path, body in (*ROUTES, ("/tokenize", {"messages": USER})):
            if path != "/v1/completions":
                answered = await gw.http.post(path, json={"model": MODEL, **body})
                assert answered.status_code == 400
                assert said in answered.json()["error"]["message"]


def test_settings_of_the_template_are_checked_at_the_start(smollm2_dir: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"pods": ("127.0.0.1:1",), "model": str(smollm2_dir)}
    with pytest.raises(ConfigError, match=r"chat_template: cannot read .*none\.jinja"):
        make_gateway(GatewayConfig(**fields, chat_template=str(tmp_path / "none.jinja")))
    with pytest.raises(ConfigError, match="chat_template: not allowed together with models"):
        GatewayConfig(pods=("127.0.0.1:1",), models=(f"a={smollm2_dir}",), chat_template="x.jinja")
    for wrong in ("[1]", "{", "x", '{"a": ' * 100_000):
        with pytest.raises(ConfigError, match=r"default_chat_template_kwargs: .*expected a JSON object"):
            GatewayConfig(**fields, default_chat_template_kwargs=wrong)
