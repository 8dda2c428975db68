"""Taps of a window read from a strip (parts/strip_ring.py) by address, as PTX: a few instructions a tap.

A place is an address in shared memory: that of a row of the strip, and 16 more in the lanes that read the second 16 bytes of
a row. Strips start at multiples of 1 KiB, so the address says by itself how the row's 16-byte chunks are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.ptx import lut
from lowbit.kernels.parts.strip_ring import StripRing

ZERO_BYTES = 64
"""Bytes of zeros, at a multiple of as many: as long as a row, so that its chunks may be exchanged too."""

_TURN = lut(lambda turn, mask, place: (turn & mask) ^ place)


@dataclass(frozen=True)
class StripTaps(StripRing):
    """As StripRing, with strips of `boxes` copies each."""

    boxes: int = 1

    @property
    def copy_strip(self) -> str:
        """As StripRing's, where one copy brings rows / boxes rows."""
        rows = self.rows // self.boxes
        copy = (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [to], [$4, {column, row}], [bar];\n"
        )
        turn = f"add.u32 to, to, {rows * self.row_bytes}; add.s32 row, row, {rows};\n"
        full, empty = self.strips.start, self.strips.start + 8 * self.strips.stages
        return (
            "{ .reg .pred skip, done; .reg .b32 at, bar, to, column, row; setp.eq.s32 skip, $1, 0; @skip bra DONE;\n"
            "mov.u32 at, global_smem; mad.lo.u32 bar, $2, 8, at;\n"
            f"WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{empty}], $3; @!done bra WAIT;\n"
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{full}], {self.copied_bytes};\n"
            f"add.u32 bar, bar, {full}; mov.u32 column, 0; mov.b32 row, $5;\n"
            f"mad.lo.u32 to, $2, {self.strip_bytes}, at; add.u32 to, to, {self.x_start};\n"
            + turn.join([copy] * self.boxes)
            + "DONE: mov.b32 $0, 0; }"
        )

    @property
    def place(self) -> str:
        """$0: the place of row $1 of strip 0 for thread $2."""
        return (
            "{ .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 $0, $1, " + f"{self.row_bytes}, at; and.b32 at, $2, 16; "
            f"add.u32 $0, $0, at; add.u32 $0, $0, {self.x_start}; }}"
        )  # fmt: skip

    @property
    def lane_place(self) -> str:
        """$0: the address $1 bytes into shared memory, and 16 more for each of the four threads of a row; $2 is the thread."""
        return "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 $0, $1, at; and.b32 at, $2, 3; mad.lo.u32 $0, at, 16, $0; }"

    @property
    def tap(self) -> str:
        """The row at place $n as it lies, n = `loaded` registers; at place $n + 1, the zeros, where $n + 2 is 0.

        Four registers are 32 bytes of K of operand A (ldmatrix.x4: rows 0 to 7, 8 to 15, the same 16 bytes on).
        """
        n = self.loaded
        place, zeros, inside = (f"${n + i}" for i in range(3))
        mask = 16 * (self.row_bytes // 16 - 1)
        lines = [
            f".reg .pred inside; .reg .b32 at, turn; setp.ne.s32 inside, {inside}, 0; shr.u32 turn, {place}, 3;",
            f"lop3.b32 at, turn, {mask}, {place}, 0x{_TURN:02x}; selp.b32 at, at, {zeros}, inside;",
        ]
        for step in range(self.row_bytes // 32):
            if step > 0:
                lines.append(f"xor.b32 at, at, {32 * step};")
            to = ", ".join(f"${4 * step + i}" for i in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{to}}}, [at];")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def tap_constraints(self) -> str:
        """Of `tap`."""
        return ",".join(["=&r"] * self.loaded + ["r"] * 3)
