"""`baton` with a GPU that hangs: `python hanging_gpu.py FILE serve ...`.

Once FILE exists, each step waits behind an endless kernel. The kernel ends after SPIN_S at the latest, so that a
failing test gives the card back.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from cli import main
from engine.step.runner import ModelRunner

SPIN_S = 120
CYCLES_PER_S = 2_000_000_000  #: Above the clock of every GPU of today.


def hang_once_there(trigger: Path) -> None:
    """Patches the engine of this process: each step that starts after `trigger` exists waits for an endless kernel."""
    launch = ModelRunner.launch

    def hanging(self: ModelRunner, *args: Any, **named: Any) -> Any:
        if trigger.exists():
            torch.cuda._sleep(SPIN_S * CYCLES_PER_S)
        return launch(self, *args, **named)

    ModelRunner.launch = hanging  # type: ignore[method-assign]


if __name__ == "__main__":
    hang_once_there(Path(sys.argv.pop(1)))
    main()
