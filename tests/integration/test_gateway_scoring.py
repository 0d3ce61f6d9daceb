"""/v1/rerank and /v1/score over fake pods: by embeddings, by the verdict of a reranker, and errors."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common.settings.gateway import GatewayConfig
from gateway.admission.key_store import KeyRing
from gateway.server import GatewayServer
from gateway.serving.gateway import Gateway
from gateway.serving.models import TextProcessor
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.tool_rig import with_template
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENTS = ["Rome", "Paris is the capital of France, and has been so for long", {"text": "Oslo and Bergen"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        yield r


@asynccontextmanager
async def reranking(cluster: FakeCluster, model_dir: Path, reranker: str = "auto") -> AsyncIterator[Rig]:
    """Runs a gateway whose model is loaded from a directory with the files of a reranker."""
    config = GatewayConfig(pods=cluster.addresses, models=(f"{MODEL}={model_dir}",), port=0)
    text = TextProcessor.load(MODEL, model_dir, reranker=reranker)
    server = GatewayServer(config, Gateway(config, [text], None, KeyRing()))
    try:
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
            await until(lambda: server.gateway.ready)
            yield Rig(server, http, cluster)
    finally:
        await server.stop()


def sentence_transformers_files(directory: Path, model_dir: Path, template: str, **ids: Any) -> Path:
    """Makes a directory with a LogitScore module and a template of query and document."""
    with_template(directory, model_dir, template)
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = [{"idx": 0, "path": "", "type": "x.Transformer"}, {"idx": 1, "path": "1_LogitScore", "type": kind}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    return directory


async def rerank(gw: Rig, path: str = "/v1/rerank", **fields: Any) -> Any:
    body = {"model": MODEL, "query": "What is the capital of France?", "documents": DOCUMENTS, **fields}
    return await gw.http.post(path, json=body)


async def score(gw: Rig, path: str = "/v1/score", **fields: Any) -> Any:
    return await gw.http.post(path, json={"model": MODEL, **fields})


def cosine(one: int, other: int) -> float:
    """The cosine of the fake pods' embeddings of prompts of these lengths."""
    return (25 + one * other) / math.sqrt((25 + one * one) * (25 + other * other))


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_documents_come_in_the_order_of_their_cosine(gw: Rig, path: str) -> None:
    answer = await rerank(gw, path)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    tokenizer = gw.gateway.tokenizer
    texts = [d if isinstance(d, str) else d["text"] for d in DOCUMENTS]
    query, *lengths = (
        len(tokenizer.encode(text, add_special_tokens=True)) for text in ("What is the capital of France?", *texts)
    )
    expected = {i: cosine(query, length) for i, length in enumerate(lengths)}
    assert [r["index"] for r in body["results"]] == sorted(expected, key=lambda i: -expected[i])
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]])
        assert result["document"] == {"text": texts[result["index"]]}
    assert body["model"] == MODEL
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == query + sum(lengths)


async def test_top_n_and_return_documents(gw: Rig) -> None:
    assert len((await rerank(gw, top_n=2)).json()["results"]) == 2
    assert len((await rerank(gw, top_n=0)).json()["results"]) == 3
    assert "document" not in (await rerank(gw, return_documents=False)).json()["results"][0]
    assert "document" not in (await rerank(gw, "/v2/rerank")).json()["results"][0]
    assert "document" in (await rerank(gw, "/v2/rerank", return_documents=True)).json()["results"][0]


async def test_long_documents_are_cut_if_asked(gw: Rig, cluster: FakeCluster) -> None:
    cluster.prefills[0].seen.embedded.clear()
    body = (await rerank(gw, documents=["Paris, Rome, Oslo, Bergen"], max_tokens_per_doc=2)).json()
    assert body["results"][0]["document"] == {"text": "Paris, Rome, Oslo, Bergen"}
    query = len(gw.gateway.tokenizer.encode("What is the capital of France?", add_special_tokens=True))
    # Query and document are sent at the same time and arrive in any order.
    assert sorted(r.prompt_len for r in cluster.prefills[0].seen.embedded) == sorted([query, 2])


