"""A step's arrays from the host's memory to the device's."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def fetch(host, device, count, BLOCK: tl.constexpr):
    """device[:count] = host[:count] in int32, `host` pinned. Grid: blocks.

    The copy engine is as fast, but what comes after it starts later: an 8B model took 1.5835 ms a step with it, 1.580
    so.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(device + at, tl.load(host + at, mask=at < count, other=0), mask=at < count)
