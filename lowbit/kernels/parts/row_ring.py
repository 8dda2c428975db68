"""The ring of a warp for weights that are halves as `nn.Linear` holds them, row by row: no copy of them in another order.

A slot holds 16 rows of 128 k in two tiles of 64 k, rows of 128 bytes:

    | k 0 to 63: row 0, row 1, .. row 15 | k 64 to 127: row 0, .. |

The eight pieces of 16 bytes of row r lie in the order c ^ (r & 7): eight lanes that copy a row, and `ldmatrix`, which reads the
same piece of eight rows, then use all banks once. Each copy of a warp takes whole lines, 128 bytes of four rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.ring import Ring
from lowbit.kernels.parts.step import K_STEPS

TILE_BYTES = 2048
"""16 rows of 64 k."""


@dataclass(frozen=True)
class RowRing(Ring):
    """A ring of rows; `ragged`: the last strip may have rows that do not exist, in whose places zeros are copied."""

    ragged: bool = False

    def copy_rows(self, d: int, slices: int) -> str:
        """$1 and $2 where lane 8 r + c copies piece c of row r, and of row r + 4, to; $3 and $4 where rows r and r + 8 of the
        warp's first strip come from at step 0, $5 bytes from strip to strip, $6 bytes of four rows, $7 how many k exist from
        there on at step d, $8 rows. Steps of K of a warp are `slices` apart."""
        strip, ahead = d % self.strips, 256 * (d // self.strips * slices)
        lines = [".reg .b32 size; .reg .b64 row0, row4, row8, row12; .reg .pred some;"]
        for row, base in ((0, 3), (8, 4)):
            lines.append(f"mad.wide.s32 row{row}, $5, {strip}, ${base}; mad.wide.s32 row{row + 4}, $6, 1, row{row};")
        for quad in range(4):
            for tile in range(2):
                bounds = [f"$7, {64 * tile}"] if self.tail else []
                bounds += [f"$8, {16 * strip + 4 * quad}"] if self.ragged else []
                for i, bound in enumerate(bounds):
                    lines.append(f"setp.gt.s32 some, {bound}; selp.b32 size, {'size' if i else 16}, 0, some;")
                to, size = self.slot(d) + TILE_BYTES * tile + 512 * quad, ", size" if bounds else ""
                source = f"[row{4 * quad}+{ahead + 128 * tile}]"
                lines.append(f"cp.async.cg.shared.global.L2::256B [${1 + quad % 2}+{to}], {source}, 16{size};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    def read(self, d: int, pending: int) -> str:
        """Waits until at most `pending` groups of copies are under way, then reads the A fragments of slot d.

        Inputs: for each of four pairs of pieces, where lane l finds piece l / 16 of row l % 16.
        """
        count = self.step.words
        lines = [f"cp.async.wait_group {pending};", "bar.warp.sync 0xffffffff;"]
        for i in range(K_STEPS):
            out = ", ".join(f"${4 * i + j}" for j in range(4))
            at = self.slot(d) + TILE_BYTES * (i // 4)
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{out}}}, [${count + i % 4}+{at}];")
        return "{\n" + "\n".join(lines) + "\n}"
