"""Runs `baton gateway` with round robin instead of the cost policy. Takes the arguments of `python -m cli`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cli import main
from gateway.routing import router
from simulator.policies import RoundRobin

if __name__ == "__main__":
    router.CostPolicy = RoundRobin  # type: ignore[misc, assignment]
    main()
