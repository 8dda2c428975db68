"""The pipeline of stages of a convolution, as PTX: copies by TMA's im2col mode, and unpacking of 4-bit codes.

A stage contains a k block: one tap of some pixels (pixels x step_bytes) and its weights (planes x outputs x step_bytes). There
is no loader warp: the warps that multiply and store also copy, and one thread issues the copies. Barriers: parts/pipeline.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.pipeline import StageBarriers


@dataclass(frozen=True)
class WindowRing:
    """PTX for stages of a convolution. `x_start` and `w_start` are byte offsets in shared memory; a stage of x has `pixels`
    rows of `step_bytes`."""

    barriers: StageBarriers
    x_start: int
    w_start: int
    pixels: int
    step_bytes: int
    w_bytes: int
    resident: bool

    @property
    def x_bytes(self) -> int:
        return self.pixels * self.step_bytes

    @property
    def copy(self) -> str:
        """PTX that, if $1 is not 0, waits until stage $2 has been read (parity $3), then fills it.

        x is copied with the descriptor at $4: channel bytes from $5 on, of the tap at column $9, row $10 of each window. The
        first window has its tap (0, 0) at column $6, row $7 of image $8. The weights are $12 bytes at $11, unless they are
        resident.
        """
        full, empty = self.barriers.start, self.barriers.start + 8 * self.barriers.stages
        size = "0" if self.resident else "$12"
        weights = f"""mad.lo.u32 to, $2, {self.w_bytes}, at; add.u32 to, to, {self.w_start};
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$11], $12, [bar];"""
        return f"""{{ .reg .pred skip, done; .reg .b32 at, bar, to; .reg .b16 across, down;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; mad.lo.u32 bar, $2, 8, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{empty}], $3; @!done bra WAIT;
            add.u32 to, {size}, {self.x_bytes}; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{full}], to;
            add.u32 bar, bar, {full};
            mad.lo.u32 to, $2, {self.x_bytes}, at; add.u32 to, to, {self.x_start};
            cvt.u16.u32 across, $9; cvt.u16.u32 down, $10;
            cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
                [to], [$4, {{$5, $6, $7, $8}}], [bar], {{across, down}};
            {"" if self.resident else weights}
            DONE: mov.b32 $0, 0; }}"""

    @property
    def registers(self) -> int:
        """Number of 32-bit registers per thread with the codes of a stage, for two of its warp's 16 rows."""
        return self.step_bytes // 8

    @property
    def decode(self) -> str:
        """PTX that reads the 4-bit codes of a stage and unpacks them to bytes. Outputs: `registers` words of even channels,
        then as many of odd channels. Inputs: index of the stage, index of the thread.

        Four registers are operand A of one wgmma of 32 bytes of K (ldmatrix.x4: rows 0 to 7, 8 to 15, then the next 16 bytes of
        both).
        """
        n, outputs = self.registers, 2 * self.registers
        chunks = self.step_bytes // 16
        lines = [
            ".reg .b32 at, row, chunk, turn, word, p<4>;",
            f"mov.u32 at, global_smem; mad.lo.u32 at, ${outputs}, {self.x_bytes}, at;",
            f"shr.u32 row, ${outputs + 1}, 5; shl.b32 row, row, 4;",
            f"and.b32 word, ${outputs + 1}, 15; or.b32 row, row, word;",
            f"mad.lo.u32 at, row, {self.step_bytes}, at; bfe.u32 chunk, ${outputs + 1}, 4, 1;",
            f"mul.lo.u32 turn, row, {self.step_bytes}; bfe.u32 turn, turn, 7, {chunks.bit_length() - 1};",
        ]
        for step in range(chunks // 2):
            lines += [
                f"add.u32 word, chunk, {2 * step}; xor.b32 word, word, turn; mad.lo.u32 word, word, 16, at;",
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {p0, p1, p2, p3}, " + f"[word+{self.x_start}];",
            ]
            for i in range(4):
                low, high = 4 * step + i, n + 4 * step + i
                lines.append(f"and.b32 ${low}, p{i}, 0x0F0F0F0F; shr.b32 p{i}, p{i}, 4; and.b32 ${high}, p{i}, 0x0F0F0F0F;")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def decode_constraints(self) -> str:
        return ",".join(["=&r"] * 2 * self.registers + ["r", "r"])

    def copy_weights(self, full: int) -> str:
        """PTX that, if $1 is not 0, copies resident weights to shared memory: $3 bytes from $2 and $5 bytes from $4. `full` is
        their barrier."""
        return f"""{{ .reg .pred skip, one; .reg .b32 at, to, size;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; add.u32 to, at, {self.w_start}; add.u32 at, at, {full}; add.u32 size, $3, $5;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], size;
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$2], $3, [at];
            setp.eq.s32 one, $5, 0; @one bra DONE; add.u32 to, to, $3;
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$4], $5, [at];
            DONE: mov.b32 $0, 0; }}"""
