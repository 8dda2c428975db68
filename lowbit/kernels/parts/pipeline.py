"""The pipeline of stages between the loader and the math warps, with its barriers as PTX.

Barrier full[i] completes after 1 arrival and all bytes of stage i, barrier empty[i] after 1 arrival from each reading warp.
Triton's barrier operations first synchronise all warps of a role. All warps would then dequantize at the same time, and
afterwards all would wait for the tensor cores. The PTX here lets each warp wait and arrive separately. It needs the barriers'
addresses, so the allocation must be the kernel's first, at offset 0.

The functions take the configuration C of a kernel, which has `regions` with one for `barriers`, `stages`, `stage_bytes`,
`threads` and `threads_layout`. A stage is identified by its index and the parity of its phase, which flips with every pass over
the stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.gluon import gl, gluon, mbarrier, run
from lowbit.kernels.parts.smem import view


@dataclass(frozen=True)
class StageBarriers:
    """`stages` full barriers, then `stages` empty barriers, from byte `start` of shared memory on."""

    start: int
    stages: int
    readers: int

    @property
    def end(self) -> int:
        return self.start + 16 * self.stages

    @property
    def init(self) -> str:
        """PTX that initialises all barriers; $1 is the thread's index among the reading warps. Each warp initialises some of
        them, because one thread alone is slow."""
        lines = [".reg .pred p; .reg .b32 at, count, warp, lane, number;", "shr.u32 warp, $1, 5; and.b32 lane, $1, 31;"]
        for first in range(0, 2 * self.stages, self.readers):
            lines += [
                f"add.u32 number, warp, {first}; setp.lt.u32 p, number, {2 * self.stages}; setp.eq.and.u32 p, lane, 0, p;",
                f"mov.u32 at, global_smem; mad.lo.u32 at, number, 8, at; setp.lt.u32 q, number, {self.stages};",
                f"selp.b32 count, 1, {self.readers}, q; @p mbarrier.init.shared::cta.b64 [at+{self.start}], count;",
            ]
        return "{ .reg .pred q;\n" + "\n".join(lines) + "\nmov.b32 $0, 0; }"

    @property
    def wait(self) -> str:
        """PTX that waits until stage $1 is full in the phase of parity $2; does not wait if $3 is 0."""
        return (
            "{ .reg .pred full, skip; .reg .b32 at; setp.eq.s32 skip, $3, 0; @skip bra DONE;\n"
            "mov.u32 at, global_smem; mad.lo.u32 at, $1, 8, at;\n"
            f"WAIT: mbarrier.try_wait.parity.shared::cta.b64 full, [at+{self.start}], $2; @!full bra WAIT;\n"
            "DONE: mov.b32 $0, 0; }"
        )

    def fill(self, copied_bytes: int, stage_bytes: int, first: int, copy: str) -> str:
        """PTX that, if $1 is not 0, waits until stage $2 has been read (parity $3) and then runs `copy`. `copy` is PTX that
        copies `copied_bytes` to the stage's address, in register `to`, and arrives at the barrier in register `bar`. Stages of
        `stage_bytes` start at byte `first` of shared memory."""
        return f"""{{ .reg .pred skip, done; .reg .b32 at, bar, to;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; mad.lo.u32 bar, $2, 8, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{self.start + 8 * self.stages}], $3; @!done bra WAIT;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{self.start}], {copied_bytes};
            add.u32 bar, bar, {self.start}; mad.lo.u32 to, $2, {stage_bytes}, at; add.u32 to, to, {first};
            {copy}
            DONE: mov.b32 $0, 0; }}"""

    @property
    def give(self) -> str:
        """PTX that arrives at the empty barrier of stage $1, in threads whose $2 is not 0; that must be one thread of each
        warp."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 at, $1, 8, at; setp.ne.s32 p, $2, 0;\n"
            f"@p mbarrier.arrive.shared::cta.b64 _, [at+{self.start + 8 * self.stages}]; mov.b32 $0, 0; }}"
        )


@gluon.jit
def make_barriers(shared, C: gl.constexpr):
    """Initialises the barriers of all stages and returns them for Triton's operations. A fence and a block barrier must
    follow."""
    barriers = view(shared, C.regions, "barriers", gl.int64, [2 * C.stages, 1], mbarrier.MBarrierLayout())
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.init, "=r,r", [thread])
    return barriers


@gluon.jit
def acquire(barriers, stage, phase, C: gl.constexpr):
    """Loader: waits until a stage is empty, sets the expected bytes, and returns its full barrier."""
    full = barriers.index(stage)
    mbarrier.wait(barriers.index(C.stages + stage), phase)
    mbarrier.expect(full, C.stage_bytes)
    return full


@gluon.jit
def wait_full(stage, phase, there, C: gl.constexpr):
    """Math warps: wait until a stage is full. Return at once if `there` is False, which means that no stage follows."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.wait, "=r,r,r,r", [thread * 0 + stage, thread * 0 + phase, (thread >= 0) & there])


@gluon.jit
def release(stage, exists, C: gl.constexpr):
    """Math warps: mark a stage as empty; do nothing if `exists` is False."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.give, "=r,r,r", [thread * 0 + stage, ((thread & 31) == 0) & exists])


@gluon.jit
def advance(stage, phase, by: gl.constexpr, C: gl.constexpr):
    """Returns the index of the stage `by` stages later and its phase; `by` divides C.stages."""
    stage = gl.where(stage + by == C.stages, 0, stage + by)
    return stage, gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def previous(stage, C: gl.constexpr):
    """Returns the index of the stage before this one."""
    return gl.where(stage == 0, C.stages, stage) - 1
