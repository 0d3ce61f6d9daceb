"""Admission of pods, isolation of one failing request, token streams, deadlines."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import (
    AdapterNotLoaded,
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ModelNotFound,
    Overloaded,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from common.grammar.compiler import GrammarCompiler, from_regex
from common.pb import decode_pb2, prefill_pb2, types_pb2
from common.rpc import open_channel, translate_rpc_errors
from common.types import FinishReason, Grammar, Role, Token, ValidRequest
from common.wire import request_to_pb, token_to_pb
from engine.llm import LLM
from prefill_service.hand_off import PrefillHandOff
from tests.rigs.engine.grammar_shapes import BOMBS
from tests.rigs.pods.harness import MAX_LEN, VOCAB, Answer, Cluster, expected, gateway_client, prompt_of, request
from tests.rigs.waiting import until


class TestAdmission:
    @pytest.mark.parametrize(
        ("fields", "error", "field"),
        [
            ({"prompt": prompt_of(MAX_LEN)}, InvalidRequest, "prompt_ids"),
            ({"prompt": [VOCAB]}, InvalidRequest, "prompt_ids"),
            ({"temperature": float("nan")}, InvalidRequest, "temperature"),
            ({"top_p": 0.0}, InvalidRequest, "top_p"),
            ({"n": 129}, InvalidRequest, "n"),
            ({"logit_bias": ((999, 1.0),)}, InvalidRequest, "logit_bias"),
        ],
    )
    async def test_an_impossible_request_is_refused_by_both_roles(
        self, model_dir: Path, fields: dict[str, object], error: type[BatonError], field: str
    ) -> None:
        async with Cluster.start(model_dir) as cluster:
            held = request(prompt_of(9))
            good = await cluster.reserve(held)
            r = request(**{"prompt": prompt_of(9), **fields})  # type: ignore[arg-type]
            with pytest.raises(error) as caught:
                await cluster.reserve(r)
            assert caught.value.field == field
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r), target=good.target)
            with pytest.raises(error) as caught, translate_rpc_errors():
                async for _ in cluster.prefill.prefill.Prefill(message, timeout=30):
                    pass
            assert caught.value.field == field
            await cluster.abort(held.request_id)

    async def test_an_adapter_that_a_pod_lacks_is_refused_at_once(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = replace(request(prompt_of(9)), adapter="0" * 32)
            for remote_only in (False, True):
                with pytest.raises(AdapterNotLoaded) as caught:
                    await cluster.reserve(r, remote_only=remote_only)
                assert caught.value.field == "adapter"
            assert cluster.decode.runtime.engine.pool.counts().leased == 0
            with pytest.raises(AdapterNotLoaded) as caught, translate_rpc_errors():
                await cluster.prefill.prefill.Prefill(
                    prefill_pb2.PrefillRequest(request=request_to_pb(r)), timeout=30
                ).read()
            assert caught.value.field == "adapter"

    @pytest.mark.parametrize("name", ["properties", "rules", "terminals in brackets", "conditions"])
    async def test_a_grammar_that_would_overflow_the_stack_is_refused_by_both_roles(
        self, model_dir: Path, name: str
    ) -> None:
        """From any peer, whether or not a gateway has checked it."""
        make, count = BOMBS[name]
        async with Cluster.start(model_dir) as cluster:
            held = request(prompt_of(9))
            good = await cluster.reserve(held)
            r = replace(request(prompt_of(9)), grammar=Grammar(make(count), "guided_grammar"))
            with pytest.raises(InvalidRequest, match=r"guided_grammar has .*; at most") as caught:
                await cluster.reserve(r)
            assert caught.value.field == "guided_grammar"
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r), target=good.target)
            with pytest.raises(InvalidRequest, match=r"guided_grammar has .*; at most"), translate_rpc_errors():
                await cluster.prefill.prefill.Prefill(message, timeout=30).read()
            await cluster.abort(held.request_id)
            assert len((await cluster.generate(request(prompt_of(9)))).ids) == 8

    async def test_no_grammar_of_a_stranger_is_proven_or_compiled(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []
        monkeypatch.setattr("pod.grammars.prover_of", lambda *args: asked.append(args))
        monkeypatch.setattr(GrammarCompiler, "compile", lambda *args, **_: asked.append(args))
        grammar = from_regex("[a-z]{4}", field="f")
        async with Cluster.start(model_dir) as cluster:
            r = request_to_pb(replace(request(prompt_of(9)), grammar=grammar))
            for pod, method, message in (
                (cluster.decode, "Decode/Reserve", decode_pb2.ReserveRequest(request=r, gateway_id="x")),
                (cluster.prefill, "Prefill/Prefill", prefill_pb2.PrefillRequest(request=r)),
            ):
                async with open_channel(pod.runtime.address) as channel:
                    call = channel.unary_stream(f"/baton.v1.{method}")(message.SerializeToString(), timeout=30)
                    with pytest.raises(Unauthenticated), translate_rpc_errors():
                        await call.read()
        assert asked == []

    async def test_a_grammar_that_takes_too_long_is_refused_and_the_pod_goes_on(
        self, model_dir: Path, smollm2_dir: Path, tmp_path: Path
    ) -> None:
        """Within the limits of shape; without a proof it holds a thread of the pod for 12 s and 1.7 GB."""
        model_dir = Path(shutil.copytree(model_dir, tmp_path / "model"))
        shutil.copy(smollm2_dir / "tokenizer.json", model_dir)  # the model's own one has no words
        bomb = Grammar(from_regex("a?" * 26_000, field="guided_regex").text, "guided_regex")
        async with Cluster.start(model_dir) as cluster:
            with pytest.raises((InvalidRequest, Overloaded), match=r"guided_regex is too costly|in time") as caught:
                await cluster.reserve(replace(request(prompt_of(9)), grammar=bomb))
            # Beside other work the time may run out before the bomb had much of it on a processor.
            assert isinstance(caught.value, Overloaded) or caught.value.field == "guided_regex"
            assert len((await cluster.generate(request(prompt_of(9)))).ids) == 8

    async def test_unknown_model_and_foreign_layout(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(9))
            with pytest.raises(ModelNotFound):
                await cluster.reserve(ValidRequest(r.request_id, "other", r.prompt_ids, r.sampling))
            good = await cluster.reserve(r)
            good.target.fingerprint = "0" * 32
            message = prefill_pb2.PrefillRequest(request=request_to_pb(r), target=good.target)
            with pytest.raises(LayoutMismatch), translate_rpc_errors():
                await cluster.prefill.prefill.Prefill(message, timeout=30).read()
            await cluster.abort(r.request_id)

    async def test_a_full_pod_rejects_at_once_with_a_retry_time(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir, decode_config={"num_blocks": 24}) as cluster:
            held = [request(prompt_of(30, seed=i)) for i in range(2)]
            for r in held:
                assert (await cluster.reserve(r)).HasField("target")
            reply = await cluster.reserve(request(prompt_of(30, seed=9)))
            assert reply.HasField("rejected")
            assert reply.rejected.retry_after_s > 0
            for r in held:
                await cluster.abort(r.request_id)

    async def test_local_prompts_do_not_starve_behind_remote_ones(self, model_dir: Path) -> None:
        config = {"num_blocks": 10}  # `big` leaves one block: enough for `small` only
        async with Cluster.start(model_dir, role=Role.BOTH, decode_config=config) as cluster:
            big, local, small = request(prompt_of(36), 1), request(prompt_of(8), 4), request(prompt_of(3), 1)
            assert (await cluster.reserve(big, remote_only=True)).HasField("target")
            scheduler = cluster.decode.runtime.engine.scheduler
            waiting = asyncio.create_task(cluster.generate(local))
            await until(lambda: scheduler.stats().waiting == 1)
            reply = await cluster.reserve(small, remote_only=True)
            assert "earlier requests" in reply.rejected.reason
            await cluster.abort(big.request_id)
            assert len((await waiting).ids) == 4
            assert len((await cluster.generate(small, remote_only=True)).ids) == 1

    async def test_a_reservation_that_the_transfer_node_refuses_holds_no_blocks(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse() -> None:
            raise Unavailable("the node is leaving")

        async with Cluster.start(model_dir) as cluster:
            monkeypatch.setattr(cluster.decode.runtime.transfer_node, "_require_running", refuse)
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(30)))
            await cluster.decode.settled()

    async def test_a_request_id_is_accepted_once(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(9))
            await cluster.reserve(r)
            with pytest.raises(InvalidRequest, match="already"):
                await cluster.reserve(r)
            await cluster.abort(r.request_id)
            await cluster.decode.settled()
            assert (await cluster.generate(r)).finish is FinishReason.LENGTH

    async def test_reserve_needs_the_gateways_stream(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            message = decode_pb2.ReserveRequest(request=request_to_pb(request([5])), gateway_id="nobody")
            async with gateway_client(cluster.decode.runtime, "nobody") as nobody:
                with pytest.raises(Unavailable), translate_rpc_errors():
                    await nobody.decode.Reserve(message, timeout=30)


class TestIsolation:
    """A request with an output that cannot be handled ends; the others of the same step go on."""

    async def test_in_a_prefill_step(self, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Cluster.start(model_dir) as cluster:
            first, victim, last = (request(prompt_of(5, seed=i)) for i in range(3))
            push = PrefillHandOff._push

            def broken(self: PrefillHandOff, computed: int, done: bool) -> None:
                if self.seq.request_id == victim.request_id:
                    raise RuntimeError("no push today")
                push(self, computed, done)

            monkeypatch.setattr(PrefillHandOff, "_push", broken)
            gate = threading.Event()
            cluster.prefill.runtime.engine_loop.call(lambda: gate.wait(60))
            running = [asyncio.create_task(cluster.generate(r)) for r in (first, victim, last)]
            await until(lambda: len(cluster.prefill.service.requests) == 3)
            gate.set()
            a, failed, b = await asyncio.gather(*running, return_exceptions=True)
            assert isinstance(failed, InternalError)
            assert "no push today" in failed.message
            await cluster.abort(victim.request_id)
            for r, answer in ((first, a), (last, b)):
                assert isinstance(answer, Answer)
                assert answer.ids == expected(llm, r)

    @pytest.mark.parametrize("at", [1, 7])
    async def test_in_a_decode_step(self, model_dir: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        """at: index of the token that cannot be encoded; 7 is the last one."""
        async with Cluster.start(model_dir) as cluster:
            first, victim, last = (request(prompt_of(5, seed=i)) for i in range(3))

            def broken(token: Token) -> types_pb2.Token:
                if token.index == at and token.id == spoiled[at]:
                    raise RuntimeError("no such token")
                return token_to_pb(token)

            spoiled = expected(llm, victim)
            assert spoiled[at] not in (expected(llm, first)[at], expected(llm, last)[at]), "choose other prompts"
            monkeypatch.setattr("decode_service.hand_off.token_to_pb", broken)
            a, failed, b = await asyncio.gather(
                *(cluster.generate(r) for r in (first, victim, last)), return_exceptions=True
            )
            assert isinstance(failed, InternalError)
            for r, answer in ((first, a), (last, b)):
                assert isinstance(answer, Answer)
                assert answer.ids == expected(llm, r)


class TestStreams:
    async def test_batches_are_numbered_and_a_slow_gateway_is_paused_not_dropped(
        self, model_dir: Path, llm: LLM
    ) -> None:
        async with Cluster.start(model_dir, decode_config={"stream": {"window": 8}}) as cluster:
            stream = cluster.streams[0]
            stream.stalled = True
            r = request(prompt_of(9), 60)
            running = asyncio.create_task(cluster.generate(r))
            await until(lambda: len(stream.numbers) >= 8)
            await asyncio.wait([running], timeout=0.5)
            assert not running.done()
            assert len(stream.numbers) < 20
            with pytest.raises(Unavailable):
                await cluster.reserve(request(prompt_of(5)))
            await stream.catch_up()
            assert (await running).ids == expected(llm, r)
            assert stream.numbers == list(range(1, len(stream.numbers) + 1))

    async def test_a_gateway_that_stays_slow_loses_its_sequences_after_a_while(self, model_dir: Path) -> None:
        slow = {"stream": {"window": 4, "pause_limit_s": 0.2}}
        async with Cluster.start(model_dir, decode_config=slow) as cluster:
            cluster.streams[0].stalled = True
            with pytest.raises(Overloaded):
                await cluster.generate(request(prompt_of(9), 60))

    async def test_the_end_of_the_stream_ends_its_requests(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            await cluster.reserve(request(prompt_of(9)))
            running = asyncio.create_task(cluster.generate(request(prompt_of(9, seed=2), 100)))
            await until(lambda: len(cluster.decode.service.requests) == 2)
            await cluster.streams[0].close()
            await cluster.decode.settled()
            running.cancel()

    async def test_deadlines_end_requests_on_both_roles(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir) as cluster:
            r = request(prompt_of(9))
            await cluster.generate(r)
            cluster.fabric.freeze(cluster.decode.agent)
            with pytest.raises((DeadlineExceeded, TransferFailed)):
                await cluster.generate(request(prompt_of(40), 80), timeout_s=3.0)
            cluster.fabric.thaw(cluster.decode.agent)
