"""Strips of pixels in shared memory, as PTX: copies, and taps of a window read from a strip as operand A.

A strip contains every pixel under the windows of a tile once, in memory order: `rows` rows of `row_bytes`. For output pixel m
of a tile, the tap (down, across) is strip row m + down * width + across; outside the image zeros are read instead. The weights
of all taps stay in shared memory for the kernel's lifetime. Strips and weights each have a set of the barriers of
parts/pipeline.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.ptx import lut
from lowbit.kernels.parts.pipeline import StageBarriers


@dataclass(frozen=True)
class StripRing:
    """PTX for strips of x and resident weights. `zeros`, `x_start` and `w_start` are byte offsets in shared memory. `bits`, 4
    or 8, is the width of a code of x."""

    strips: StageBarriers
    weights: StageBarriers
    zeros: int
    x_start: int
    w_start: int
    rows: int
    row_bytes: int
    w_bytes: int
    bits: int

    @property
    def strip_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def copied_bytes(self) -> int:
        return self.strip_bytes

    @property
    def clear(self) -> str:
        """PTX that writes the 16 bytes of zeros, in threads whose index $1 is below 4."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.lt.u32 p, $1, 4; mad.lo.u32 at, $1, 4, at;\n"
            f"@p st.shared.b32 [at+{self.zeros}], 0; mov.b32 $0, 0; }}"
        )

    @property
    def copy_strip(self) -> str:
        """PTX that, if $1 is not 0, waits until strip $2 has been read (parity $3), then fills it.

        The source starts at row $5, byte $6 of the tensor map $4.
        """
        copy = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [to], [$4, {$6, $5}], [bar];"
        return self.strips.fill(self.copied_bytes, self.strip_bytes, self.x_start, copy)

    @property
    def copy_weights(self) -> str:
        """PTX that, if $1 is not 0, copies all weights from address $2."""
        return f"""{{ .reg .pred skip; .reg .b32 at, to;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; add.u32 to, at, {self.w_start}; add.u32 at, at, {self.weights.start};
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {self.w_bytes};
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$2], {self.w_bytes}, [at];
            DONE: mov.b32 $0, 0; }}"""

    @property
    def loaded(self) -> int:
        """Number of registers per thread with the packed codes of a tap."""
        return self.row_bytes // 8

    @property
    def registers(self) -> int:
        """Number of registers of operand A of a tap. 4-bit codes are unpacked to the even channels, then the odd ones."""
        return self.loaded * 8 // self.bits

    @property
    def read(self) -> str:
        """PTX that reads row $n + 1 of strip $n as operand A, for thread $n + 3, where n = `registers`; reads zeros where $n +
        2 is 0.

        Four registers are one wgmma of 32 bytes of K (ldmatrix.x4: rows 0 to 7, 8 to 15, then the next 16 bytes of both).
        """
        n = self.registers
        strip, row, inside, thread = (f"${n + i}" for i in range(4))
        chunks = self.row_bytes // 16
        lines = [
            ".reg .pred inside; .reg .b32 at, none, chunk, turn, word, p<4>;",
            f"mov.u32 none, global_smem; setp.ne.s32 inside, {inside}, 0;",
            f"mad.lo.u32 at, {strip}, {self.strip_bytes}, none; mad.lo.u32 at, {row}, {self.row_bytes}, at;",
            f"add.u32 at, at, {self.x_start}; add.u32 none, none, {self.zeros};",
            f"bfe.u32 chunk, {thread}, 4, 1; mul.lo.u32 turn, {row}, {self.row_bytes};",
            f"bfe.u32 turn, turn, 7, {chunks.bit_length() - 1}; xor.b32 chunk, chunk, turn;",
        ]
        for step in range(chunks // 2):
            lines += [
                f"xor.b32 word, chunk, {2 * step}; mad.lo.u32 word, word, 16, at; selp.b32 word, word, none, inside;",
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {p0, p1, p2, p3}, [word];",
            ]
            for i in range(4):
                at = 4 * step + i
                if self.bits == 8:
                    lines.append(f"mov.b32 ${at}, p{i};")
                else:
                    lines.append(f"and.b32 ${at}, p{i}, 0x0F0F0F0F; shr.b32 p{i}, p{i}, 4;")
                    lines.append(f"and.b32 ${self.loaded + at}, p{i}, 0x0F0F0F0F;")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def read_constraints(self) -> str:
        return ",".join(["=&r"] * self.registers + ["r"] * 4)


# Taps of a window, read from a strip by address, as PTX: a few instructions per tap.
#
# A place is the shared-memory address of a row of the strip, plus 16 in the lanes that read the second 16 bytes of a row.
# Strips are aligned to 1 KiB, so the swizzle of the row's 16-byte chunks can be computed from the address alone.

_TURN = lut(lambda turn, mask, place: (turn & mask) ^ place)


@dataclass(frozen=True)
class StripPlaces(StripRing):
    """A StripRing whose rows are read by place. `zeros` are as long as a row and aligned to their size."""

    @property
    def place(self) -> str:
        """PTX that returns in $0 the place of row $1 of strip 0 for thread $2."""
        return (
            "{ .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 $0, $1, " + f"{self.row_bytes}, at; and.b32 at, $2, 16; "
            f"add.u32 $0, $0, at; add.u32 $0, $0, {self.x_start}; }}"
        )  # fmt: skip

    @property
    def tap(self) -> str:
        """PTX that reads the row at place $n, where n = `loaded`, or the zeros at place $n + 1 if $n + 2 is 0.

        Four registers are 32 bytes of K of operand A (ldmatrix.x4: rows 0 to 7, 8 to 15, then the next 16 bytes of both).
        """
        n = self.loaded
        place, zeros, inside = (f"${n + i}" for i in range(3))
        mask = 16 * (self.row_bytes // 16 - 1)
        lines = [
            f".reg .pred inside; .reg .b32 at, turn; setp.ne.s32 inside, {inside}, 0; shr.u32 turn, {place}, 3;",
            f"lop3.b32 at, turn, {mask}, {place}, 0x{_TURN:02x}; selp.b32 at, at, {zeros}, inside;",
        ]
        for step in range(self.row_bytes // 32):
            if step > 0:  # from the chunks of the step before to those of this one
                lines.append(f"xor.b32 at, at, {32 * (step ^ step - 1)};")
            to = ", ".join(f"${4 * step + i}" for i in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{to}}}, [at];")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def tap_constraints(self) -> str:
        return ",".join(["=&r"] * self.loaded + ["r"] * 3)
