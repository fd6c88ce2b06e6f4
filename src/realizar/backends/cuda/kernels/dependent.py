"""Programmatic dependent launch: a kernel starts while the one before it ends."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """First of all in a kernel: lets the next one start, and waits until the one before has written all.

    The next may ask for weights meanwhile; whatever another kernel writes it reads after its own wait.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits until the kernel before has written all. Only the step's own arrays may be read before."""
    if DEPENDENT:
        gdc_wait()
