"""Arguments of the convolution kernels of sm_90: the operands of a product, and TMA descriptors in memory."""

from __future__ import annotations

from lowbit.kernels.parts.gluon import Scalar, aggregate, gl, gluon


@aggregate
class Product:
    """Arguments of one product: descriptor of the input, packed weights, k blocks of a tap, taps, and geometry of windows.
    `WindowOperand` builds them."""

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
def map_arrived(maps, C: gl.constexpr):
    """Makes a descriptor in memory visible to TMA, even if another one was at its address before (proxy fence)."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        "fence.proxy.tensormap::generic.acquire.gpu [$1], 128;\n mov.b32 $0, 0;", "=r,l", [maps + thread * 0],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
