"""A ring buffer in shared memory that belongs to one warp, filled by cp.async and read without a block barrier.

Each lane copies 4, 8 or 16 bytes at a time. A warp waits for its own copies (`cp.async.wait_group`, then `bar.warp.sync`) and
reads them back. A slot holds one k block (128 k) of one m16 row block: the codes as they lie in memory, and the scales. Slots
of x hold 128 k of all tokens and are shared by the row blocks of the warp:

    | slot 0: codes, scales | slot 1 | ... | slot depth - 1 | x slot 0 | ... | x slot x_slots - 1 |

x is stored in 8 x 8 matrices of 128 bytes, so that `ldmatrix` reads B fragments without bank conflicts. Rows of tokens that do
not exist are never read; in tiles of 8 tokens their places are zeroed once. At one token that saves seven of eight copies of x,
119 us in a decode step of 32 layers of 5 kernels (H200, 2026-11-22, Llama-3-8B's shape, int4).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.fields import WORD_GROUPS
from lowbit.kernels.parts.gluon import gl
from lowbit.kernels.parts.k_block import BLOCK_MMAS, BLOCK_TILES, KBlock


@dataclass(frozen=True)
class Ring:
    """The ring of a warp with `row_blocks` m16 row blocks and `rounds` k blocks per main-loop iteration.

    `tail`: K is no multiple of an iteration; copies are then limited to what exists, and the rest of a slot is filled with
    zeros. `slots`: number of slots, if not one for each of the `iteration_blocks`; it divides them, and is a multiple or
    divisor of `row_blocks`.
    """

    k_block: KBlock
    row_blocks: int
    rounds: int
    tail: bool
    slots: int = 0

    fenced = False
    """True if the products of a pair begin before the slot three pairs later is waited for, by register fences."""

    def __post_init__(self) -> None:
        if self.iteration_blocks % self.depth or (self.depth > self.row_blocks and self.depth % self.row_blocks):
            raise ValueError(f"{self.depth} slots do not divide {self.rounds} k blocks of {self.row_blocks} row blocks")

    @property
    def iteration_blocks(self) -> int:
        """Pairs of row block and k block in an iteration of the main loop."""
        return self.row_blocks * self.rounds

    @property
    def depth(self) -> int:
        """Number of slots, all of which are in flight."""
        return self.slots or self.iteration_blocks

    @property
    def x_slots(self) -> int:
        """Slots of x. One is enough where the ring holds less than 128 k: its x is read before the next x is copied."""
        return max(1, self.depth // self.row_blocks)

    @property
    def code_bytes(self) -> int:
        return BLOCK_TILES * 128 * self.k_block.bits

    @property
    def scale_bytes(self) -> int:
        return 8 * self.k_block.groups * self.k_block.pair_bytes

    @property
    def scale_copy(self) -> int:
        """Bytes of scales that each lane copies; with fewer scales than lanes, several lanes copy the same."""
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

    # ---- PTX. Addresses that the kernel passes include the lane's offset.

    def copy_codes(self, d: int) -> str:
        """Copies codes and scales. $1 ring + 16 lane, $2 ring + scale_copy * lane, $3 codes + 16 lane, $4 scales of the lane,
        $5 lane, $6 tiles left."""
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
        """True if copies skip the places of tokens that do not exist, instead of writing zeros. With 16 tokens ptxas makes
        branches of it in the main loop: int4, N = K = 8192, M 16 took 15.05 us, not 14.29 (H200, 2026-11-23)."""
        return self.k_block.tokens == 8

    def copy_x(self, d: int, n8_tile: int) -> str:
        """Copies x. $1 ring + 16 (8 t + g) for lane 4 g + t, $2 row g of the n8 tile at k + 8 t, $3 bytes of a copy (16, or 0
        where the token does not exist), $4 how many k exist from there on."""
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
        """Zeroes the places that `copy_x` never writes, in all slots: $1 and $2 are its $1 and $3."""
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
        """Waits until at most `pending` groups of copies are in flight, then reads slot d: words, then scale words.

        Inputs: ring + 16, 8 and 4 times the lane, ring + pair_bytes times the lane group.
        """
        count = self.k_block.words + self.k_block.scale_words
        lines = [f"cp.async.wait_group {pending};", "bar.warp.sync 0xffffffff;"]
        out, start = 0, self.slot(d)
        for words in BLOCK_TILES * WORD_GROUPS[self.k_block.bits]:
            base = {4: count, 2: count + 1, 1: count + 2}[words]
            lines.append(_load(words, out, base, start))
            out, start = out + words, start + 128 * words
        for _ in range(self.k_block.groups):
            words = self.k_block.pair_bytes // 4
            lines.append(_load(words, out, count + 3, start))
            out, start = out + words, start + 32 * words
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def x_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.k_block.token_words

    @property
    def x_constraints(self) -> str:
        return ",".join(["=&r"] * self.k_block.token_words + ["r"])

    def read_x(self, d: int) -> str:
        """Reads the B fragments of 128 k of all tokens, which were copied before slot d. Input: ring + 16 lane."""
        count = self.k_block.token_words
        lines = []
        for i in range(count // 4):
            out = ", ".join(f"${4 * i + j}" for j in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{out}}}, [${count}+{self.x_slot(d) + 512 * i}];")
        return "{\n" + "\n".join(lines) + "\n}"


def _load(words: int, out: int, base: int, offset: int) -> str:
    if words == 1:
        return f"ld.shared.b32 ${out}, [${base}+{offset}];"
    registers = ", ".join(f"${out + i}" for i in range(words))
    return f"ld.shared.v{words}.b32 {{{registers}}}, [${base}+{offset}];"


# The ring of a warp for weights that are halves as `nn.Linear` stores them, row by row, without a reordered copy.
#
# A slot holds 16 rows of 128 k in two tiles of 64 k, rows of 128 bytes:
#
#     | k 0 to 63: row 0, row 1, .. row 15 | k 64 to 127: row 0, .. |
#
# The eight 16-byte vectors of row r are stored in the order c ^ (r & 7). Lanes that copy a row, and `ldmatrix`, which
# reads the same vector of eight rows, then have no bank conflicts. Each copy of a warp takes whole 128-byte lines of four rows.
TILE_BYTES = 2048
"""16 rows of 64 k."""


@dataclass(frozen=True)
class RowRing(Ring):
    """A ring of rows; `ragged`: the last row block may have rows that do not exist, which are filled with zeros."""

    ragged: bool = False

    def copy_rows(self, d: int, slices: int) -> str:
        """Copies rows of w. $1 and $2: destination of vector c of row r, and of row r + 4, for lane 8 r + c. $3 and $4: source
        of rows r and r + 8 of the warp's first row block at pair 0. $5 bytes between row blocks, $6 bytes of four rows, $7 how
        many k exist from there on at pair d, $8 rows. k blocks of a warp are `slices` apart."""
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
        """Waits until at most `pending` groups of copies are in flight, then reads the A fragments of slot d.

        Inputs: for each of four pairs of vectors, the address of vector l / 16 of row l % 16 for lane l.
        """
        count = self.k_block.words
        lines = [f"cp.async.wait_group {pending};", "bar.warp.sync 0xffffffff;"]
        for i in range(BLOCK_MMAS):
            out = ", ".join(f"${4 * i + j}" for j in range(4))
            at = self.slot(d) + TILE_BYTES * (i // 4)
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{out}}}, [${count + i % 4}+{at}];")
        return "{\n" + "\n".join(lines) + "\n}"
