"""What all kernels share: dependent launches, and rounding as the torch formulas round."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Return once the kernels before this one have ended; the next one may start to load.

    Every kernel calls it before it reads what another wrote, and before it writes anything. With
    programmatic dependent launch a kernel starts while its predecessor still runs, which hides
    what a launch costs; what it does before this line must concern constants only (weights).
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def rounded(x, dtype):
    """float32 x as `dtype` has it, in float32 again."""
    return x.to(dtype).to(tl.float32)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def dependent_launches() -> dict[str, object]:
    """Launch options of a kernel that calls `wait_for_inputs`."""
    return {"DEPENDENT": True, "launch_pdl": True} if HOPPER else {"DEPENDENT": False}


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
"""Whether the device has programmatic dependent launches, and room for the tilings here."""
