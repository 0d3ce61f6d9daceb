"""One fake pod in its own process, which a test can freeze: python -m tests.rigs.pods.lone_pod ROLE prints its address.

The pod never finishes a request: a prompt takes 600 s, an answer stalls after two tokens.
"""

from __future__ import annotations

import asyncio
import sys

from common.process.tether import die_with_parent
from common.types import Role
from tests.rigs.pods.fake_pods import FakeCluster


async def main(role: Role) -> None:
    die_with_parent()
    pod = await FakeCluster().add(role, f"lone-{role.value}")
    pod.faults.prefill_delay_s = 600.0
    pod.faults.stall_after = 2
    print(pod.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Role(sys.argv[1])))
