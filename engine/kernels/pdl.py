"""Programmatic dependent launch (PDL, Hopper): a kernel is launched while the kernel before it finishes.

The kernel loads constant data early and waits (griddepcontrol.wait) before it reads the output of the kernel before it.
Every kernel waits before it allows the next launch. So all kernels older than the direct predecessor are complete when
a kernel starts.
"""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def supports_pdl(device: torch.device) -> bool:
    """Returns whether the device supports PDL. Cached, because a device does not change."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_flags(pdl: bool) -> dict[str, bool]:
    """Returns the launch options of a kernel that is compiled with PDL=pdl."""
    return {"launch_pdl": True} if pdl else {}


def has_native_e4m3() -> bool:
    """Returns whether kernels may use the e4m3 conversions of PTX. Returns False in the interpreter."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret
