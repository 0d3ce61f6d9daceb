"""Programmatic dependent launch (Hopper): a kernel starts while the one before it drains, and waits before it reads
its output.

A kernel that uses it waits (griddepcontrol.wait) before it lets its own dependents start, so when a kernel runs,
everything older than its direct predecessor is complete.
"""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def supports_pdl(device: torch.device) -> bool:
    """The device can do it; a property of the machine, so it is asked once."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_flags(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel compiled with PDL=pdl."""
    return {"launch_pdl": True} if pdl else {}


def has_native_e4m3() -> bool:
    """Kernels may use PTX's conversions of e4m3; not in the interpreter."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret
