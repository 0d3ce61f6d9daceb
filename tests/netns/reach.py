"""Prints the reachable ones of the given ports as a JSON list.

    python -P tests/netns/reach.py HOST:PORT...

A refused connection counts as reachable: the host answered. A packet filter drops packets without an answer.
"""

from __future__ import annotations

import asyncio
import json
import sys

TIMEOUT_S = 2.0


async def reached(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), TIMEOUT_S)
    except TimeoutError:
        return False
    except ConnectionRefusedError:
        return True
    writer.close()
    return True


async def main(addresses: list[str]) -> None:
    found = await asyncio.gather(*map(reached, addresses))
    print(json.dumps([address for address, there in zip(addresses, found, strict=True) if there]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
