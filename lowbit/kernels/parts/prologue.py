"""How a kernel overlaps with the one before it and the one after it: programmatic dependent launch, sm_90.

Source: PTX ISA, griddepcontrol.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gluon, run


@gluon.jit
def launch_next_kernel():
    """The kernel after this one may start; what this one writes it sees only after its own `wait_for_previous_kernel`."""
    run("griddepcontrol.launch_dependents;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def wait_for_previous_kernel():
    """Until the kernel before this one, which may have made x or may still read what is written here, is through."""
    run("griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def launch_next_and_wait_for_previous():
    """Both at once, where nothing is to be asked for in between."""
    run("griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])
