"""Split-K over the two blocks of a cluster: an exchange of partial sums through distributed shared memory.

Each block has summed one half of K for all columns. It sends the sums of one half of the columns to the other block, and adds
the sums that it receives to its own sums of the other half.

A thread writes its sums into the other block's stages, which are no longer read. The thread with the same index in the other
block reads them. So the layout stays the same, and `st.async` stores four sums at a time. Each block has two barriers after
those of the stages. `writable` completes after 1 arrival from each warp of the other block, whose stages may then be
overwritten. `received` completes when all bytes of the other block's sums have arrived.

One barrier of the cluster makes sure that both blocks have initialised these barriers. Every warp of a block arrives at it,
also warps without work. No arrival here has release semantics at cluster scope, since that would be a fence of the whole GPU.
Source: PTX ISA, distributed shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.gluon import gl, gluon, run


@dataclass(frozen=True)
class ClusterExchange:
    """The two barriers, from byte `start` of shared memory on; `warps` warps together receive `bytes` of sums."""

    start: int
    warps: int
    bytes: int

    @property
    def init(self) -> str:
        """PTX that initialises both barriers, in the thread whose $1 is 0."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.eq.s32 p, $1, 0;\n"
            f"@p mbarrier.init.shared::cta.b64 [at+{self.start}], {self.warps};\n"
            f"@p mbarrier.init.shared::cta.b64 [at+{self.start + 8}], 1;\n"
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [at+{self.start + 8}], {self.bytes};\n"
            "@p fence.mbarrier_init.release.cluster; mov.b32 $0, 0; }"
        )

    arrive = "barrier.cluster.arrive.relaxed;\n mov.b32 $0, 0;"
    wait_cluster = "barrier.cluster.wait;\n mov.b32 $0, 0;"

    @property
    def permit_writes(self) -> str:
        """PTX that permits block $1 of the cluster to write this block's stages, once the whole warp has read them. The thread
        whose $2 is 0 arrives."""
        return (
            "{ .reg .pred p; .reg .b32 at; bar.warp.sync 0xffffffff; mov.u32 at, global_smem; setp.eq.s32 p, $2, 0;\n"
            f"add.u32 at, at, {self.start}; mapa.shared::cluster.u32 at, at, $1;\n"
            "@p mbarrier.arrive.shared::cluster.b64 _, [at]; mov.b32 $0, 0; }"
        )

    @property
    def wait_writable(self) -> str:
        """PTX that waits until the other block's stages may be written."""
        return self._wait(0)

    @property
    def wait_received(self) -> str:
        """PTX that waits until all sums of the other block have arrived."""
        return self._wait(8)

    def _wait(self, offset: int) -> str:
        return (
            "{ .reg .pred done; .reg .b32 at; mov.u32 at, global_smem;\n"
            f"WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [at+{self.start + offset}], 0;\n"
            "@!done bra WAIT; mov.b32 $0, 0; }"
        )

    @property
    def send(self) -> str:
        """PTX that stores sums $4 to $7 at byte $8 of the shared memory of block $12. Addresses $9 to $11 are ignored."""
        return (
            f"{{ .reg .b32 to, bar; mov.u32 to, global_smem; add.u32 bar, to, {self.start + 8}; add.u32 to, to, $8;\n"
            "mapa.shared::cluster.u32 to, to, $12; mapa.shared::cluster.u32 bar, bar, $12;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {$4, $5, $6, $7}, [bar];\n"
            "mov.b32 $0, 0; }"
        )

    read = "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $4; ld.shared.v4.b32 {$0, $1, $2, $3}, [at]; }"


@gluon.jit
def exchange_halves(low, high, half, C: gl.constexpr):
    """Returns the total over both blocks for column half `half`, 0 or 1. The other block gets the total of the other half."""
    P: gl.constexpr = C.exchange
    thread = gl.arange(0, C.threads, C.threads_layout)
    other = thread * 0 + (1 - half)
    run(P.wait_cluster, "=r,r", [thread])
    run(P.permit_writes, "=r,r,r", [other, thread & 31])
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.store_layout))
    columns = gl.arange(0, C.store_columns, gl.SliceLayout(0, C.store_layout))
    # A lane holds rows g and g + 8 of columns 2t and 2t + 1 (hardware/mma.py), 16 bytes for each 8 columns.
    of_row = rows // 16 * 512 + rows % 8 * 64
    of_column = columns // 8 * (16 * C.threads) + columns % 8 // 2 * 16
    place = of_row[:, None] + of_column[None, :]
    sent = gl.where(half == 0, high, low).to(gl.int32, bitcast=True)
    own = gl.where(half == 0, low, high)
    run(P.wait_writable, "=r,r", [thread])
    gl.inline_asm_elementwise(
        P.send, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [sent, place, place * 0 + (1 - half)],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
    run(P.wait_received, "=r,r", [thread])
    received = gl.inline_asm_elementwise(
        P.read, "=r,=r,=r,=r,r,r,r,r", [place], dtype=gl.int32, is_pure=False, pack=4
    )  # fmt: skip
    return own + received.to(own.dtype, bitcast=True)


@gluon.jit
def arrive_cluster(warps: gl.constexpr, C: gl.constexpr):
    """Arrives at the barrier of the cluster, for a role of `warps` warps; idle warps do nothing else."""
    P: gl.constexpr = C.exchange
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    thread = gl.arange(0, 32 * warps, layout)
    run(P.arrive, "=r,r", [thread])
