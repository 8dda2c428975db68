"""The barriers of a ring of stages in shared memory, as PTX: who may read a stage, who may fill it again.

full[i]: 1 arrival and the bytes of stage i; empty[i]: 1 arrival from each reading warp. Triton's own operations on barriers
first bring all warps of a role together, which keeps them in step: all decode, then all wait for the tensor cores. Here a
warp waits and arrives for itself. That takes addresses, and so an allocation that is the first of its kernel, at offset 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageBarriers:
    """`stages` full barriers, then as many empty ones, from byte `start` of shared memory on."""

    start: int
    stages: int
    readers: int

    @property
    def init(self) -> str:
        """Thread $1 = 0 makes all of them."""
        full = [f"@p mbarrier.init.shared::cta.b64 [at+{self.start + 8 * i}], 1;" for i in range(self.stages)]
        empty = [
            f"@p mbarrier.init.shared::cta.b64 [at+{self.start + 8 * (self.stages + i)}], {self.readers};"
            for i in range(self.stages)
        ]
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.eq.s32 p, $1, 0;\n"
            + "\n".join(full + empty)
            + "\nmov.b32 $0, 0; }"
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


def hold(count: int) -> str:
    """Stores of the registers $1 to $count that never happen, the operand after them being at least 0.

    So they may not be written before; see `finish` of sm90/mixed_gemm.py.
    """
    quads = [", ".join(f"${1 + 4 * i + j}" for j in range(4)) for i in range(count // 4)]
    stores = [f"@p st.shared.v4.b32 [at+{16 * i}], {{{quad}}};" for i, quad in enumerate(quads)]
    return (
        f"{{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.eq.s32 p, ${count + 1}, -1;\n"
        + "\n".join(stores)
        + "\nmov.b32 $0, 0; }"
    )
