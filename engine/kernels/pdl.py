"""Programmatic dependent launch (PDL, Hopper): a kernel is launched while the kernel before it finishes.

The kernel loads constant data early and waits (griddepcontrol.wait) before it reads the output of the kernel before it.
Every kernel waits before it allows the next launch. So all kernels older than the direct predecessor are complete when
a kernel starts. Short kernels before a product (`launch_next_and_wait`) are the exception: the product may start, and
load weights, while the kernel before them still runs. After it has waited, all older kernels are complete too, because
each of them has waited.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def supports_pdl(device: torch.device) -> bool:
    """Returns whether the device supports PDL. Cached, because a device does not change."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_args(device: torch.device) -> dict[str, bool]:
    """Returns the launch arguments of a kernel that calls `wait_for_previous`."""
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the kernel before this one has ended, and allows the launch of the next kernel."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def launch_next_and_wait(PDL: tl.constexpr):
    """As `wait_for_previous`, but the next kernel may start at once.

    Until that one has waited, it may read only what is constant in a step.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
