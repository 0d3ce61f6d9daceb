"""One request on a decode pod, from its reservation to its end.

RESERVED --every block and Commit arrived--> RUNNING --last token--> ENDED
LOCAL (this pod prefills) starts as RUNNING
any state --abort, failure, deadline--> ENDED

The lease belongs to the reservation until its sequences are given to the engine, then to the engine. Whoever moves the
state to ENDED decides, under the lock, what the gateway is told; everything later is dropped. A request is *gone* once
the engine holds nothing for it.

Of a request's n sequences (children) each ends by itself; the request ends with the last of them, or with an error of
any. Those whose KV arrived fork from the reservation's lease, and each takes one of the spare blocks behind the prompt.

Callers: the event loop, the transfer thread (ready, failed), the engine (refused).
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
from collections import abc
from collections.abc import Callable
from typing import Any

from common.block_hash import BlockHasher
from common.errors import BatonError, TransferFailed
from common.grammar import CompiledGrammar
from common.pb import decode_pb2, types_pb2
from common.tracing.context import TraceContext
from common.types import KvTarget, TransferId, ValidRequest
from common.wire import error_to_pb, finish_reason_to_pb, prompt_logprobs_to_pb, token_to_pb
from decode_service.token_stream import TokenStream
from engine.engine import SequenceOutput
from engine.kv.blocks import Lease
from engine.schedule.sequence import Sequence
from kv_transfer.messages import Commit
from pod.runtime import PodRuntime

_log = logging.getLogger(__name__)


class HandOffState(enum.Enum):
    """Where the request is."""

    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"


class DecodeHandOff:
    """The life of one request on this pod.

    tell(reservation, delta) passes news to the gateway's stream, gone(reservation) says that nothing is held any more;
    both may be called on any thread. lease is None where the scheduler leases when it admits the prompt.
    hashes: of the prompt's lead blocks. grammar: the request's, compiled. asked_by: the caller's span, if it is
    recorded.
    """

    def __init__(
        self,
        pod: PodRuntime,
        request: ValidRequest,
        stream: TokenStream,
        lease: Lease | None,
        *,
        hashes: abc.Sequence[bytes] = (),
        grammar: CompiledGrammar | None = None,
        caller_span: TraceContext | None = None,
        tell: Callable[[DecodeHandOff, decode_pb2.SequenceDelta], None],
        gone: Callable[[DecodeHandOff], None],
    ) -> None:
        self.request = request
        self.stream = stream
        self.lease = lease
        self.seqs: tuple[Sequence, ...] = ()
        self.arrived_at = time.monotonic()
        self.reserved_at: float | None = None
        self.running_since: float | None = None
        self.local = lease is None
        self._pod = pod
        self._hashes = hashes
        self._grammar = grammar
        self.caller_span = caller_span
        self._send_delta = tell
        self._on_drained = gone
        self._lock = threading.RLock()
        self._state = HandOffState.RESERVED
        self._first_output = False  # of a local prefill is still to come
        self._transfer_id: TransferId | None = None
        self._ended_children: set[int] = set()  # children whose end the gateway knows
        self._in_engine = 0  # children

    @property
    def state(self) -> HandOffState:
        return self._state

    @property
    def num_sequences(self) -> int:
        """Children that have not ended."""
        return len(self.request.child_indices) - len(self._ended_children)

    def start_remote(self, deadline_s: float) -> KvTarget:
        """Announces the missing blocks to the transfer node; the home that prefill writes to."""
        pod, lease = self._pod, self.lease
        assert lease is not None
        first = lease.cached_blocks
        blocks = tuple(lease.blocks[first : pod.engine.layout.blocks_for(self.request.context_len)])
        with self._lock:
            hold = lease.pin_for_write(first, len(blocks))
            try:
                self._transfer_id = pod.transfer_node.expect_transfer(
                    request_id=self.request.request_id,
                    first_block=first,
                    blocks=blocks,
                    hold=hold,
                    deadline_s=deadline_s,
                    on_ready=self.on_transfer_ready,
                    on_failed=self.on_transfer_failed,
                )
            except BaseException:
                hold.release()
                raise
        return KvTarget(self._transfer_id, pod.name, pod.address, first, blocks, pod.engine.layout.fingerprint)

    def start_local(self) -> None:
        """Gives the prompt to the engine, and the lease with it: what it has from the cache is not computed again.

        Of the spare blocks one goes with it: a sequence never has more than its context, and the other children, which
        fork in the engine, get theirs there.
        """
        engine, lease = self._pod.engine, self.lease
        computed = 0
        if lease is not None:
            computed = lease.cached_blocks * engine.layout.block_size
            lease.trim(min(len(lease.blocks), engine.layout.blocks_for(self.request.context_len) + 1))
        with self._lock:
            self._first_output = True
            self._run([self._sequence(lease=lease, computed=computed, child=self.request.child)])

    def on_transfer_ready(self, commit: Commit) -> None:
        """Every block and the first tokens are here: what does not end with its first token joins the running batch."""
        with self._lock:
            if self._state is not HandOffState.RESERVED:
                return
            assert self.lease is not None
            children, vocab_size = self.request.child_indices, self._pod.engine.vocab_size
            tokens, n = commit.first_tokens, len(children)
            if len(tokens) != n or not all(0 <= token < vocab_size for token in tokens):
                self.on_transfer_failed(
                    TransferFailed(f"the commit carries no usable first token of each of {n} sequences")
                )
                return
            self._publish(self.lease)
            ends = zip(children, commit.finish_reasons, strict=False)
            self._ended_children |= {child for child, finish in ends if finish is not None}
            firsts = {
                child: token for child, token in zip(children, tokens, strict=True) if child not in self._ended_children
            }
            if firsts:
                try:
                    seqs = self._begin(self.lease, firsts)
                except BatonError as error:  # a first token that the grammar does not allow
                    self.on_transfer_failed(error)
                    return
                self._run(seqs)
                return
            self._state = HandOffState.ENDED
            self.lease.finish("finished at its first token")
        self._on_drained(self)

    def _begin(self, lease: Lease, firsts: dict[int, int]) -> list[Sequence]:
        """The children that go on, by child and first token; the lease is theirs from now on."""
        computed = self.request.context_len
        if self.request.sampling.n == 1:
            [(child, token)] = firsts.items()
            return [self._sequence(lease=lease, computed=computed, first=[token], child=child)]
        shared = self._pod.engine.layout.blocks_for(computed)
        seqs: list[Sequence] = []
        try:
            for child, token in firsts.items():
                fork = lease.fork(shared, spare=min(1, len(lease.blocks) - shared))
                try:
                    seqs.append(self._sequence(lease=fork, computed=computed, first=[token], child=child))
                except BaseException:
                    fork.finish("not begun")
                    raise
        except BaseException:
            for seq in seqs:
                assert seq.lease is not None
                seq.lease.finish("not begun")
            raise
        lease.finish("forked")
        return seqs

    def _sequence(self, *, first: abc.Sequence[int] = (), **kwargs: Any) -> Sequence:
        """first: its first token, where another pod sampled that."""
        output = [*self.request.output_ids, *first]
        return self._pod.engine.new_sequence(
            self.request, grammar=self._grammar, hashes=self._hashes, output=output, **kwargs
        )

    def _publish(self, lease: Lease) -> None:
        layout, salt = self._pod.engine.layout, self.request.cache_salt
        hasher = BlockHasher(layout.fingerprint, layout.block_size, salt, known=self._hashes)
        self._hashes = hasher.extend(self.request.context_ids)
        lease.publish(self._hashes)

    def _run(self, seqs: abc.Sequence[Sequence]) -> None:
        self._state = HandOffState.RUNNING
        self.running_since = time.monotonic()
        self.seqs = tuple(seqs)
        self._in_engine = sum(seq.num_samples for seq in seqs)
        for seq in seqs:
            self._pod.engine_loop.add(seq, functools.partial(self.on_refused, seq))
        if self.stream.paused:
            self._pod.engine_loop.set_paused([self.request.request_id], True)

    def on_transfer_failed(self, error: BatonError) -> None:
        """The hand-off broke (or the request otherwise cannot go on): the gateway is told."""
        if self._state is not HandOffState.ENDED:  # what follows an abort is no news
            _log.info("hand-off failed: %s", error.message, extra={"request_id": self.request.request_id})
        self.end(error)

    def on_refused(self, seq: Sequence, error: BatonError) -> None:
        """The engine did not take the sequence: the request ends."""
        self.end(error)
        if self.on_engine_released(seq):
            self._on_drained(self)

    def on_engine_released(self, seq: Sequence) -> bool:
        """The engine holds nothing for the sequence any more; True when that was the last of the request."""
        with self._lock:
            self._in_engine -= seq.num_samples  # before its first token one stands for all
            return self._in_engine <= 0

    def end(self, error: BatonError | None) -> None:
        """Ends the request whatever its state; idempotent. error: what the gateway is told, None for nothing."""
        with self._lock:
            if self._state is HandOffState.ENDED:
                return
            running = self._state is HandOffState.RUNNING
            self._state = HandOffState.ENDED
            if running:
                self._pod.engine_loop.abort(self.request.request_id)
            elif self.lease is not None:
                self.lease.finish("ended before it ran")
                if self._transfer_id is not None:
                    self._pod.transfer_node.release(self._transfer_id)
        if error is not None:
            self._send_delta(self, self._error_delta(error))
        if not running:
            self._on_drained(self)

    def close_child(self, child: int) -> None:
        """Ends one child, of which the gateway needs no more, and the request with the last; idempotent."""
        with self._lock:
            if (
                self._state is HandOffState.ENDED
                or child in self._ended_children
                or child not in self.request.child_indices
            ):
                return
            self._ended_children.add(child)
            if not self.num_sequences:
                self.end(None)
            elif self._state is HandOffState.RUNNING:
                self._pod.engine_loop.abort(self.request.request_id, child)

    def set_paused(self, paused: bool) -> None:
        """Follows the stream: a paused sequence is not scheduled."""
        with self._lock:
            if self._state is HandOffState.RUNNING:
                self._pod.engine_loop.set_paused([self.request.request_id], paused)

    def on_output(self, output: SequenceOutput) -> decode_pb2.SequenceDelta | None:
        """One step's news for the gateway, None when there is none or the gateway has been told the end already."""
        delta = self._delta(output)
        child = output.seq.child
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

    def _error_delta(self, error: BatonError) -> decode_pb2.SequenceDelta:
        return decode_pb2.SequenceDelta(
            request_id=self.request.request_id,
            finish_reason=types_pb2.FINISH_REASON_ERROR,
            error=error_to_pb(error),
        )
