"""How a kernel overlaps with the one before it and the one after it: programmatic dependent launch, sm_90.

Source: PTX ISA, griddepcontrol.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gluon, run


@gluon.jit
def launch_next_kernel():
    """Lets the next kernel start; it sees what this one writes only after its own `wait_for_previous_kernel`."""
    run("griddepcontrol.launch_dependents;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def wait_for_previous_kernel():
    """Waits until the previous kernel has finished: it may have written x, or may still read what this one writes."""
    run("griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def launch_next_and_wait_for_previous():
    """Does both at once, where nothing can be loaded in between."""
    run("griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])
