"""Two blocks of a cluster that have summed one half of K each: every one gives half of its columns to the other one and keeps
the total of the rest.

Sums go from registers to the shared memory of the other block, into the stages, which by then nobody reads, and to the same
thread there: no layout changes, and four sums travel together (`st.async`). Two barriers in each block, after those of the
stages: `room`, 1 arrival from each warp of the other block, says that its stages may be written, `sums` counts bytes that have
come. That both have been made is what the one barrier of the whole cluster says, for which every warp of a block has to arrive:
also those with no work. None of this is an arrival that releases in the scope of the cluster: such a one is a fence of the
whole GPU.
Source: PTX ISA, distributed shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.gluon import gl, gluon, run


@dataclass(frozen=True)
class ClusterExchange:
    """Both barriers, from byte `start` of shared memory on, for `warps` warps that get `bytes` of sums together."""

    start: int
    warps: int
    bytes: int

    @property
    def init(self) -> str:
        """Thread $1 = 0 makes them."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.eq.s32 p, $1, 0;\n"
            f"@p mbarrier.init.shared::cta.b64 [at+{self.start}], {self.warps};\n"
            f"@p mbarrier.init.shared::cta.b64 [at+{self.start + 8}], 1;\n"
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [at+{self.start + 8}], {self.bytes};\n"
            "@p fence.mbarrier_init.release.cluster; mov.b32 $0, 0; }"
        )

    ready = "barrier.cluster.arrive.relaxed;\n mov.b32 $0, 0;"
    both_ready = "barrier.cluster.wait;\n mov.b32 $0, 0;"

    @property
    def make_room(self) -> str:
        """Block $1 of the cluster may write here, for all that a warp reads; the thread whose $2 is 0 says so."""
        return (
            "{ .reg .pred p; .reg .b32 at; bar.warp.sync 0xffffffff; mov.u32 at, global_smem; setp.eq.s32 p, $2, 0;\n"
            f"add.u32 at, at, {self.start}; mapa.shared::cluster.u32 at, at, $1;\n"
            "@p mbarrier.arrive.shared::cluster.b64 _, [at]; mov.b32 $0, 0; }"
        )

    @property
    def room(self) -> str:
        """Until the other block may be written."""
        return self._wait(0)

    @property
    def sums(self) -> str:
        """Until all sums are there."""
        return self._wait(8)

    def _wait(self, offset: int) -> str:
        return (
            "{ .reg .pred there; .reg .b32 at; mov.u32 at, global_smem;\n"
            f"WAIT: mbarrier.try_wait.parity.shared::cta.b64 there, [at+{self.start + offset}], 0;\n"
            "@!there bra WAIT; mov.b32 $0, 0; }"
        )

    @property
    def send(self) -> str:
        """Sums $4 to $7 to byte $8 of the shared memory of block $12; of their places the first one counts."""
        return (
            f"{{ .reg .b32 to, bar; mov.u32 to, global_smem; add.u32 bar, to, {self.start + 8}; add.u32 to, to, $8;\n"
            "mapa.shared::cluster.u32 to, to, $12; mapa.shared::cluster.u32 bar, bar, $12;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {$4, $5, $6, $7}, [bar];\n"
            "mov.b32 $0, 0; }"
        )

    take = "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $4; ld.shared.v4.b32 {$0, $1, $2, $3}, [at]; }"


@gluon.jit
def exchange_halves(low, high, half, C: gl.constexpr):
    """Of the sums of both halves of the columns those of `half`, 0 or 1, in total; the other block has the other half."""
    P: gl.constexpr = C.pair
    thread = gl.arange(0, C.threads, C.threads_layout)
    other = thread * 0 + (1 - half)
    run(P.both_ready, "=r,r", [thread])
    run(P.make_room, "=r,r,r", [other, thread & 31])
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.store_layout))
    columns = gl.arange(0, C.store_columns, gl.SliceLayout(0, C.store_layout))
    # A lane holds rows g and g + 8 of columns 2t and 2t + 1 (hardware/mma.py): 16 bytes for each 8 columns.
    of_row = rows // 16 * 512 + rows % 8 * 64
    of_column = columns // 8 * (16 * C.threads) + columns % 8 // 2 * 16
    place = of_row[:, None] + of_column[None, :]
    away = gl.where(half == 0, high, low).to(gl.int32, bitcast=True)
    kept = gl.where(half == 0, low, high)
    run(P.room, "=r,r", [thread])
    gl.inline_asm_elementwise(
        P.send, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [away, place, place * 0 + (1 - half)],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
    run(P.sums, "=r,r", [thread])
    came = gl.inline_asm_elementwise(
        P.take, "=r,=r,=r,=r,r,r,r,r", [place], dtype=gl.int32, is_pure=False, pack=4
    )  # fmt: skip
    return kept + came.to(kept.dtype, bitcast=True)


@gluon.jit
def arrive_cluster(warps: gl.constexpr, C: gl.constexpr):
    """For the barrier of the cluster, by a role of so many warps; all that warps without work have to do."""
    P: gl.constexpr = C.pair
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    thread = gl.arange(0, 32 * warps, layout)
    run(P.ready, "=r,r", [thread])
