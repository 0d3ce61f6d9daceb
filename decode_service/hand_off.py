"""One request on a decode pod, from its reservation to its end.

    remote prefill: RESERVED --every block and the commit arrived--> RUNNING --last token--> ENDED
    local prefill:                                                   RUNNING --last token--> ENDED
    any state --abort, failure, deadline--> ENDED

The hand-off owns the reservation until the engine gets its sequences; then the engine owns the lease. The call that
moves the state to ENDED decides, under the lock, which end the gateway receives. Outputs and errors after it are
dropped. The hand-off is drained once the engine holds nothing for the request.

Each of a request's n sequences (children) ends by itself. The request ends with the last of them, or with an error of
any. After a remote prefill the sequences fork from the lease, which the last one keeps. Each has one of the spare
blocks behind the prompt.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import threading
import time
from collections import abc
from contextlib import ExitStack
from typing import Any

from common.block_hash import BlockHasher
from common.errors import BatonError, DeadlineExceeded, InternalError, TransferFailed
from common.grammar.compiler import CompiledGrammar
from common.kv_groups import PageOrder
from common.pb import decode_pb2, types_pb2
from common.tracing.tracer import TraceContext
from common.types import KvTarget, ValidRequest
from common.wire import error_to_pb, finish_reason_to_pb, prompt_logprobs_to_pb, token_to_pb
from decode_service.admission import Admitted
from decode_service.token_stream import TokenStream
from engine.kv.lease import Lease
from engine.schedule.outputs import SequenceOutput
from engine.schedule.sequence import Sequence
from kv_transfer.messages import Commit
from pod.runtime import PodRuntime

_log = logging.getLogger(__name__)


class HandOffState(enum.Enum):
    """State of the request on this pod."""

    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"


class DecodeHandOff:
    """One decode request, with a remote or a local prefill. Build it on the event loop and call `start` once.

    reservation: releases the lease. The hand-off takes it over, and closes it unless the engine gets the lease.
    """

    def __init__(
        self,
        pod: PodRuntime,
        request: ValidRequest,
        stream: TokenStream,
        admitted: Admitted,
        reservation: ExitStack,
        deadline_s: float,
        *,
        grammar: CompiledGrammar | None = None,
        caller_span: TraceContext | None = None,
    ) -> None:
        self.request = request
        self.stream = stream
        self.caller_span = caller_span  # The caller's span, if the request is traced
        self.seqs: tuple[Sequence, ...] = ()
        self.arrived_at = time.monotonic()
        self.reserved_at: float | None = None
        self.running_since: float | None = None
        self.local = admitted.decision.local  # This pod computes the prompt
        self._pod = pod
        self._lease = admitted.lease
        self._deadline_s = deadline_s
        self._hashes = admitted.hashes  # Hashes of the prompt's leading full blocks, as far as they are known
        self._grammar = grammar
        # A version that has lost its name is not forgotten while the hand-off needs it.
        self._adapter = pod.adapters.find(request.adapter) if request.adapter else None
        self._aio = asyncio.get_running_loop()
        self._timer = self._aio.call_later(deadline_s, self.fail, DeadlineExceeded("the request's deadline passed"))
        self._drained = asyncio.Event()
        self._lock = threading.RLock()
        self._state = HandOffState.RESERVED
        self._first_output = self.local  # The first output of a local prefill is still to come
        self._ended_children: set[int] = set()  # Children that have ended for the gateway
        self._in_engine = 0  # Children with a sequence in the engine
        self._reservation = reservation.pop_all()  # Ends what the reservation holds

    @property
    def num_sequences(self) -> int:
        """Children that have not ended."""
        return len(self.request.child_indices) - len(self._ended_children)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that this pod still computes for the request."""
        if self._state is not HandOffState.RUNNING:
            return 0
        length = self.request.context_len
        return sum(length - seq.computed for seq in self.seqs if seq.finish_reason is None and seq.computed < length)

    def start(self) -> KvTarget | None:
        """Gives a local prompt to the engine, or returns the blocks to which a prefill pod writes the KV."""
        self.reserved_at = time.monotonic()
        with self._lock:
            if not self.local:
                return self._expect_kv()
            self._run([self._local_sequence()])
        return None

    def _expect_kv(self) -> KvTarget:
        """Expects the KV of the uncached blocks from a prefill pod."""
        pod, lease, node = self._pod, self._lease, self._pod.transfer_node
        assert lease is not None, "a remote prompt has a lease"
        order, first = PageOrder.of_prompt(pod.engine.layout, self.request.context_len), lease.cached_blocks
        pin = lease.pin_for_write(first, order.num_blocks - first, order)
        target = node.expect_transfer(
            request_id=self.request.request_id,
            first_block=order.first_page(first),
            blocks=pin.blocks,
            pin=pin,
            deadline_s=self._deadline_s,
            on_ready=self._on_transfer_ready,
            on_failed=self._on_transfer_failed,
            adapter=self.request.adapter,
        )
        self._reservation.callback(node.release, target.transfer_id)
        return target

    def _local_sequence(self) -> Sequence:
        """Returns the sequence that computes the uncached tokens. The engine forks the other samples from it.

        One spare block goes with the lease, because a sequence has at most the blocks of its context and one more.
        """
        lease, layout, computed = self._lease, self._pod.engine.layout, 0
        if lease is not None:
            computed = lease.cached_blocks * layout.block_size
            lease.trim(min(len(lease.blocks), layout.blocks_for(self.request.context_len) + 1))
        return self._sequence(lease=lease, computed=computed, child=self.request.child)

    def _on_transfer_ready(self, commit: Commit) -> None:
        """All blocks and first tokens arrived: gives the unfinished sequences to the engine. Transfer thread."""
        with self._lock:
            if self._state is not HandOffState.RESERVED:
                return
            assert self._lease is not None, "a remote prompt has a lease"
            children, vocab_size = self.request.child_indices, self._pod.engine.vocab_size
            tokens, n = commit.first_tokens, len(children)
            if len(tokens) != n or not all(0 <= token < vocab_size for token in tokens):
                expected = f"expected {n} token ids below {vocab_size}"
                self._on_transfer_failed(TransferFailed(f"the commit has first tokens {list(tokens)}; {expected}"))
                return
            self._publish(self._lease)
            ends = zip(children, commit.finish_reasons, strict=False)
            self._ended_children |= {child for child, finish in ends if finish is not None}
            first_of = dict(zip(children, tokens, strict=True))
            firsts = {child: first_of[child] for child in children if child not in self._ended_children}
            if not firsts:
                self.close()
                return
            try:
                seqs = self._fork(self._lease, firsts)
            except BatonError as error:  # the grammar does not allow a first token
                self._on_transfer_failed(error)
            else:
                self._run(seqs)

    def _fork(self, lease: Lease, firsts: dict[int, int]) -> list[Sequence]:
        """Returns the sequences that go on after their first tokens. The last one takes the lease over."""
        computed = self.request.context_len
        shared = self._pod.engine.layout.blocks_for(computed)
        *others, (last_child, last_token) = firsts.items()
        seqs: list[Sequence] = []
        with ExitStack() as forks:
            for child, token in others:
                fork = lease.fork(shared, spare=min(1, len(lease.blocks) - shared))
                forks.callback(fork.finish, "not begun")
                seqs.append(self._sequence(lease=fork, computed=computed, first=[token], child=child))
                if not fork.is_complete:
                    seqs[-1].preempt()  # it computes the prompt again
            lease.trim(min(len(lease.blocks), shared + 1))
            seqs.append(self._sequence(lease=lease, computed=computed, first=[last_token], child=last_child))
            forks.pop_all()
        return seqs

    def _sequence(self, *, first: abc.Sequence[int] = (), **kwargs: Any) -> Sequence:
        """Builds a sequence for the engine. first: its first token, if a prefill pod sampled it."""
        known: dict[str, Any] = {"grammar": self._grammar, "hashes": self._hashes, **kwargs}
        return self._pod.engine.new_sequence(self.request, output=[*self.request.output_ids, *first], **known)

    def _publish(self, lease: Lease) -> None:
        """Makes the prompt's full blocks visible in the prefix cache."""
        layout, request = self._pod.engine.layout, self.request
        extra = request.cache_salt, request.adapter
        hasher = BlockHasher(layout.fingerprint, layout.block_size, *extra, known=self._hashes)
        self._hashes = hasher.extend(request.context_ids)
        lease.publish(self._hashes)

    def _run(self, seqs: abc.Sequence[Sequence]) -> None:
        """Gives the sequences, and with them the lease, to the engine. Under the lock."""
        self._state = HandOffState.RUNNING
        self._reservation.pop_all()
        self.running_since = time.monotonic()
        self.seqs = tuple(seqs)
        self._in_engine = sum(seq.num_samples for seq in seqs)
        for seq in seqs:
            self._pod.engine_loop.add(seq, functools.partial(self._on_refused, seq))
        if self.stream.paused:
            self._pod.engine_loop.set_paused([self.request.request_id], True)

    def _on_transfer_failed(self, error: BatonError) -> None:
        """Fails the request: the KV will not arrive, or its first tokens cannot be used. Transfer thread."""
        if self._state is not HandOffState.ENDED:  # a failure after an abort is expected
            _log.info("hand-off failed: %s", error.message, extra={"request_id": self.request.request_id})
        self.fail(error)

    def _on_refused(self, seq: Sequence, error: BatonError) -> None:
        """Ends the request, because the engine did not accept the sequence. Any thread."""
        self.fail(error)
        self._on_engine_released(seq)

    def _on_engine_released(self, seq: Sequence) -> None:
        """Called when the engine released a sequence. Any thread."""
        with self._lock:
            self._in_engine -= seq.num_samples  # before its first token one sequence stands for all children
            if self._in_engine <= 0:
                self._set_drained()

    def fail(self, error: BatonError) -> None:
        """Ends the request in any state and sends `error` to the gateway. Any thread; idempotent."""
        self._end(error)

    def close(self) -> None:
        """Ends the request in any state; the gateway expects nothing more. Any thread; idempotent."""
        self._end(None)

    def _end(self, error: BatonError | None) -> None:
        with self._lock:
            if self._state is HandOffState.ENDED:
                return
            running = self._state is HandOffState.RUNNING
            self._state = HandOffState.ENDED
            if running:
                self._pod.engine_loop.abort(self.request.request_id)
            else:
                self._reservation.close()
        if error is not None:
            delta = decode_pb2.SequenceDelta(request_id=self.request.request_id, error=error_to_pb(error))
            delta.finish_reason = types_pb2.FINISH_REASON_ERROR
            self._aio.call_soon_threadsafe(self.stream.put_batch, [delta])
        if not running:
            self._set_drained()

    def close_child(self, child: int) -> None:
        """Ends one child because the gateway needs no more of it. The last one ends the request. Idempotent."""
        with self._lock:
            known = child in self.request.child_indices and child not in self._ended_children
            if self._state is HandOffState.ENDED or not known:
                return
            self._ended_children.add(child)
            if not self.num_sequences:
                self.close()
            elif self._state is HandOffState.RUNNING:
                self._pod.engine_loop.abort(self.request.request_id, child)

    async def drained(self) -> None:
        """Returns once the engine holds nothing for the request, for good."""
        await self._drained.wait()

    def _set_drained(self) -> None:
        def drained() -> None:
            self._timer.cancel()
            self._drained.set()

        self._aio.call_soon_threadsafe(drained)

    def set_paused(self, paused: bool) -> None:
        """Pauses or resumes the sequences with the stream. The engine does not schedule a paused sequence."""
        with self._lock:
            if self._state is HandOffState.RUNNING:
                self._pod.engine_loop.set_paused([self.request.request_id], paused)

    def on_output(self, output: SequenceOutput) -> decode_pb2.SequenceDelta | None:
        """Returns the gateway's message for one sequence's output of a step; None if there is nothing to send."""
        try:
            return self._take_output(output)
        except Exception:  # must not end the step's other sequences
            _log.exception("an output could not be sent", extra={"request_id": self.request.request_id})
            self.fail(InternalError("the pod could not encode a token"))
            return None
        finally:
            if output.finish_reason is not None:
                self._on_engine_released(output.seq)

    def _take_output(self, output: SequenceOutput) -> decode_pb2.SequenceDelta | None:
        delta, child = self._delta(output), output.seq.child
        with self._lock:
            if self._state is HandOffState.ENDED or child in self._ended_children:
                return None
            if output.finish_reason is not None:
                self._ended_children.update(range(child, child + output.seq.num_samples))
            if output.error is not None and self.num_sequences:
                self._pod.engine_loop.abort(self.request.request_id)
            if output.error is not None or not self.num_sequences:
                self._state = HandOffState.ENDED
        return delta

    def _delta(self, output: SequenceOutput) -> decode_pb2.SequenceDelta | None:
        if not output.tokens and output.finish_reason is None and output.prompt_logprobs is None:
            return None
        delta = decode_pb2.SequenceDelta(
            request_id=self.request.request_id,
            tokens=[token_to_pb(token) for token in output.tokens],
            finish_reason=finish_reason_to_pb(output.finish_reason),
            child=output.seq.child,
        )
        if output.error is not None:
            delta.error.CopyFrom(error_to_pb(output.error))
        if output.num_drafts:
            delta.speculation.proposed, delta.speculation.accepted = output.num_drafts, output.num_accepted
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(output.prompt_logprobs))
        if self._first_output and output.tokens:
            self._first_output = False
            delta.cached_tokens = output.seq.cached_tokens
        return delta
