"""Pulls of cached blocks from other pods into this pod. The holder pushes them. Event loop.

    add to the table -> Pull call -> Open, writes, Commit by the holder -> complete       (receiver/state_machine.py)

The caller's pin is released exactly once, when no byte can land in its blocks any more. That may be long after the pull
failed for its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from common.errors import BatonError
from common.types import KvTarget
from kv_transfer.messages import Commit, PrefixHolder, PullResult, WantedBlocks
from kv_transfer.peers.transfer_calls import TransferCalls
from kv_transfer.receiver.transfers import TransferReceiver
from kv_transfer.transfer_thread import TransferThread


class PullReceiver:
    """Pulls of one pod. target(first_block, blocks) makes a KvTarget with a new transfer id."""

    def __init__(
        self,
        thread: TransferThread,
        incoming: TransferReceiver,
        calls: TransferCalls,
        clock: Callable[[], float],
        target: Callable[[int, Sequence[int]], KvTarget],
    ) -> None:
        self._thread = thread
        self._incoming = incoming
        self._calls = calls
        self._clock = clock
        self._target = target

    def pull(self, holder: PrefixHolder, wanted: WantedBlocks) -> asyncio.Task[PullResult]:
        """Starts a task that asks the holder to write the blocks. The task raises BatonError.

        When this method returns, the table of incoming transfers owns the pin, and the end of the task releases the
        transfer. The coroutine owns nothing, because a task that is cancelled before its first step never runs its
        `finally` blocks. This method raises only before the table owns the pin.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        # Reads the exception, so that asyncio does not log it when the task was cancelled.
        over.add_done_callback(lambda f: f.cancelled() or f.exception())

        def end(error: BatonError | None) -> None:
            if not over.done():
                over.set_exception(error) if error is not None else over.set_result(None)

        def ready(_: Commit) -> None:
            loop.call_soon_threadsafe(end, None)

        def failed(error: BatonError) -> None:
            loop.call_soon_threadsafe(end, error)

        target = self._target(wanted.first_block, wanted.blocks)
        transfer_id, deadline = target.transfer_id, self._clock() + wanted.timeout_s
        self._thread.submit(
            lambda: self._incoming.add(
                transfer_id, wanted.request_id, wanted.first_block, wanted.blocks, wanted.pin, deadline, ready, failed
            )
        )

        def release(_: asyncio.Task[PullResult]) -> None:
            self._thread.submit(lambda: self._incoming.release(transfer_id))  # after READY it has no effect

        task = loop.create_task(self._ask_holder(holder, target, wanted, over))
        task.add_done_callback(release)
        return task

    async def _ask_holder(
        self, holder: PrefixHolder, target: KvTarget, wanted: WantedBlocks, over: asyncio.Future[None]
    ) -> PullResult:
        """Calls Pull and waits until the transfer has ended."""
        answer = await self._calls.pull(holder.address, target, wanted)
        if not answer.blocks:
            return PullResult(0, answer.reason, answer.gb_s)
        if answer.blocks < len(wanted.blocks):
            self._thread.submit(partial(self._incoming.shrink_to, target.transfer_id, answer.blocks))
        await over
        return PullResult(answer.blocks, answer.reason, answer.gb_s)
