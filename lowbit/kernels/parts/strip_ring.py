"""Strips of pixels and their weights in shared memory, as PTX: copies, and taps read from a strip as operand A.

A strip holds every pixel that the windows of a tile touch, once, in the order of memory: `rows` rows of `step_bytes` for each
block of channels. A tap of output row m is strip row m + down * width + across; where it lies outside the image, zeros are read
instead. Barriers: parts/stages.py, one set for strips and one for weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.stages import StageBarriers


@dataclass(frozen=True)
class StripRing:
    """`zeros`, `x_start` and `w_start` are bytes from the start of shared memory; `codes` is 4 or 8 bits of x."""

    strips: StageBarriers
    weights: StageBarriers
    zeros: int
    x_start: int
    w_start: int
    rows: int
    blocks: int
    step_bytes: int
    w_bytes: int
    bits: int

    @property
    def block_bytes(self) -> int:
        return self.rows * self.step_bytes

    @property
    def strip_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def clear(self) -> str:
        """Threads $1 below 4 write the 16 bytes of zeros."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.lt.u32 p, $1, 4; mad.lo.u32 at, $1, 4, at;\n"
            f"@p st.shared.b32 [at+{self.zeros}], 0; mov.b32 $0, 0; }}"
        )

    @property
    def copy_strip(self) -> str:
        """Where $1 is not 0: waits until strip $2 has been read (parity $3), then fills it, from row $5 of the map $4 on."""
        full, empty = self.strips.start, self.strips.start + 8 * self.strips.stages
        copies = "\n".join(
            f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            f" [to+{block * self.block_bytes}], [$4, {{column, $5}}], [bar]; add.u32 column, column, {self.step_bytes};"
            for block in range(self.blocks)
        )
        return f"""{{ .reg .pred skip, done; .reg .b32 at, bar, to, column;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; mad.lo.u32 bar, $2, 8, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{empty}], $3; @!done bra WAIT;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{full}], {self.strip_bytes};
            add.u32 bar, bar, {full}; mov.u32 column, 0;
            mad.lo.u32 to, $2, {self.strip_bytes}, at; add.u32 to, to, {self.x_start};
            {copies}
            DONE: mov.b32 $0, 0; }}"""

    @property
    def copy_weights(self) -> str:
        """Where $1 is not 0: waits until stage $2 has been read (parity $3), then fills it from $4."""
        full, empty = self.weights.start, self.weights.start + 8 * self.weights.stages
        return f"""{{ .reg .pred skip, done; .reg .b32 at, bar, to;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; mad.lo.u32 bar, $2, 8, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{empty}], $3; @!done bra WAIT;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{full}], {self.w_bytes};
            add.u32 bar, bar, {full};
            mad.lo.u32 to, $2, {self.w_bytes}, at; add.u32 to, to, {self.w_start};
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$4], {self.w_bytes}, [bar];
            DONE: mov.b32 $0, 0; }}"""

    @property
    def loaded(self) -> int:
        """Registers of packed codes of a tap that a thread loads."""
        return self.step_bytes // 8

    @property
    def registers(self) -> int:
        """Registers of operand A of a tap: 4-bit codes give even channels, then odd ones."""
        return self.loaded * 8 // self.bits

    @property
    def read(self) -> str:
        """Row $n + 2 of strip $n, block $n + 1 of thread $n + 4 as operand A; zeros where $n + 3 is 0.

        Four registers are one wgmma of 32 bytes of K (ldmatrix.x4: rows 0 to 7, 8 to 15, and the same 16 bytes on).
        """
        n = self.registers
        strip, block, row, inside, thread = (f"${n + i}" for i in range(5))
        chunks = self.step_bytes // 16
        lines = [
            ".reg .pred inside; .reg .b32 at, none, chunk, turn, word, p<4>;",
            f"mov.u32 none, global_smem; setp.ne.s32 inside, {inside}, 0;",
            f"mad.lo.u32 at, {strip}, {self.strip_bytes}, none; mad.lo.u32 at, {block}, {self.block_bytes}, at;",
            f"mad.lo.u32 at, {row}, {self.step_bytes}, at; add.u32 at, at, {self.x_start}; add.u32 none, none, {self.zeros};",
            f"bfe.u32 chunk, {thread}, 4, 1; mul.lo.u32 turn, {row}, {self.step_bytes};",
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
                    lines.append(
                        f"and.b32 ${at}, p{i}, 0x0F0F0F0F; shr.b32 p{i}, p{i}, 4; "
                        f"and.b32 ${self.loaded + at}, p{i}, 0x0F0F0F0F;"
                    )
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def read_constraints(self) -> str:
        return ",".join(["=&r"] * self.registers + ["r"] * 5)

    @property
    def hold(self) -> str:
        """Stores of the registers $1 to $n that never happen, $n + 1 being at least 0: they may not be written before."""
        quads = [", ".join(f"${1 + 4 * i + j}" for j in range(4)) for i in range(self.registers // 4)]
        stores = [f"@p st.shared.v4.b32 [at+{16 * i}], {{{quad}}};" for i, quad in enumerate(quads)]
        return (
            f"{{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.eq.s32 p, ${self.registers + 1}, -1;\n"
            + "\n".join(stores)
            + "\nmov.b32 $0, 0; }"
        )
