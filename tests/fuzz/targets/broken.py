"""A target with every kind of crash, for the tests of the fuzzer. The first byte of an input chooses the kind."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from random import Random

from tests.fuzz.target import FuzzTarget


class Broken(FuzzTarget):
    """Raises, logs, ends the process, is slow, hangs."""

    def seeds(self) -> Sequence[bytes]:
        return [b"-fine", b"raise", b"log", b"-fine", b"exit", b"slow", b"hang", b"-fine"]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        return b"-%d" % rng.randrange(9)

    def run(self, data: bytes) -> str:
        match data[:1]:
            case b"r":
                raise LookupError("by run")
            case b"l":
                logging.getLogger("x").error("unexpected")
            case b"e":
                os._exit(3)
            case b"s":
                end = time.process_time() + 1.1
                while time.process_time() < end:
                    pass
            case b"h":
                time.sleep(1e6)
        return data.decode()
