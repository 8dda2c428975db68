"""Roles of warpgroups in one kernel, as branches of one function: a loader warpgroup and math warpgroups.

Triton's warp specialization is not used. It would compile the code of the math warpgroups once for each of them, and ptxas
would serialize their wgmma as soon as registers move between warpgroups.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon, run

LOADER_REGISTERS = gl.constexpr(32)
"""Number of registers of a loader thread. Every thread starts with 128; math warps get those that the loader gives up."""


OWN_THREAD = gl.constexpr("mov.u32 $0, %tid.x;")

OWN_WARPGROUP = gl.constexpr(
    "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff; }"
)


@gluon.constexpr_function
def registers_of(count):
    """PTX that sets the registers per thread of the calling warpgroup, which are 128 at the start."""
    return f"setmaxnreg.{'inc' if count > 128 else 'dec'}.sync.aligned.u32 {count};\nmov.b32 $0, 0;"


@gluon.jit
def own_number(asm: gl.constexpr):
    """Returns the thread's index as a scalar, which Triton assumes to be equal in all threads."""
    return gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def own_thread():
    """Returns the thread's index in its block, as `own_number`."""
    return own_number(OWN_THREAD)


@gluon.jit
def own_warpgroup():
    """Returns the index of the thread's warpgroup, as `own_number`."""
    return own_number(OWN_WARPGROUP)


@gluon.jit
def following(stage, parity, count, by):
    """Returns the index of the stage `by` (0 or 1) stages later in a ring of `count` stages, and its parity."""
    stage += by
    parity = gl.where(stage == count, parity ^ 1, parity)
    return gl.where(stage == count, 0, stage), parity


@gluon.jit
def map_arrived(maps):
    """Makes a descriptor in memory visible to TMA, even if another one was at its address before, and prefetches it."""
    run(
        "fence.proxy.tensormap::generic.acquire.gpu [$1], 128;\n prefetch.tensormap [$1];\n mov.b32 $0, 0;", "=r,l", [maps]
    )  # fmt: skip
