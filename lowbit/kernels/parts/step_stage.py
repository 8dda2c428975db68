"""What all stages of a decode step in one launch share (kernels/sm90/decode_step.py): arguments, a thread, the ring's place,
and addresses of vectors and tables.

`C` is the kernel's configuration. `C.table`: tasks and layouts (choose/decode_step.py). `C.field` and `C.wait` number the
table's columns and the waits.
"""

from __future__ import annotations

from lowbit.kernels.choose.decode_step import WAITS
from lowbit.kernels.parts.gluon import Scalar, aggregate, asm, gl, gluon, ptx, run

WAITS_OF = gl.constexpr(WAITS)


@aggregate
class StepArgs:
    """The kernel's arguments. `layers`: int64 [layers + 1, fields]. `row_scale`: scales of an embedding of 8-bit codes, or
    None."""

    layers: Scalar
    vectors: Scalar
    h: Scalar
    tokens: Scalar
    embedding: Scalar
    row_scale: Scalar
    tables: Scalar
    positions: Scalar
    rows: Scalar
    status: Scalar
    logits: Scalar
    table_stride: Scalar
    inverse_width: Scalar
    eps: Scalar


@aggregate
class MathThread:
    """A thread of the math warps: its number, lane and warp, and the address of shared memory."""

    index: gl.tensor
    lane: gl.tensor
    warp: gl.tensor
    start: gl.tensor


@aggregate
class RingPlace:
    """The slot of the ring that is next, and the parity of its phase."""

    slot: Scalar
    phase: Scalar


@gluon.jit
def same_thread(at, C: gl.constexpr):
    """Returns the same MathThread in new registers. Otherwise the compiler computes the addresses of all stages before the
    first layer, and keeps them on the stack."""
    index = asm("mov.b32 $0, $1;", "=r,r", [at.index], gl.int32) & (C.threads - 1)
    start = at.start
    if C.shape.group == 8:  # attention takes so many registers that this address would be kept on the stack as well
        start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32) + index * 0
    return MathThread(index, index & 31, index >> 5, start)


@gluon.jit
def warp_number():
    """Returns the number of this warp, on which a whole warp may branch."""
    return asm("{ mov.u32 $0, %tid.x; shr.u32 $0, $0, 5; }", "=r", [], gl.int32)


@gluon.jit
def field(args, layer, name: gl.constexpr, C: gl.constexpr):
    """Returns a field of the table of layers."""
    COUNT: gl.constexpr = C.fields
    return gl.load(args.layers + (layer * COUNT + ptx(C.field, name)))


@gluon.jit
def prefetch_layer(args, layer, C: gl.constexpr):
    """Prefetches a layer's row of the table into L2."""
    COUNT: gl.constexpr = C.fields
    for line in gl.static_range(0, COUNT, 16):
        run("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [args.layers + (layer * COUNT + line)])


@gluon.jit
def vector(args, layer, name: gl.constexpr, C: gl.constexpr):
    """Returns the address of a layer's vector, int64."""
    END: gl.constexpr = ptx(C.table.start, "end")
    START: gl.constexpr = ptx(C.table.start, name)
    return args.vectors.to(gl.int64) + (layer.to(gl.int64) * END + START) * 4


@gluon.jit
def status_of(layer, wait: gl.constexpr, C: gl.constexpr):
    """Returns the status of a block that has waited for `wait` too long."""
    COUNT: gl.constexpr = len(WAITS_OF)
    return layer * COUNT + (1 + ptx(C.wait, wait))


@gluon.jit
def later_place(place, slots, C: gl.constexpr):
    """Returns the slot that is `slots` after `place`, fewer than the ring has."""
    SLOTS: gl.constexpr = C.table.ring_slots
    following = place.slot + slots
    wraps = following >= SLOTS
    return RingPlace(gl.where(wraps, following - SLOTS, following), gl.where(wraps, place.phase ^ 1, place.phase))


@gluon.jit
def set_flag(at, value: gl.constexpr, condition, C: gl.constexpr):
    """Sets the flag for the loader if a condition holds: 1 while few slots shall be in flight."""
    run(C.set_flag, "=r,r,r,r,r", [at.start, at.index, at.index * 0 + value, at.index * 0 + condition.to(gl.int32)])


@gluon.jit
def own_row_blocks(product: gl.constexpr, C: gl.constexpr):
    """Returns the first row block of this block and the one after its last."""
    COUNT: gl.constexpr = ptx(C.table.row_blocks, product)
    BLOCKS: gl.constexpr = C.table.blocks
    block = gl.program_id(0)
    return block * COUNT // BLOCKS, (block + 1) * COUNT // BLOCKS
