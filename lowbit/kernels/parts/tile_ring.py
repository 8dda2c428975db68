"""Tiles of pixels in shared memory, as PTX: copies of boxes of a matrix, and their rows as operand A of wgmma.

Each warpgroup has a ring of its own, filled by one warp for it alone. Barriers: parts/stages.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.stages import StageBarriers


@dataclass(frozen=True)
class TileRing:
    """Stages of `rows` x `row_bytes` (32, 64 or 128: the swizzle of the copies) from byte `start` of shared memory on."""

    barriers: StageBarriers
    start: int
    rows: int
    row_bytes: int

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.rows * self.row_bytes

    @property
    def copy(self) -> str:
        """Waits until stage $1 has been read (parity $2), then fills it: the map $3 from byte $4 of row $5 on."""
        full, empty = self.barriers.start, self.barriers.start + 8 * self.barriers.stages
        return f"""{{ .reg .pred done; .reg .b32 at, bar, to;
            mov.u32 at, global_smem; mad.lo.u32 bar, $1, 8, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{empty}], $2; @!done bra WAIT;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{full}], {self.stage_bytes};
            add.u32 bar, bar, {full};
            mad.lo.u32 to, $1, {self.stage_bytes}, at; add.u32 to, to, {self.start};
            cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [to], [$3, {{$4, $5}}], [bar];
            mov.b32 $0, 0; }}"""

    @property
    def own(self) -> str:
        """Where thread $1 finds what it reads of stage 0: row 16 * warp (of four) + lane % 16, its 16 bytes lane / 16."""
        chunks = self.row_bytes // 16
        return f"""{{ .reg .b32 row, chunk, turn, at;
            and.b32 row, $1, 15; bfe.u32 turn, $1, 5, 2; mad.lo.u32 row, turn, 16, row;
            mul.lo.u32 row, row, {self.row_bytes}; bfe.u32 turn, row, 7, {chunks.bit_length() - 1};
            bfe.u32 chunk, $1, 4, 1; xor.b32 chunk, chunk, turn;
            mov.u32 at, global_smem; add.u32 at, at, {self.start}; add.u32 at, at, row; mad.lo.u32 $0, chunk, 16, at; }}"""

    def read(self, first: int, size: int, bits: int) -> str:
        """Bytes `first` to first + size of the row at $n as operand A: even channels, then odd ones, of 4-bit codes."""
        loaded = size // 8
        n = loaded * 8 // bits
        lines = [".reg .b32 at, p<4>;"]
        for step in range(size // 32):
            at = 4 * step
            lines += [
                f"xor.b32 at, ${n}, {first + 32 * step};",
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {p0, p1, p2, p3}, [at];",
            ]
            for i in range(4):
                if bits == 8:
                    lines.append(f"mov.b32 ${at + i}, p{i};")
                else:
                    lines.append(f"and.b32 ${at + i}, p{i}, 0x0F0F0F0F; shr.b32 p{i}, p{i}, 4;")
                    lines.append(f"and.b32 ${loaded + at + i}, p{i}, 0x0F0F0F0F;")
        return "{\n" + "\n".join(lines) + "\n}"
