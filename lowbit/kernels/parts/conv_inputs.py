"""What a convolution kernel of sm_90 reads: its products, once the kernel before is through and descriptors are known."""

from __future__ import annotations

from lowbit.kernels.parts.gluon import Scalar, aggregate, gl, gluon, run


@aggregate
class Product:
    """One product as a kernel is given it: descriptor of the input, packed weights, steps of a tap, taps, and how windows lie.
    A launch takes them from `WindowOperand`."""

    maps: Scalar
    weight: Scalar
    blocks: Scalar
    taps_across: Scalar
    taps_down: Scalar
    stride_down: Scalar
    stride_across: Scalar
    first_down: Scalar
    first_across: Scalar


@gluon.jit
def await_inputs(C: gl.constexpr):
    """The kernel after this one may start now; this one waits until the one before, which made x, is through."""
    run("griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def map_arrived(maps, C: gl.constexpr):
    """Makes a descriptor in memory known to the copy engine, whatever lay at its address before."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        "fence.proxy.tensormap::generic.acquire.gpu [$1], 128;\n mov.b32 $0, 0;", "=r,l", [maps + thread * 0],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
