"""A ring buffer in shared memory that belongs to one warp, filled by cp.async and read without a block barrier.

Each lane copies 4, 8 or 16 bytes at a time. A warp waits for its own copies (`cp.async.wait_group`, then `bar.warp.sync`) and
reads them back. A slot holds one k block (128 columns of K) of one m16 row block: the codes in the order of global memory, and
the scales. A slot of x holds 128 columns of all tokens and is shared by the row blocks of the warp:

    | slot 0: codes, scales | slot 1 | ... | slot depth - 1 | x slot 0 | ... | x slot x_slots - 1 |

x is stored in 8 x 8 matrices of 128 bytes, so that `ldmatrix` reads B fragments without bank conflicts. Rows of tokens that do
not exist are never read from global memory. In tiles of 8 tokens their rows of shared memory are zeroed once. With one token
that saves seven of eight copies of x: 119 us in a decode step of 32 layers of 5 kernels (H200, 2026-11-22, Llama-3-8B's shape,
int4).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.fields import WORD_GROUPS
from lowbit.kernels.parts.gluon import gl
from lowbit.kernels.parts.k_block import BLOCK_MMAS, BLOCK_TILES, KBlock


@dataclass(frozen=True)
class Ring:
    """The ring of a warp with `row_blocks` m16 row blocks and `rounds` k blocks per main-loop iteration.

    `tail`: True if K is not a multiple of an iteration. Copies then stop at the end of K and fill the rest of a slot with
    zeros. `slots`: number of slots; 0: `iteration_blocks`. It must divide `iteration_blocks`, and be a multiple or a divisor of
    `row_blocks`.
    """

    k_block: KBlock
    row_blocks: int
    rounds: int
    tail: bool
    slots: int = 0

    fenced = False
    """True if register fences make a warp start the products of a (row block, k block) pair before it waits for the slot of the
    pair three later."""

    def __post_init__(self) -> None:
        if self.iteration_blocks % self.depth or (self.depth > self.row_blocks and self.depth % self.row_blocks):
            raise ValueError(f"{self.depth} slots do not divide {self.rounds} k blocks of {self.row_blocks} row blocks")

    @property
    def iteration_blocks(self) -> int:
        """Number of (row block, k block) pairs in an iteration of the main loop."""
        return self.row_blocks * self.rounds

    @property
    def depth(self) -> int:
        """Number of slots, all of which are in flight."""
        return self.slots or self.iteration_blocks

    @property
    def x_slots(self) -> int:
        """Number of x slots. One is enough where the ring holds less than one k block of all row blocks: its x is read before
        the next x is copied."""
        return max(1, self.depth // self.row_blocks)

    @property
    def code_bytes(self) -> int:
        return BLOCK_TILES * 128 * self.k_block.bits

    @property
    def scale_bytes(self) -> int:
        return 8 * self.k_block.groups * self.k_block.pair_bytes

    @property
    def scale_copy(self) -> int:
        """Bytes of scales that each lane copies; with fewer scales than lanes, several lanes copy the same scales."""
        return max(4, self.scale_bytes // 32) if self.scale_bytes else 0

    @property
    def slot_bytes(self) -> int:
        return self.code_bytes + 32 * self.scale_copy

    @property
    def x_bytes(self) -> int:
        return self.k_block.n8_tiles * 8 * 256

    @property
    def bytes(self) -> int:
        return self.depth * self.slot_bytes + self.x_slots * self.x_bytes

    def slot(self, d: int) -> int:
        """Byte offset of the slot that pair d uses."""
        return d % self.depth * self.slot_bytes

    def x_slot(self, d: int) -> int:
        """Byte offset of the x slot that pair d uses."""
        return self.depth * self.slot_bytes + d // self.row_blocks % self.x_slots * self.x_bytes

    # ---- PTX, for an address in shared memory that already includes the lane's offset

    def copy_codes(self, d: int) -> str:
        """PTX that copies codes and scales. Destinations: $1 ring + 16 lane, $2 ring + scale_copy * lane. Sources: $3 codes +
        16 lane, $4 scales of the lane. $5 lane, $6 number of tiles left along K."""
        lines = [".reg .b32 left, size, scale_size; .reg .pred some, low;", "setp.lt.s32 low, $5, 16;"]
        size, scale_size = "", ""
        if self.tail:
            lines.append(f"min.s32 left, $6, {BLOCK_TILES}; mul.lo.s32 left, left, {128 * self.k_block.bits};")
            lines.append("shl.b32 size, $5, 4; sub.s32 left, left, size; setp.gt.s32 some, $6, 0;")
            lines.append(f"selp.b32 scale_size, {self.scale_copy}, 0, some;")
            size, scale_size = ", size", ", scale_size"
        for done in range(0, self.code_bytes, 512):
            if self.tail:
                lines.append(f"setp.gt.s32 some, left, {done}; selp.b32 size, 16, 0, some;")
            half = "@low " if self.code_bytes - done < 512 else ""
            to = self.slot(d) + done
            lines.append(f"{half}cp.async.cg.shared.global.L2::256B [$1+{to}], [$3+{done}], 16{size};")
        if self.scale_copy:
            cache, to = "cg" if self.scale_copy == 16 else "ca", self.slot(d) + self.code_bytes
            lines.append(f"cp.async.{cache}.shared.global [$2+{to}], [$4], {self.scale_copy}{scale_size};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    @property
    def skips_absent_tokens(self) -> bool:
        """True if copies skip tokens that do not exist, instead of writing zeros for them. With 16 tokens they write zeros,
        since ptxas would generate branches in the main loop: int4, N = K = 8192, M 16 took 15.05 us instead of 14.29 (H200,
        2026-11-23)."""
        return self.k_block.tokens == 8

    def copy_x(self, d: int, n8_tile: int) -> str:
        """PTX that copies x. Operands in lane 4 g + t: $1 ring + 16 (8 t + g), $2 address of row g of the n8 tile at column
        k + 8 t, $3 bytes of a copy (16, or 0 where the token does not exist), $4 number of columns of K from column k + 8 t
        on."""
        only = "@token " if self.skips_absent_tokens else ""
        size = ", size" if self.tail or not self.skips_absent_tokens else ""
        lines = [".reg .b32 size; .reg .pred token, some;", "setp.ne.s32 token, $3, 0; mov.b32 size, $3;"]
        for i in range(4):
            if self.tail:
                lines.append(f"setp.gt.s32 some, $4, {32 * i}; selp.b32 size, $3, 0, some;")
            to = self.x_slot(d) + 2048 * n8_tile + 512 * i
            lines.append(f"{only}cp.async.ca.shared.global [$1+{to}], [$2+{64 * i}], 16{size};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    def clear_x(self, n8_tile: int) -> str:
        """PTX that zeroes the rows of x that `copy_x` never writes, in all slots. Its operands $1 and $2 are the operands $1
        and $3 of `copy_x`."""
        lines = [".reg .b32 nil; .reg .pred absent;", "mov.b32 nil, 0; setp.eq.s32 absent, $2, 0;"]
        for slot in range(self.x_slots):
            for i in range(4):
                to = self.x_slot(slot * self.row_blocks) + 2048 * n8_tile + 512 * i
                lines.append(f"@absent st.shared.v4.b32 [$1+{to}], {{nil, nil, nil, nil}};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    @property
    def read_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (self.k_block.words + self.k_block.scale_words)

    @property
    def read_constraints(self) -> str:
        return ",".join(["=&r"] * (self.k_block.words + self.k_block.scale_words) + ["r"] * 4)

    def read(self, d: int, pending: int) -> str:
        """PTX that waits until at most `pending` groups of copies are in flight, then reads the slot of pair d: words, then
        scale words.

        Inputs: ring + 16 lane, ring + 8 lane, ring + 4 lane, and ring + pair_bytes times the lane group.
        """
        lines = [f"cp.async.wait_group {pending};", "bar.warp.sync 0xffffffff;", *loads_of(self.k_block, self.slot(d))]
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def x_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.k_block.token_words

    @property
    def x_constraints(self) -> str:
        return ",".join(["=&r"] * self.k_block.token_words + ["r"])

    def read_x(self, d: int) -> str:
        """PTX that reads the B fragments of all tokens for the k block of pair d. Input: ring + 16 lane."""
        count = self.k_block.token_words
        lines = []
        for i in range(count // 4):
            out = ", ".join(f"${4 * i + j}" for j in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{out}}}, [${count}+{self.x_slot(d) + 512 * i}];")
        return "{\n" + "\n".join(lines) + "\n}"


def loads_of(k_block: KBlock, start: int) -> list[str]:
    """PTX that loads a lane's words of a k block from shared memory, codes and then scales, which begin `start` bytes after
    `Ring.read`'s inputs."""
    count, lines, out = k_block.words + k_block.scale_words, [], 0
    for words in BLOCK_TILES * WORD_GROUPS[k_block.bits]:
        base = {4: count, 2: count + 1, 1: count + 2}[words]
        lines.append(_load(words, out, base, start))
        out, start = out + words, start + 128 * words
    for _ in range(k_block.groups):
        words = k_block.pair_bytes // 4
        lines.append(_load(words, out, count + 3, start))
        out, start = out + words, start + 32 * words
    return lines