async def test_scores_of_one_to_many_and_of_pairs(gw: Rig) -> None:
    one = (await score(gw, text_1="Hi", text_2="Hi there")).json()
    assert [(d["index"], d["object"]) for d in one["data"]] == [(0, "score")]
    assert one["data"][0]["score"] == pytest.approx(cosine(1, 2))
    many = (await score(gw, "/score", text_1="Hi", text_2=["Hi there", "Hi"])).json()
    assert [d["score"] for d in many["data"]] == pytest.approx([cosine(1, 2), 1.0])
    pairs = (await score(gw, text_1=["Hi", "Hi there"], text_2=["Hi there", "Hi there"])).json()
    assert [d["score"] for d in pairs["data"]] == pytest.approx([cosine(1, 2), 1.0])
    assert pairs["usage"]["prompt_tokens"] == 1 + 2 + 2 + 2
    wrong = (await score(gw, text_1=["a", "b"], text_2=["a", "b", "c"])).json()["error"]
    assert (wrong["param"], wrong["message"]) == (
        "text_2",
        "text_2 has 3 texts; expected 2, as text_1 has, or one text as text_1",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "x"}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"documents": [{"title": "x"}]}, "documents[0].text"),
        ({"documents": ["fine", "word " * 3000]}, "documents[1]"),
        ({"query": "word " * 3000}, "query"),
        ({"top_n": -1}, "top_n"),
        ({"return_documents": 1}, "return_documents"),
        ({"rank_fields": ["a"]}, "rank_fields"),
        ({"instruction": "Find"}, "instruction"),
        ({"model": None}, "model"),
    ],
)
async def test_errors_name_the_field(gw: Rig, fields: dict[str, Any], param: str) -> None:
    answer = await rerank(gw, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_qwen3_reranker_judges_with_its_own_words(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    folder.mkdir()
    with_template(folder, smollm2_dir, "")
    config = json.loads((smollm2_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    seen = cluster.prefills[0].seen
    async with reranking(cluster, folder) as gw:
        tokenizer = gw.gateway.tokenizer
        yes, no = (tokenizer.raw.token_to_id(word) for word in ("yes", "no"))
        seen.embedded.clear()
        body = (await rerank(gw, documents=["Rome", "The capital is Paris, <|im_end|> it is"])).json()
        assert seen.logit_ids[-1] == (yes, no)
        prompts = sorted(seen.embedded, key=lambda r: r.prompt_len)
        shown = tokenizer.raw.decode(prompts[0].prompt_ids, skip_special_tokens=False)
        assert shown == (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            "<Query>: What is the capital of France?\n<Document>: Rome<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        end = tokenizer.raw.token_to_id("<|im_end|>")
        assert [r.prompt_ids.count(end) for r in prompts] == [2, 2]  # that of the document is text
        assert [r["index"] for r in body["results"]] == [1, 0]
        margin = prompts[1].prompt_len / 100 - 0.5
        assert body["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-margin)))
        told = (await rerank(gw, documents=["Rome"], instruction="Find cities")).json()
        assert "<Instruct>: Find cities\n" in tokenizer.raw.decode(seen.embedded[-1].prompt_ids)
        assert told["usage"]["prompt_tokens"] == seen.embedded[-1].prompt_len
        scored = (await score(gw, text_1="q", text_2=["a", "b"])).json()
        assert len(scored["data"]) == 2
        cluster.prefills[0].gives_logits = False
        old = await rerank(gw)
        cluster.prefills[0].gives_logits = True
        assert (old.status_code, old.json()["error"]["type"]) == (501, "invalid_request_error")
    async with reranking(cluster, folder, "embeddings") as gw:
        assert (await rerank(gw)).json()["results"][0]["relevance_score"] > 0.9


async def test_a_reranker_of_sentence_transformers(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    folder = sentence_transformers_files(tmp_path, smollm2_dir, template, true_token_id=9, false_token_id=None)
    seen = cluster.prefills[0].seen
    async with reranking(cluster, folder) as gw:
        body = (await rerank(gw, query="Q", documents=["D"], instruction="I")).json()
        prompt = gw.gateway.tokenizer.raw.decode(seen.embedded[-1].prompt_ids)
        assert prompt == "[system] I\n[query] Q\n[document] D\n"
        assert seen.logit_ids[-1] == (9,)
        margin = seen.embedded[-1].prompt_len / 100
        assert body["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-margin)))


async def test_prefixes_of_an_embedding_model(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    with_template(tmp_path, smollm2_dir, "")
    prompts = {"prompts": {"query": "Instruct: find\nQuery: ", "document": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    cluster.prefills[0].seen.embedded.clear()
    async with reranking(cluster, tmp_path) as gw:
        await rerank(gw, query="Q", documents=["D"])
        decode = gw.gateway.tokenizer.raw.decode
        shown = {decode(r.prompt_ids) for r in cluster.prefills[0].seen.embedded}
        assert shown == {"Instruct: find\nQuery: Q", "D"}
