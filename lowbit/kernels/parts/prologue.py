"""Programmatic dependent launch (sm_90): how a kernel overlaps with the previous and the next kernel.

Source: PTX ISA, griddepcontrol.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gluon, run


@gluon.jit
def launch_next_kernel():
    """Lets the next kernel start. Writes of this kernel are visible there only after the next kernel's
    `wait_for_previous_kernel`."""
    run("griddepcontrol.launch_dependents;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def wait_for_previous_kernel():
    """Waits until the previous kernel has finished. It may have written x, or may still read memory that this kernel writes."""
    run("griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def launch_next_and_wait_for_previous():
    """Lets the next kernel start, then waits for the previous one; for kernels that load nothing in between."""
    run("griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])