def _load(words: int, out: int, base: int, offset: int) -> str:
    if words == 1:
        return f"ld.shared.b32 ${out}, [${base}+{offset}];"
    registers = ", ".join(f"${out + i}" for i in range(words))
    return f"ld.shared.v{words}.b32 {{{registers}}}, [${base}+{offset}];"


# The ring of a warp for weights that are halves as `nn.Linear` stores them, row by row, without a reordered copy.
#
# A slot holds 16 rows of 128 columns of K, in two tiles of 64 columns. A row of a tile has 128 bytes:
#
#     | columns 0 to 63: row 0, row 1, .. row 15 | columns 64 to 127: row 0, .. |
#
# Vector c of the eight 16-byte vectors of row r is stored at index c ^ (r & 7). So neither lanes that copy a row nor
# `ldmatrix`, which reads the same vector of eight rows, have bank conflicts. Each copy of a warp reads whole 128-byte lines of
# four rows.
TILE_BYTES = 2048
"""Bytes of 16 rows of 64 columns of K, as 16-bit floats."""


@dataclass(frozen=True)
class RowRing(Ring):
    """A ring for 16-bit weights in the order of `nn.Linear`. `ragged`: the last row block may have fewer than 16 rows; missing
    rows are filled with zeros."""

    ragged: bool = False

    def copy_rows(self, d: int, slices: int) -> str:
        """PTX that copies rows of w. Operands in lane 8 r + c: $1 and $2 are the destinations of vector c of rows r and r + 4;
        $3 and $4 are the sources of rows r and r + 8 of the warp's first row block at pair 0. $5 bytes between row blocks, $6
        bytes of four rows, $7 number of columns of K from the source of pair d on, $8 number of rows. k blocks of a warp are
        `slices` apart."""
        row_block, ahead = d % self.row_blocks, 256 * (d // self.row_blocks * slices)
        lines = [".reg .b32 size; .reg .b64 row0, row4, row8, row12; .reg .pred some;"]
        for row, base in ((0, 3), (8, 4)):
            lines.append(f"mad.wide.s32 row{row}, $5, {row_block}, ${base}; mad.wide.s32 row{row + 4}, $6, 1, row{row};")
        for quad in range(4):
            for tile in range(2):
                bounds = [f"$7, {64 * tile}"] if self.tail else []
                bounds += [f"$8, {16 * row_block + 4 * quad}"] if self.ragged else []
                for i, bound in enumerate(bounds):
                    lines.append(f"setp.gt.s32 some, {bound}; selp.b32 size, {'size' if i else 16}, 0, some;")
                to, size = self.slot(d) + TILE_BYTES * tile + 512 * quad, ", size" if bounds else ""
                source = f"[row{4 * quad}+{ahead + 128 * tile}]"
                lines.append(f"cp.async.cg.shared.global.L2::256B [${1 + quad % 2}+{to}], {source}, 16{size};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    def read(self, d: int, pending: int) -> str:
        """PTX that waits until at most `pending` groups of copies are in flight, then reads the A fragments of the slot of pair
        d.

        Inputs in lane l: for each of four pairs of vectors, the address of vector l // 16 of the pair, in row l % 16.
        """
        count = self.k_block.words
        lines = [f"cp.async.wait_group {pending};", "bar.warp.sync 0xffffffff;"]
        for i in range(BLOCK_MMAS):
            out = ", ".join(f"${4 * i + j}" for j in range(4))
            at = self.slot(d) + TILE_BYTES * (i // 4)
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{out}}}, [${count + i % 4}+{at}];")
        return "{\n" + "\n".join(lines) + "\n}"
