"""Rows of packed images (pack/stem.py) in shared memory, as PTX: copies, and the windows of a pooled row as operand A.

A strip holds the rows and pixels that a tile of pooled outputs touches, as they lie: windows overlap, each begins one packed
pixel, 16 bytes, after the one before, and ldmatrix reads them overlapping. Rows m and m + 8 of a warp's 16 are columns 2 m and
2 m + 1 of the convolution, so that a thread holds the two columns of one pooled pixel; for m of 4 and more the other way round,
so that 8 rows lie in 8 different groups of banks.
Barriers: parts/stages.py, one set for strips, one for the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.stages import StageBarriers
from lowbit.pack.stem import PIXEL_BYTES

STEP_REGISTERS = 8
"""Registers that a thread loads of a row of a window: 64 bytes for each of 16 windows of a warp."""


@dataclass(frozen=True)
class StemRows:
    """`strip_bytes` from strip to strip; `rows` rows of `row_bytes` are copied; warps are `warp_pixels` packed pixels apart."""

    strips: StageBarriers
    weights: StageBarriers
    w_start: int
    w_bytes: int
    strip_bytes: int
    rows: int
    row_bytes: int
    warp_pixels: int

    @property
    def copy(self) -> str:
        """Where $1 is not 0: waits until strip $2 has been read (parity $3), then fills it from the map $4.

        The strip begins $5 words of 8 bytes into row $6 of image $7; there are zeros outside the image.
        """
        full, empty = self.strips.start, self.strips.start + 8 * self.strips.stages
        return f"""{{ .reg .pred skip, done; .reg .b32 at, bar, to;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; mad.lo.u32 bar, $2, 8, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{empty}], $3; @!done bra WAIT;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{full}], {self.rows * self.row_bytes};
            add.u32 bar, bar, {full}; mad.lo.u32 to, $2, {self.strip_bytes}, at;
            cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
                [to], [$4, {{$5, $6, $7}}], [bar];
            DONE: mov.b32 $0, 0; }}"""

    @property
    def copy_weights(self) -> str:
        """Where $1 is not 0: fills the room for weights from $2."""
        return f"""{{ .reg .pred skip; .reg .b32 at, to;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; add.u32 to, at, {self.w_start}; add.u32 at, at, {self.weights.start};
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {self.w_bytes};
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$2], {self.w_bytes}, [at];
            DONE: mov.b32 $0, 0; }}"""

    @property
    def registers(self) -> int:
        return STEP_REGISTERS * self.rows

    @property
    def read(self) -> str:
        """All rows of strip $n for thread $n + 1: of each row 64 bytes from each window's first pixel on, as operand A."""
        n = self.registers
        lines = [
            ".reg .b32 at, word, turn;",
            f"mov.u32 at, global_smem; mad.lo.u32 at, ${n}, {self.strip_bytes}, at;",
            f"shr.u32 word, ${n + 1}, 5; mad.lo.u32 at, word, {self.warp_pixels * PIXEL_BYTES}, at;",
            f"and.b32 word, ${n + 1}, 7; mad.lo.u32 at, word, {2 * PIXEL_BYTES}, at;",
            f"bfe.u32 word, ${n + 1}, 3, 1; bfe.u32 turn, ${n + 1}, 2, 1; xor.b32 word, word, turn;",
            f"mad.lo.u32 at, word, {PIXEL_BYTES}, at;",
            f"bfe.u32 word, ${n + 1}, 4, 1; mad.lo.u32 at, word, {PIXEL_BYTES}, at;",
        ]
        for i in range(0, n, 4):
            row, half = divmod(i, STEP_REGISTERS)
            registers = ", ".join(f"${i + j}" for j in range(4))
            place = row * self.row_bytes + half // 4 * 2 * PIXEL_BYTES
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{registers}}}, [at+{place}];")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def read_constraints(self) -> str:
        """Of `read`."""
        return ",".join(["=&r"] * self.registers + ["r", "r"])


POOL_LANES = """{ .reg .b32 p, left, below, e0, o0, e1, o1; .reg .pred turned;
    setp.ne.s32 turned, $9, 0;
    selp.b32 e0, $3, $2, turned; selp.b32 o0, $2, $3, turned; selp.b32 e1, $5, $4, turned; selp.b32 o1, $4, $5, turned;
    min.s32 o0, o0, $8; min.s32 below, o1, $8; min.s32 below, below, $7; min.s32 left, e1, $7;
    max.s32 p, o0, below; max.s32 $0, e0, left; max.s32 $0, $0, p;
    shfl.sync.up.b32 p, p, 4, 0, 0xFFFFFFFF; max.s32 $0, $0, p; max.s32 $0, $0, $6;
    shfl.sync.up.b32 p, below, 4, 0, 0xFFFFFFFF; max.s32 p, p, below; max.s32 $1, left, p; }"""
"""One output channel of a pooled pixel, in the thread that holds the 2 x 2 sums of its even and odd columns and rows.

$0 largest of the 3 x 3 sums, $1 largest of the lower three. Inputs: even and odd column of the upper row ($2, $3), of the lower
row ($4, $5), the other way round where $9 is not 0; $6 what $1 was for the pooled pixel above; $7 and $8 limits for the lower
row and for the odd column, the least number where they lie outside the image. The sums of the column to the left come from the
lane group before.
"""
