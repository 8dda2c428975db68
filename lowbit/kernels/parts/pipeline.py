"""The pipeline of stages between copies and products, and its barriers as PTX: who may read a stage, who may fill it again.

full[i]: 1 arrival and the bytes of stage i; empty[i]: 1 arrival from each reading warp. Triton's own operations on barriers
first bring all warps of a role together, which keeps them in step: all decode, then all wait for the tensor cores. Here a
warp waits and arrives for itself. That takes addresses, and so an allocation that is the first of its kernel, at offset 0.

The functions take the configuration C of a kernel, which has `regions` with one for `barriers`, `stages`, `stage_bytes`,
`threads` and `threads_layout`. A stage is named by its number and the parity of its phase, which changes with each lap.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.gluon import gl, gluon, mbarrier, run
from lowbit.kernels.parts.smem import view


@dataclass(frozen=True)
class StageBarriers:
    """`stages` full barriers, then as many empty ones, from byte `start` of shared memory on."""

    start: int
    stages: int
    readers: int

    @property
    def end(self) -> int:
        """The byte after them."""
        return self.start + 16 * self.stages

    @property
    def init(self) -> str:
        """Makes all of them, $1 being the thread's number among the reading warps: each warp some, as one thread takes long."""
        lines = [".reg .pred p; .reg .b32 at, count, warp, lane, number;", "shr.u32 warp, $1, 5; and.b32 lane, $1, 31;"]
        for first in range(0, 2 * self.stages, self.readers):
            lines += [
                f"add.u32 number, warp, {first}; setp.lt.u32 p, number, {2 * self.stages}; setp.eq.and.u32 p, lane, 0, p;",
                f"mov.u32 at, global_smem; mad.lo.u32 at, number, 8, at; setp.lt.u32 q, number, {self.stages};",
                f"selp.b32 count, 1, {self.readers}, q; @p mbarrier.init.shared::cta.b64 [at+{self.start}], count;",
            ]
        return "{ .reg .pred q;\n" + "\n".join(lines) + "\nmov.b32 $0, 0; }"

    @property
    def expect(self) -> str:
        """Says that $3 bytes will come to stage $2; of the copying warp's threads the one whose $1 is 0 does."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 at, $2, 8, at; setp.eq.s32 p, $1, 0;\n"
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [at+{self.start}], $3; mov.b32 $0, 0; }}"
        )

    @property
    def wait(self) -> str:
        """Waits until stage $1 is full in the phase of parity $2; not at all if $3 is 0."""
        return (
            "{ .reg .pred full, skip; .reg .b32 at; setp.eq.s32 skip, $3, 0; @skip bra DONE;\n"
            "mov.u32 at, global_smem; mad.lo.u32 at, $1, 8, at;\n"
            f"WAIT: mbarrier.try_wait.parity.shared::cta.b64 full, [at+{self.start}], $2; @!full bra WAIT;\n"
            "DONE: mov.b32 $0, 0; }"
        )

    @property
    def give(self) -> str:
        """Gives stage $1 back to its writer; only threads whose $2 is not 0 do, one of each warp."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 at, $1, 8, at; setp.ne.s32 p, $2, 0;\n"
            f"@p mbarrier.arrive.shared::cta.b64 _, [at+{self.start + 8 * self.stages}]; mov.b32 $0, 0; }}"
        )


@gluon.jit
def make_barriers(shared, C: gl.constexpr):
    """The barriers of all stages, as Triton's operations take them; to be followed by a fence and a barrier of the block."""
    barriers = view(shared, C.regions, "barriers", gl.int64, [2 * C.stages, 1], mbarrier.MBarrierLayout())
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.init, "=r,r", [thread])
    return barriers


@gluon.jit
def expect(barriers, stage, absent, C: gl.constexpr):
    """For the copying warp: says how many bytes will come to a stage: those of a whole one less the `absent` of x."""
    if C.x_pieces == 1:
        mbarrier.expect(barriers.index(stage), C.stage_bytes)
    else:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        run(C.barriers.expect, "=r,r,r,r", [lane, lane * 0 + stage, lane * 0 + (C.stage_bytes - absent)])


@gluon.jit
def acquire(barriers, stage, phase, absent, C: gl.constexpr):
    """For the copying warp: waits until a stage may be filled, and says how many bytes will come."""
    mbarrier.wait(barriers.index(C.stages + stage), phase)
    expect(barriers, stage, absent, C)


@gluon.jit
def wait_full(stage, phase, there, C: gl.constexpr):
    """For a multiplying warp: until a stage is there; not at all if `there` is False, as where nothing comes any more."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.wait, "=r,r,r,r", [thread * 0 + stage, thread * 0 + phase, (thread >= 0) & there])


@gluon.jit
def release(stage, exists, C: gl.constexpr):
    """A stage back to the copying warp, from each multiplying one; nothing if `exists` is False."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.give, "=r,r,r", [thread * 0 + stage, ((thread & 31) == 0) & exists])


@gluon.jit
def advance(stage, phase, by: gl.constexpr, C: gl.constexpr):
    """The stage `by` further on, of whose multiples there are C.stages, with its phase."""
    stage = gl.where(stage + by == C.stages, 0, stage + by)
    return stage, gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def previous(stage, C: gl.constexpr):
    """The stage before this one."""
    return gl.where(stage == 0, C.stages, stage) - 1
