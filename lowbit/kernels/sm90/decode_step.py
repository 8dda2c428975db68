"""A decode step of 1, 2, 4 or 8 tokens, from the embedding to the logits, in one cooperative launch; sm_90.

Reads   tokens and the embedding; a table of addresses per layer (choose/decode_step.py, FIELDS): weights in FragmentOrder with
        scales, or 16-bit rows, and a router's rows; biases, gammas, pages, cos and sin; page tables, positions, rows
Writes  logits; h; new keys and values in the pages; `vectors`, whose last x and squares are the input of a head elsewhere
Grid    one block per SM, all resident (cooperative launch). The tasks of a block: choose/decode_step.py
Roles   load: 1 warp (4 with 16-bit rows) copies this block's weights of all products and layers through one ring
        (cp.async.bulk), ahead of all activations; math: 16 warps. A slot is a part of one row block; each warp multiplies
        k blocks (parts/k_block.py), with x in registers where it has two at most, and two units at a time if they are small
Stages  embed {h; h * gamma; squares}; gather x, multiply, reduce warps, finish: of qkv {/ rms, bias}, attention {norm, RoPE,
        append, splits}, o {h += y; h * gamma; squares}, gate-up {/ rms; gate}, down {as o}; head {/ rms, bias}
Experts after o, each block multiplies x by a few rows of the router, and chooses experts by the logits of all blocks, as they
        all do. The loader waits for the choice before gate-up. Rows of gate-up and columns of down are those of the experts
        that tokens have chosen, one after another, each for its token; sums of a k block of down are multiplied by the
        expert's weight and scales
Waits   Activations themselves are polled (parts/polled.py): words of `vectors` are EMPTY until they have arrived. Polls and
        waits are bounded: after LIMIT attempts a block writes a status and goes on with wrong numbers, as do all others then
Smem    ring | x of each warp, or sums of attention | 2 buffers of sums | 1 / rms | barriers | choice of experts
Exact   dequantization is exact, sums in fp32 in a fixed order: same input, same bits. Rounded to 16 bits: qkv, q and k after
        RoPE, attention's output, h, h * gamma, gate * up, as in the launches that this one replaces
Source  splits of keys and values: Dao et al., Flash-Decoding (2023)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.choose.decode_step import (
    BLOCK_K,
    PRODUCT_NAMES,
    TILE_K,
    WAITS,
    ProductName,
    StepTable,
    UnitForm,
)
from lowbit.kernels.parts.chosen_experts import (
    ChosenExperts,
    choose,
    four_of_router,
    product_of_four,
    read_word,
    store_choice,
    warp_sum,
    weights_of,
)
from lowbit.kernels.parts.epilogue import Epilogue, Gate, gate_times_up
from lowbit.kernels.parts.gluon import Scalar, Tuple, aggregate, asm, barrier, gl, gluon, half_type, ptx, run, source_digest
from lowbit.kernels.parts.head_rows import exchanged
from lowbit.kernels.parts.k_block import BLOCK_MMAS, KBlock
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.polled import (
    EMPTY,
    LIMIT,
    Polled,
    await_barrier,
    load_ahead,
    poll,
    poll_ahead,
    publish,
    publish_pair,
)
from lowbit.kernels.parts.ring import loads_of
from lowbit.kernels.parts.small_m_epilogue import add_strided
from lowbit.kernels.parts.split_attention import SplitAttention
from lowbit.kernels.parts.step_attention import attention, attention_vectors
from lowbit.kernels.parts.step_stage import (
    MathThread,
    RingPlace,
    StepArgs,
    field,
    later_place,
    own_row_blocks,
    prefetch_layer,
    same_thread,
    set_flag,
    status_of,
    vector,
    warp_number,
)
from lowbit.pack.weight import WeightForm


@dataclass(frozen=True)
class ProductForm:
    """A form of a product's weights. `channel`: type of scales of channels, if there are any."""

    unit: UnitForm
    k_block: KBlock
    channel: HalfType | str | None

    @property
    def read(self) -> str:
        """PTX that reads a unit: words of codes, then of scales. Inputs: of codes as `parts/ring.py` has them; of 16-bit rows
        the address of vector l / 16 of row l % 16 for lane l."""
        if not self.unit.dense:
            return "\n".join(loads_of(self.k_block, 0))
        fours = [", ".join(f"${4 * i + j}" for j in range(4)) for i in range(BLOCK_MMAS)]
        source = 4 * BLOCK_MMAS
        return "\n".join(
            f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{four}}}, [${source}+{32 * i}];" for i, four in enumerate(fours)
        )

    @property
    def read_constraints(self) -> str:
        inputs = ["r"] if self.unit.dense else ["r"] * 4
        return ",".join(["=&r"] * (self.k_block.words + self.k_block.scale_words) + inputs)

    @property
    def read_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (self.k_block.words + self.k_block.scale_words)


@dataclass(frozen=True)
class DecodeStep(Polled, SplitAttention, ChosenExperts):
    """The kernel's compile-time configuration. `forms`: of each product's weights, as `StepShape.forms`. `biases`: the products
    with a bias. `head_norms`: heads of q and k are normed; `sinks`: heads have sinks. `embedding_scale`: factor of embeddings.
    `normalize`: of the weights of chosen experts, as `ChosenExperts`."""

    table: StepTable
    half: HalfType
    forms: tuple[tuple[ProductForm, ...], ...]
    epilogue: Epilogue
    biases: tuple[ProductName, ...]
    head_norms: bool
    sinks: bool = False
    embedding_scale: float = 1.0
    normalize: bool = True
    limit: int = LIMIT
    digest: str = source_digest()

    @property
    def shape(self) -> AttentionShape:
        """Shape of attention; parts/head_rows.py reads it."""
        return self.table.shape.attention

    @property
    def dtype(self) -> HalfType:
        return self.half

    @property
    def windows(self) -> bool:
        """True if some layers have a window."""
        return self.table.shape.windows

    def form(self, product: ProductName, index: int) -> ProductForm:
        """A form of a product's weights."""
        return self.forms[PRODUCT_NAMES.index(product)][index]

    @property
    def loaders(self) -> int:
        """Warps of the loader. 16-bit rows are 16 copies a slot, of some 50 clocks each in one warp. Memory takes less time for
        a slot, so four warps copy 4 rows each."""
        return 4 if any(form.unit.dense for of_product in self.forms for form in of_product) else 1

    @property
    def threads(self) -> int:
        """Threads of the math warps."""
        return 32 * self.table.warps

    @property
    def combine_lanes(self) -> int:
        """Lanes that combine the splits of one word: a power of two."""
        return 1 << (self.table.splits - 1).bit_length()

    @property
    def squares_turns(self) -> int:
        """Partial sums of squares that a lane adds up."""
        return -(-self.table.blocks // 32)

    def field(self, name: str) -> int:
        return self.table.shape.fields.index(name)

    @property
    def fields(self) -> int:
        """Number of columns of the table of layers."""
        return len(self.table.shape.fields)

    def is_routed(self, product: ProductName) -> bool:
        """True for the products of experts."""
        return self.table.shape.is_routed(product)

    @property
    def factor_turns(self) -> int:
        """Largest number of a thread's factors of rows of down."""
        return -(-self.table.factors // self.threads)

    @property
    def logits_of_lane(self) -> int:
        return -(-self.table.shape.experts // 32)

    def x_in_registers(self, product: ProductName, index: int) -> bool:
        """True if all of a warp's x stays in registers for all row blocks: at most two k blocks with few sums."""
        k_block = self.form(product, index).k_block
        few = not self.table.by_chunks(product) and self.table.chunks(product) <= 2
        return few and k_block.sums <= 8 and k_block.words <= 16

    def units_at_once(self, product: ProductName, index: int) -> int:
        """Units that a warp reads before it multiplies them: two small ones, if the ring has both slots."""
        slots = self.table.slots_of_chunk(product, index)
        both = self.form(product, index).k_block.words <= 8 and self.table.ring_slots >= 2 * slots
        return 2 if both and (self.table.by_chunks(product) or self.table.chunks(product) == 2) else 1

    def output_warps(self, product: ProductName) -> int:
        """Number of warps with outputs of a flush of row blocks; they are the first ones."""
        tokens = self.table.shape.tokens
        if not self.normed(product):
            return tokens
        rows = 8 if product == "gate_up" else 16
        if self.is_routed(product):
            tokens = 1  # a row block has one
        return -(-rows * tokens * self.table.at_once(product) // 32)

    def normed(self, product: ProductName) -> bool:
        return product in ("qkv", "gate_up", "head")

    def has_bias(self, product: ProductName) -> bool:
        return product in self.biases

    def wait(self, name: str) -> int:
        return WAITS.index(name)

    @property
    def init(self) -> str:
        """PTX that initialises all barriers, and the choice of experts, so that blocks that have given up read those of some.
        $1: thread."""
        t, first = self.table, self.table.barriers_start
        lines = [".reg .pred p; .reg .b32 at; setp.eq.s32 p, $1, 0; mov.u32 at, global_smem;"]
        for slot in range(t.ring_slots):
            lines.append(f"@p mbarrier.init.shared::cta.b64 [at+{first + 8 * slot}], {self.loaders};")
            lines.append(f"@p mbarrier.init.shared::cta.b64 [at+{first + 8 * (t.ring_slots + slot)}], {t.warps};")
        if t.shape.experts:
            lines.append(f"@p mbarrier.init.shared::cta.b64 [at+{t.routed_start}], {t.shape.tokens};")
            zeros = "".join(f"@p st.shared.b32 [at+{t.chosen_start + 4 * i}], nil;" for i in range(t.shape.choices))
            lines.append(f"{{ .reg .b32 nil; mov.b32 nil, 0; {zeros} }}")
        lines.append(f"{{ .reg .b32 nil; mov.b32 nil, 0; @p st.shared.b32 [at+{t.flag_start}], nil; }}")
        lines.append("@p fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    @property
    def await_room(self) -> str:
        """PTX that waits until the slot at barrier $1 (parity $2) is full, and, unless the flag is 0, also the slot at $3
        (parity $4), which was asked for later. $5: address of shared memory; $6: address of the status; $7: its value if it
        takes too long."""
        lines = [".reg .pred p, more; .reg .b32 m, n; mov.b32 n, 0;"]
        lines += ["AGAIN: mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; vote.sync.all.pred p, p, 0xffffffff;"]
        lines += ["@!p bra CHECK; mbarrier.test_wait.parity.shared::cta.b64 p, [$3], $4;"]
        lines += [f"ld.volatile.shared.b32 m, [$5+{self.table.flag_start}]; setp.eq.or.s32 p, m, 0, p;"]
        lines += ["vote.sync.all.pred p, p, 0xffffffff; @p bra DONE; CHECK:"]
        lines += [*self._once_more("n", "m", "AGAIN", "DONE", "$6", "$7", 255), "DONE: mov.b32 $0, 0;"]
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def set_flag(self) -> str:
        """PTX by which thread 0 ($2) sets the flag to $3, if $4 is not 0. $1: address of shared memory."""
        return (
            "{ .reg .pred p; setp.eq.s32 p, $2, 0; setp.ne.and.s32 p, $4, 0, p;\n"
            f"@p st.volatile.shared.b32 [$1+{self.table.flag_start}], $3; mov.b32 $0, 0; }}"
        )

    def fill(self, product: ProductName, index: int) -> str:
        """PTX that fills a slot. $1 lane, $2 barrier, $3 slot, $4 source of codes, $5 their bytes, $6 source of scales, $7
        their bytes, $8 bytes of the last tile if it is alone in its unit, else 0. That tile is copied twice: x has zeros where
        the second one would be, and by zeros only finite numbers may be multiplied. Lane 0 copies codes; of 16-bit weights the
        first lanes of each loader's warp copy a row each, whose place, source and bytes are $3, $4, $5 and $8."""
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        unit, odd = self.form(product, index).unit, self.table.k_tiles(product) % 2
        lines = [".reg .pred p, q; .reg .b32 at, all; .reg .b64 from, size;", "setp.eq.s32 p, $1, 0; add.u32 all, $5, $8;"]
        rows = 16 // self.loaders
        lines += [f"mul.lo.u32 all, all, {rows};" if unit.dense else "add.u32 all, all, $7;"]
        lines += ["@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], all;"]
        lines += [f"setp.lt.s32 p, $1, {rows};"] if unit.dense else []
        lines += [f"setp.ne.and.s32 q, $5, 0, p; @q {copy} [$3], [$4], $5, [$2];"]
        if odd:
            lines += ["setp.ne.and.s32 q, $8, 0, p; add.u32 at, $3, $5; cvt.u64.u32 size, $5; add.u64 from, $4, size;"]
            lines += [f"cvt.u64.u32 size, $8; sub.u64 from, from, size; @q {copy} [at], [from], $8, [$2];"]
        if unit.scale_bytes:
            codes = self.table.units(product, index) * unit.code_bytes
            lines += [f"setp.ne.and.s32 q, $7, 0, p; add.u32 at, $3, {codes}; @q {copy} [at], [$6], $7, [$2];"]
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    def release(self, count: int) -> str:
        """PTX by which lane 0 ($2) marks a slot as empty, at barrier $1; it arrives for `count` warps, since only a part of
        them reads the slot. It depends on the sums $3 and $4, in which all words of the slot are: a load that is still queued
        when the slot is released can read the next contents. (No sum is this NaN.)"""
        times = f", {count}" if count > 1 else ""
        return (
            "{ .reg .pred p; .reg .b32 a, b; mov.b32 a, $3; mov.b32 b, $4; setp.eq.s32 p, $2, 0;\n"
            "setp.ne.and.s32 p, a, 0x7fedcba9, p; setp.ne.and.s32 p, b, 0x7fedcba9, p; bar.warp.sync 0xffffffff;\n"
            f"@p mbarrier.arrive.shared::cta.b64 _, [$1]{times}; mov.b32 $0, 0; }}"
        )

    def x_rows(self, product: ProductName) -> int:
        """Rows of x of a product."""
        return self.table.shape.x_rows(product)

    def place_of_turn(self, product: ProductName, turn: int) -> int:
        """Distance in shared memory, in bytes, of the vectors of x that a lane stores in a turn of `gather_x` from those of the
        first turn. In each turn a warp has two rows of 16 vectors: of two tokens, or with one token of two chunks."""
        chunk, token = divmod(2 * turn, self.x_rows(product))
        return (chunk * 16 * self.x_rows(product) + token) * 16

    def source_of_turn(self, product: ProductName, turn: int) -> int:
        """As `place_of_turn`, in the vector of a product's x."""
        chunk, token = divmod(2 * turn, self.x_rows(product))
        return token * self.table.shape.columns(product) * 2 + chunk * self.table.warps * 256

    def read_x(self, product: ProductName) -> str:
        """PTX that reads the B fragments of a k block of x. Input: the lane's address."""
        step, registers = 64 * self.x_rows(product), [", ".join(f"${4 * i + j}" for j in range(4)) for i in range(4)]
        return "\n".join(
            f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{four}}}, [$16+{step * i}];" for i, four in enumerate(registers)
        )

    read_x_constraints = ",".join(["=&r"] * 16 + ["r"])

    sync_warp = "bar.warp.sync 0xffffffff; mov.b32 $0, 0;"

    @property
    def store_sums(self) -> str:
        """PTX that stores a warp's sums of a row block: $1 address of row g, token 2t; $2 t; $3 to $6 the sums."""
        m = self.table.shape.tokens
        lines = [f".reg .pred p; setp.lt.s32 p, $2, {max(1, m // 2)};"]
        if m == 1:
            lines.append("@p st.shared.f32 [$1], $3; @p st.shared.f32 [$1+32], $5;")
        else:
            lines.append(f"@p st.shared.v2.f32 [$1], {{$3, $4}}; @p st.shared.v2.f32 [$1+{32 * m}], {{$5, $6}};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"


# ---- bundles


@aggregate
class RowVectors:
    """Addresses of the vectors of a product's rows, or None: scales of channels, bias, gamma of the next norm; and the factor
    of the norm before it."""

    channel: Scalar
    bias: Scalar
    gamma: Scalar
    factor: Scalar


@aggregate
class Output:
    """A thread's output in a flush of row blocks: whether it exists; row block within the flush; row of w within that; token;
    the values of its row (and of the row of up) that were loaded before the product; h before the addition."""

    exists: gl.tensor
    row_block: gl.tensor
    row: gl.tensor
    token: gl.tensor
    channel: Tuple
    bias: Tuple
    gamma: Tuple
    old: Tuple


PIECES_AT_ONCE = gl.constexpr(8)
"""Vectors of x that a lane asks for at a time."""

EMPTY_WORD = gl.constexpr(EMPTY)
FREE_SLOT = gl.constexpr("a free slot, or the choice of experts")
BEFORE_GATE_UP = gl.constexpr("squares before gate-up, or logits of experts")
K_BLOCK = gl.constexpr(BLOCK_K)
K_TILE = gl.constexpr(TILE_K)


@gluon.jit
def chosen_expert(start, number, C: gl.constexpr):
    """Returns the number of a token's chosen expert in the layer."""
    return read_word(start + C.table.chosen_start + 4 * number, C)


@gluon.jit
def row_block_of_expert(start, row_block, C: gl.constexpr):
    """Returns a row block of gate-up, counted over all experts, of its number among those of the chosen experts."""
    COUNT: gl.constexpr = C.table.shape.expert_row_blocks
    return chosen_expert(start, row_block // COUNT, C) * COUNT + row_block % COUNT


# ---- the loader


@gluon.jit
def load_product(args, layer, place, issued, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Copies this block's weights of one product to the ring. `issued`: number of slots that were filled before."""
    T: gl.constexpr = C.table
    UNIT: gl.constexpr = ptx(C.form, product, index).unit
    UNITS: gl.constexpr = ptx(T.units, product, index)
    SLOTS: gl.constexpr = T.ring_slots
    FEW: gl.constexpr = T.in_flight[0]
    MANY: gl.constexpr = T.in_flight[1]
    TILES: gl.constexpr = ptx(T.k_tiles, product)
    BY_CHUNKS: gl.constexpr = ptx(T.by_chunks, product)
    AT_ONCE: gl.constexpr = ptx(T.at_once, product) if BY_CHUNKS else 1
    ALL: gl.constexpr = ptx(T.chunks, product) * ptx(T.slots_of_chunk, product, index)
    STEP: gl.constexpr = ptx(T.slots_of_chunk, product, index) if BY_CHUNKS else ALL
    LOADERS: gl.constexpr = C.loaders
    lane = gl.arange(0, 32 * LOADERS, gl.BlockedLayout([1], [32], [LOADERS], [0])) & 31
    warp = warp_number() & (LOADERS - 1)
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32) + lane * 0
    barriers = start + T.barriers_start
    ROUTED: gl.constexpr = ptx(C.is_routed, product)
    SEGMENTS: gl.constexpr = ROUTED and product == "down"
    codes = field(args, layer, product + " codes", C)
    scale = field(args, layer, product + " scale", C)
    first, end = own_row_blocks(product, C)
    if ROUTED and product == "gate_up":
        await_barrier(start + T.routed_start, layer & 1, args.status, status_of(layer, FREE_SLOT, C), C)
    for begin in range(first, end, AT_ONCE):
        for part in range(0, ALL, STEP):
            for row_block in range(begin, gl.minimum(begin + AT_ONCE, end)):
                for number in range(part, part + STEP):
                    await_barrier(
                        barriers + 8 * (SLOTS + place.slot), place.phase ^ 1, args.status,
                        status_of(layer, FREE_SLOT, C), C,
                    )  # fmt: skip
                    if issued >= MANY:
                        earlier, later = issued - MANY, issued - FEW
                        run(
                            C.await_room, "=r,r,r,r,r,r,l,r",
                            [barriers + 8 * (earlier % SLOTS), lane * 0 + (earlier // SLOTS & 1),
                             barriers + 8 * (later % SLOTS), lane * 0 + (later // SLOTS & 1), start, args.status,
                             status_of(layer, "weights", C)],
                        )  # fmt: skip
                    tiles = gl.maximum(gl.minimum(TILES - number * (2 * UNITS), 2 * UNITS), 0)
                    to = start + place.slot * T.slot_bytes
                    if SEGMENTS:
                        units = gl.where(warp == 0, tiles >> 1, 0)
                        load_segments(codes, scale, start, lane, barriers + 8 * place.slot, to, row_block, number, units,
                                      product, index, C)  # fmt: skip
                    elif UNIT.dense:
                        row = (warp * (16 // LOADERS) + lane) & 15
                        source, size, last = rows_of_slot(codes, row_block, number, tiles, row, product, UNITS, C)
                        to += row * ptx(UNIT.row_bytes, UNITS)
                        scales = source
                        scales_size = tiles * 0
                    else:
                        tiles = gl.where(warp == 0, tiles, 0)
                        of_w = row_block
                        if ROUTED:
                            of_w = row_block_of_expert(start, row_block, C)
                        tile = lane * 0 + (of_w * TILES + number * (2 * UNITS))
                        source = codes + tile.to(gl.int64) * (UNIT.code_bytes // 2)
                        size = tiles * (UNIT.code_bytes // 2)
                        last = (tiles & 1) * (UNIT.code_bytes // 2)
                        scales = scale + (lane * 0 + (of_w * ((TILES + 1) // 2) + number * UNITS)) * UNIT.scale_bytes
                        scales_size = ((tiles + 1) >> 1) * UNIT.scale_bytes
                    if not SEGMENTS:
                        run(
                            ptx(C.fill, product, index), "=r,r,r,r,l,r,l,r,r",
                            [lane, barriers + 8 * place.slot, to, source, size, scales, scales_size, last],
                        )  # fmt: skip
                    place = later_place(place, 1, C)
                    issued += 1
    return place, issued


@gluon.jit
def load_segments(
    codes, scale, start, lane, barrier_at, to, row_block, number, units, product: gl.constexpr, index: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Fills the slot `number` of a row block of the down of chosen experts, `units` k blocks in all (0: another warp does). A
    lane copies those of one expert."""
    T: gl.constexpr = C.table
    UNIT: gl.constexpr = ptx(C.form, product, index).unit
    UNITS: gl.constexpr = ptx(T.units, product, index)
    K_BLOCKS: gl.constexpr = T.shape.expert_k_blocks
    ROW_BLOCKS: gl.constexpr = ptx(T.row_blocks, product)
    CHOICES: gl.constexpr = T.shape.choices
    begin = number * UNITS
    chosen = begin // K_BLOCKS + lane
    first = gl.maximum(chosen * K_BLOCKS, begin)
    count = gl.maximum(gl.minimum(begin + units, (chosen + 1) * K_BLOCKS) - first, 0)
    of_rows = chosen_expert(start, gl.minimum(chosen, CHOICES - 1), C) * ROW_BLOCKS + row_block
    k_block = (of_rows * K_BLOCKS + (first - chosen * K_BLOCKS)).to(gl.int64)
    place, source = to + (first - begin) * UNIT.code_bytes, codes + k_block * UNIT.code_bytes
    total = units * (UNIT.code_bytes + UNIT.scale_bytes)
    if UNIT.scale_bytes > 0:
        scales = to + (UNITS * UNIT.code_bytes + (first - begin) * UNIT.scale_bytes)
        run(
            ptx(C.fill_segments, True), "=r,r,r,r,l,r,r,r,l,r",
            [lane, barrier_at, place, source, count * UNIT.code_bytes, lane * 0 + total, scales,
             scale + k_block * UNIT.scale_bytes, count * UNIT.scale_bytes],
        )  # fmt: skip
    else:
        run(
            ptx(C.fill_segments, False), "=r,r,r,r,l,r,r",
            [lane, barrier_at, place, source, count * UNIT.code_bytes, lane * 0 + total],
        )  # fmt: skip


@gluon.jit
def rows_of_slot(weights, row_block, part, tiles, row, product: gl.constexpr, UNITS: gl.constexpr, C: gl.constexpr):
    """Returns a row of 16-bit weights in a slot: its address, its bytes, and the bytes of the last tile if that is alone in its
    unit. Rows of gate and up alternate in eights, as they do in the fragment order."""
    K: gl.constexpr = ptx(C.table.shape.columns, product)
    N: gl.constexpr = ptx(C.table.shape.rows, product)
    if product == "gate_up":
        of_w = (row_block * 8 + (row & 7)) + (row >> 3) * (N // 2)
    else:
        of_w = row_block * 16 + row
    source = weights + (of_w.to(gl.int64) * K + part * (UNITS * K_BLOCK)) * 2
    return source, tiles * (2 * K_TILE), (tiles & 1) * (2 * K_TILE)


@gluon.jit
def load_forms(args, layer, place, issued, product: gl.constexpr, C: gl.constexpr):
    """As `load_product`, in the layer's form."""
    COUNT: gl.constexpr = len(ptx(C.table.shape.forms_of, product))
    if COUNT == 1:
        place, issued = load_product(args, layer, place, issued, product, 0, C)
    else:
        form = field(args, layer, product + " form", C)
        for index in gl.static_range(COUNT):
            if form == index:
                place, issued = load_product(args, layer, place, issued, product, index, C)
    return place, issued


@gluon.jit
def load(args, C: gl.constexpr):
    """The loader: all weights of this block, layer by layer."""
    LAYERS: gl.constexpr = C.table.shape.layers
    zero = gl.program_id(0) * 0
    place = RingPlace(zero, zero)
    issued = zero
    for layer in range(LAYERS):
        place, issued = load_forms(args, layer, place, issued, "qkv", C)
        place, issued = load_forms(args, layer, place, issued, "o", C)
        place, issued = load_forms(args, layer, place, issued, "gate_up", C)
        place, issued = load_forms(args, layer, place, issued, "down", C)
    if C.table.shape.has_head:
        load_product(args, zero + LAYERS, place, issued, "head", 0, C)


# ---- products


@gluon.jit
def gather_x(source, args, at, layer, first: gl.constexpr, product: gl.constexpr, wait: gl.constexpr, C: gl.constexpr):
    """Waits for the k blocks of this warp of x [tokens, K] at address `source`, from chunk `first` on, and stores them in the
    warp's memory as [chunk][vector of 8 columns][token]: matrices of ldmatrix. Columns beyond K are zeros."""
    T: gl.constexpr = C.table
    M: gl.constexpr = ptx(C.x_rows, product)
    VECTORS: gl.constexpr = ptx(T.shape.columns, product) // 8
    PIECES: gl.constexpr = min(ptx(T.chunks_at_once, product), ptx(T.chunks, product) - first) * M * 16
    TURNS: gl.constexpr = (PIECES + 31) // 32
    WHOLE: gl.constexpr = VECTORS % (16 * T.warps) == 0  # every warp has columns in every chunk
    HALF: gl.constexpr = VECTORS if M > 1 else 16 * T.warps  # vectors from lane 0's to lane 16's
    to = at.start + T.x_start + at.warp * T.x_warp_bytes
    half, low = at.lane >> 4, at.lane & 15
    own = source + (half * HALF + (first * T.warps + at.warp) * 16 + low) * 16
    own_place = to + (low * M + half * (1 if M > 1 else 16)) * 16
    for begin in gl.static_range(0, TURNS, PIECES_AT_ONCE):
        addresses = ()
        places = ()
        exist = ()
        for i in gl.static_range(min(PIECES_AT_ONCE, TURNS - begin)):
            if WHOLE and 32 * (begin + i + 1) <= PIECES:  # constant distances, so that a lane has few addresses
                places = places + (own_place + ptx(C.place_of_turn, product, begin + i),)
                addresses = addresses + (own + ptx(C.source_of_turn, product, begin + i),)
                exist = exist + (True,)
            else:
                piece = gl.minimum(at.lane + 32 * (begin + i), PIECES - 1)
                token, chunk = (piece >> 4) % M, (piece >> 4) // M
                column = ((first + chunk) * T.warps + at.warp) * 16 + (piece & 15)
                places = places + (to + ((chunk * 16 + (piece & 15)) * M + token) * 16,)
                addresses = addresses + (source + (token * VECTORS + gl.minimum(column, VECTORS - 1)) * 16,)
                exist = exist + (column < VECTORS,)
        words = poll(
            addresses, at.lane * 0 + 1, args.status, status_of(layer, wait, C), min(PIECES_AT_ONCE, TURNS - begin), 4, C
        )
        for i in gl.static_range(min(PIECES_AT_ONCE, TURNS - begin)):
            piece_of_x = words[4 * i : 4 * i + 4]
            if VECTORS % 16 != 0:
                piece_of_x = ()
                for j in gl.static_range(4):
                    piece_of_x = piece_of_x + (gl.where(exist[i], words[4 * i + j], 0),)
            run(C.store_words, "=r,r,r,r,r,r,r", (places[i],) + piece_of_x + (at.lane * 0 + 1,))
    run(C.sync_warp, "=r", [])


@gluon.jit
def x_sums_start(at, C: gl.constexpr):
    """Returns the address of a warp's sums of x, float32 [chunk][group][token]."""
    return at.start + C.table.x_start + at.warp * C.table.x_warp_bytes + C.table.x_sums_start


@gluon.jit
def store_x_sums(at, chunks: gl.constexpr, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Stores the sums over groups of a warp's k blocks of x, which zero points and raw codes need, behind x. The 8 columns of a
    matrix instruction are all tokens of as many chunks as they hold."""
    T: gl.constexpr = C.table
    S: gl.constexpr = ptx(C.form, product, index).k_block
    M: gl.constexpr = ptx(C.x_rows, product)
    COUNT: gl.constexpr = max(S.groups, 1)
    OF_GROUP: gl.constexpr = S.sums // COUNT  # of raw codes four, of which the last two are multiples of the others
    row, pair = at.lane & 7, at.lane & 3
    for first in gl.static_range(0, chunks, 8 // M):
        chunk = gl.minimum(first + row // M, chunks - 1)
        x_at = at.start + T.x_start + at.warp * T.x_warp_bytes + chunk * (256 * M) + ((at.lane >> 3) * M + row % M) * 16
        x = asm(ptx(C.read_x, product), C.read_x_constraints, [x_at], ptx(C.words_types, 16))
        sums = asm(S.sum_asm, S.sum_constraints, x, S.sum_types)
        for h in gl.static_range(2):
            column = 2 * pair + h
            of_chunk = first + column // M
            own = ((at.lane < 4) & (of_chunk < chunks)).to(gl.int32)
            place = x_sums_start(at, C) + (of_chunk * (COUNT * M) + column % M) * 4
            for i in gl.static_range(COUNT):
                run(C.store_float, "=r,r,f,r", [place + 4 * M * i, sums[OF_GROUP * i + h], own])
    run(C.sync_warp, "=r", [])


@gluon.jit
def load_x_sums(at, chunk, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns a lane's sums of x in a chunk, if the weights' form needs them; sums of tokens that do not exist are those of
    others."""
    M: gl.constexpr = ptx(C.x_rows, product)
    S: gl.constexpr = ptx(C.form, product, index).k_block
    COUNT: gl.constexpr = max(S.groups, 1) if S.sums > 0 else 0
    FACTOR: gl.constexpr = S.raw_offsets[1] // S.raw_offsets[0]
    place = x_sums_start(at, C) + chunk * (COUNT * M * 4) + gl.minimum(at.lane & 3, max(M // 2, 1) - 1) * 8
    sums = ()
    for i in gl.static_range(COUNT):
        if M == 1:
            one = asm(C.load_float, "=f,r", [place + 4 * i], gl.float32)
            both = (one, one)
        else:
            both = asm(C.load_two, "=&f,=&f,r", [place + 4 * M * i], C.load_two_types)
        sums = sums + both
        if S.raw:
            sums = sums + (both[0] * FACTOR, both[1] * FACTOR)
    return sums


@gluon.jit
def read_unit(at, slot, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns a lane's words of this warp's unit of a slot: codes, then scales."""
    F: gl.constexpr = ptx(C.form, product, index)
    UNIT: gl.constexpr = F.unit
    UNITS: gl.constexpr = ptx(C.table.units, product, index)
    start = at.start + slot * C.table.slot_bytes
    number = at.warp & (UNITS - 1)
    if UNIT.dense:
        row = start + (at.lane & 15) * ptx(UNIT.row_bytes, UNITS) + number * (2 * K_BLOCK) + (at.lane >> 4) * 16
        return asm(F.read, F.read_constraints, [row], F.read_types)
    else:
        unit = start + number * UNIT.code_bytes
        # The loads of scales have the bytes of a unit's codes in their offset.
        scales = start + (UNITS - 1) * UNIT.code_bytes + number * UNIT.scale_bytes + (at.lane >> 2) * F.k_block.pair_bytes
        inputs = [unit + at.lane * 16, unit + at.lane * 8, unit + at.lane * 4, scales]
        return asm(F.read, F.read_constraints, inputs, F.read_types)


@gluon.jit
def load_x(at, chunk, product: gl.constexpr, C: gl.constexpr):
    """Returns a lane's words of this warp's k block of x in a chunk: fragments of the matrix instructions."""
    T: gl.constexpr = C.table
    M: gl.constexpr = ptx(C.x_rows, product)
    row = (at.lane >> 3) * M + gl.minimum(at.lane & 7, M - 1)
    x_at = at.start + T.x_start + at.warp * T.x_warp_bytes + chunk * (256 * M) + row * 16
    return asm(ptx(C.read_x, product), C.read_x_constraints, [x_at], ptx(C.words_types, 16))


@gluon.jit
def x_of_chunks(at, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns a lane's words of x of all chunks of a product, and their sums over groups if the weights' form needs them."""
    S: gl.constexpr = ptx(C.form, product, index).k_block
    x = ()
    sums = ()
    for chunk in gl.static_range(ptx(C.table.chunks, product)):
        words = load_x(at, chunk, product, C)
        x = x + words
        if S.sums > 0:
            sums = sums + asm(S.sum_asm, S.sum_constraints, words, S.sum_types)
    return x, sums


@gluon.jit
def own_slot(at, place, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns the slot with this warp's unit of the chunk that begins at `place`."""
    UNITS: gl.constexpr = ptx(C.table.units, product, index)
    own = place
    if ptx(C.table.slots_of_chunk, product, index) > 1:
        own = later_place(place, at.warp // UNITS, C)
    return own


@gluon.jit
def read_full(args, at, layer, own, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns a lane's words of this warp's unit of a slot, once that is full."""
    full = at.start + C.table.barriers_start + 8 * own.slot
    await_barrier(full, own.phase, args.status, status_of(layer, "weights", C), C)
    return read_unit(at, own.slot, product, index, C)


@gluon.jit
def add_unit(read, x, sums, acc, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns a lane's sums with the product of a unit."""
    S: gl.constexpr = ptx(C.form, product, index).k_block
    return asm(S.asm, S.constraints, read[0 : S.words] + x + read[S.words :] + sums + acc, S.types)


@gluon.jit
def release(at, own, sums, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Marks a slot as empty, once `sums` with all its words are known."""
    T: gl.constexpr = C.table
    SLOTS: gl.constexpr = ptx(T.slots_of_chunk, product, index)
    empty = at.start + T.barriers_start + 8 * (T.ring_slots + own.slot)
    run(ptx(C.release, SLOTS), "=r,r,r,f,f", [empty, at.lane, sums[0], sums[2]])


@gluon.jit
def of_own_block(new, old, at, chunk, product: gl.constexpr, C: gl.constexpr):
    """Returns the sums `new`, or `old` if this warp has no k block in a chunk: some have none in the last one."""
    T: gl.constexpr = C.table
    K_BLOCKS: gl.constexpr = ptx(T.k_blocks, product)
    kept = new
    if K_BLOCKS % T.warps != 0:
        exists = chunk * T.warps + at.warp < K_BLOCKS
        kept = ()
        for i in gl.static_range(4):
            kept = kept + (gl.where(exists, new[i], old[i]),)
    return kept


@gluon.jit
def add_expert(new, old, at, factors, row_block: gl.constexpr, chunk, C: gl.constexpr):
    """Returns the sums `old`, and the product `new` of this warp's k block of a chunk times the factors of its expert, in the
    column of the token that has chosen it."""
    T: gl.constexpr = C.table
    M: gl.constexpr = T.shape.tokens
    CHOICES: gl.constexpr = T.shape.choices
    chosen = gl.minimum((chunk * T.warps + at.warp) // T.shape.expert_k_blocks, CHOICES - 1)
    place = factors + ((row_block * CHOICES + chosen) * 16 + (at.lane >> 2)) * 4
    first, second = asm(C.load_float, "=f,r", [place], gl.float32), asm(C.load_float, "=f,r", [place + 32], gl.float32)
    added = (old[0] + new[0] * first, old[1] + new[1] * first, old[2] + new[2] * second, old[3] + new[3] * second)
    if M > 1:
        sums = added
        added = ()
        for i in gl.static_range(4):
            own = 2 * (at.lane & 3) + i % 2 == chosen // T.shape.top_k
            added = added + (gl.where(own, sums[i], old[i]),)
    return added


@gluon.jit
def multiply_units(
    args, at, layer, place, accs, x, sums, chunk, factors, number: gl.constexpr, step: gl.constexpr, product: gl.constexpr,
    index: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Adds the products of `number` units, which are read before any is multiplied, so that their instructions do not depend on
    each other. `step` 0: units of as many row blocks in one chunk, with an accumulator each and the same x; 1: those of
    consecutive chunks of a row block. `factors`: in down of experts, the address of those of the first row block; else None."""
    S: gl.constexpr = ptx(C.form, product, index).k_block
    WORDS: gl.constexpr = S.words + S.scale_words
    slots = ()
    phases = ()
    read = ()
    for _ in gl.static_range(number):
        own = own_slot(at, place, product, index, C)
        slots = slots + (own.slot,)
        phases = phases + (own.phase,)
        read = read + read_full(args, at, layer, own, product, index, C)
        place = later_place(place, ptx(C.table.slots_of_chunk, product, index), C)
    products = ()
    new_accs = ()
    acc = accs[0:4]
    for i in gl.static_range(number):
        of_x, of_sums = x[16 * i * step : 16 * (i * step + 1)], sums[S.sums * i * step : S.sums * (i * step + 1)]
        if step == 0:
            acc = accs[4 * i : 4 * i + 4]
        if factors is None:
            new = add_unit(read[WORDS * i : WORDS * (i + 1)], of_x, of_sums, acc, product, index, C)
            products = products + new
        else:
            zero = at.lane.to(gl.float32) * 0.0
            own = (zero, zero, zero, zero)
            own = add_unit(read[WORDS * i : WORDS * (i + 1)], of_x, of_sums, own, product, index, C)
            products = products + own
            new = add_expert(own, acc, at, factors, i * (1 - step), chunk + i * step, C)
        acc = of_own_block(new, acc, at, chunk + i * step, product, C)
        new_accs = new_accs + acc
    for i in gl.static_range(number):
        release(at, RingPlace(slots[i], phases[i]), products[4 * i : 4 * i + 4], product, index, C)
    if step > 0:
        new_accs = acc
    return place, new_accs


@gluon.jit
def multiply_row_block(
    args, at, layer, place, x, sums, factors, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Returns the place after a row block, and this warp's product of it. `x` of all chunks, and its `sums`, in registers."""
    SUMS: gl.constexpr = ptx(C.form, product, index).k_block.sums
    AT_ONCE: gl.constexpr = ptx(C.units_at_once, product, index)
    zero = at.lane.to(gl.float32) * 0.0
    acc = (zero, zero, zero, zero)
    for chunk in gl.static_range(0, ptx(C.table.chunks, product), AT_ONCE):
        of_x, of_sums = x[16 * chunk : 16 * (chunk + AT_ONCE)], sums[SUMS * chunk : SUMS * (chunk + AT_ONCE)]
        place, acc = multiply_units(
            args, at, layer, place, acc, of_x, of_sums, chunk, factors, AT_ONCE, 1, product, index, C
        )  # fmt: skip
    return place, acc


@gluon.jit
def multiply_chunk(
    args, at, layer, place, accs, chunk, factors, first: gl.constexpr, number: gl.constexpr, product: gl.constexpr,
    index: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Adds the products of a chunk of `number` row blocks. `chunk`: since chunk `first`, with which x in shared memory
    begins."""
    AT_ONCE: gl.constexpr = min(number, ptx(C.units_at_once, product, index))
    x = load_x(at, chunk, product, C)
    sums = load_x_sums(at, chunk, product, index, C)
    new = ()
    for i in gl.static_range(0, number, AT_ONCE):
        of_units = accs[4 * i : 4 * min(i + AT_ONCE, number)]
        of_rows = factors
        if factors is not None:
            of_rows = factors + i * (64 * C.table.shape.choices)
        place, of_units = multiply_units(
            args, at, layer, place, of_units, x, sums, first + chunk, of_rows, min(AT_ONCE, number - i), 0, product, index, C
        )  # fmt: skip
        new = new + of_units
    return place, new


@gluon.jit
def squares_of_lane(source, at, C: gl.constexpr):
    """Returns the addresses of a lane's partial sums of squares [blocks, tokens]; warp i has those of token i."""
    M: gl.constexpr = C.table.shape.tokens
    BLOCKS: gl.constexpr = C.table.blocks
    TURNS: gl.constexpr = C.squares_turns
    token = gl.minimum(at.warp, M - 1)
    first = source + (at.lane * M + token) * 4
    addresses = ()
    for i in gl.static_range(TURNS):
        if 32 * (i + 1) <= BLOCKS:
            addresses = addresses + (first + 128 * M * i,)
        else:
            addresses = addresses + (source + (gl.minimum(at.lane + 32 * i, BLOCKS - 1) * M + token) * 4,)
    return addresses


@gluon.jit
def squares_ahead(loaded, source, at, needed, C: gl.constexpr):
    """If needed, returns a lane's partial sums of squares as they are now, for `rms_to_shared`; else `loaded`."""
    if needed:
        loaded = load_ahead(squares_of_lane(source, same_thread(at, C), C), C.squares_turns, C)
    return loaded


@gluon.jit
def rms_to_shared(loaded, source, needed, factor, args, at, layer, product: gl.constexpr, C: gl.constexpr):
    """If needed, warp i adds up the partial sums of squares of token i in order, and stores 1 / (rms * x's factor)."""
    T: gl.constexpr = C.table
    M: gl.constexpr = T.shape.tokens
    TURNS: gl.constexpr = C.squares_turns
    WAIT: gl.constexpr = BEFORE_GATE_UP if product == "gate_up" else "squares before " + product
    if needed:
        at = same_thread(at, C)  # addresses take registers here only
        addresses = squares_of_lane(source, at, C)
        words = poll_ahead(loaded, addresses, at.lane * 0 + 1, args.status, status_of(layer, WAIT, C), TURNS, C)
        total = at.lane.to(gl.float32) * 0.0
        for i in gl.static_range(TURNS):
            total += gl.where(at.lane + 32 * i < T.blocks, words[i].to(gl.float32, bitcast=True), 0.0)
        for step in gl.static_range(5):
            total += exchanged(total, 1 << step)
        root = gl.rsqrt(total * args.inverse_width + args.eps) * factor
        to = at.start + T.rms_start + gl.minimum(at.warp, M - 1) * 4
        run(C.store_float, "=r,r,f,r", [to, root, (at.lane == 0).to(gl.int32)])


@gluon.jit
def row_vectors(args, layer, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns the RowVectors of a product. It is called before the wait for x, in which its loads take no time."""
    CHANNEL: gl.constexpr = ptx(C.form, product, index).channel
    KIND: gl.constexpr = gl.float32 if CHANNEL == "fp32" else gl.bfloat16
    NAME: gl.constexpr = "mlp_gamma" if product == "o" else "next_gamma"
    channel = None
    bias = None
    gamma = None
    factor = None
    if CHANNEL is not None and not (ptx(C.is_routed, product) and product == "down"):
        channel = field(args, layer, product + " channel_scale", C).to(gl.pointer_type(KIND), bitcast=True)
    if ptx(C.has_bias, product):
        bias = field(args, layer, product + " bias", C).to(gl.pointer_type(gl.float32), bitcast=True)
    if ptx(C.normed, product):
        factors = field(args, layer, "factors", C)
        factor = (factors >> 32 if product == "gate_up" else factors).to(gl.int32).to(gl.float32, bitcast=True)
    else:
        gamma = field(args, layer, NAME, C).to(gl.pointer_type(gl.float32), bitcast=True)
    return RowVectors(channel, bias, gamma, factor)


@gluon.jit
def own_output(at, begin, count, product: gl.constexpr, C: gl.constexpr):
    """Returns (exists, row block, row, token) of a thread's output among `count` row blocks from `begin` on."""
    M: gl.constexpr = C.table.shape.tokens
    AT_ONCE: gl.constexpr = ptx(C.table.at_once, product)
    ROWS: gl.constexpr = 8 if product == "gate_up" else 16
    row, rest = at.index % ROWS, at.index // ROWS
    if M > 1 and product == "gate_up" and ptx(C.is_routed, product):  # a row block has one token
        row_block = rest
        token = (begin + rest) // (C.table.shape.expert_row_blocks * C.table.shape.top_k)
    elif ptx(C.normed, product):
        token, row_block = rest % M, rest // M
    else:  # with a residual a warp has all rows of one token
        row_block, token = rest % AT_ONCE, rest // AT_ONCE
    exists = (row_block < count) & (token < M)
    return exists, gl.minimum(row_block, AT_ONCE - 1), row, gl.minimum(token, M - 1)


@gluon.jit
def output_of(args, at, rows, begin, count, product: gl.constexpr, C: gl.constexpr):
    """Returns a thread's output among `count` row blocks from `begin` on, and loads the values of its rows."""
    N: gl.constexpr = ptx(C.table.shape.rows, product)
    BOTH: gl.constexpr = 2 if product == "gate_up" else 1
    exists, row_block, row, token = own_output(at, begin, count, product, C)
    if product == "head" and N % 16 != 0:
        exists = exists & ((begin + row_block) * 16 + row < N)
    of_w = gl.minimum((begin + row_block) * 16 + row, N - 8 * BOTH + 7)
    of_channel = of_w
    if rows.channel is not None and ptx(C.is_routed, product):
        of_channel = row_block_of_expert(at.start, of_w >> 4, C) * 16 + (of_w & 15)
    channel = ()
    bias = ()
    gamma = ()
    old = ()
    for i in gl.static_range(BOTH):
        if rows.channel is not None:
            channel = channel + (gl.load(rows.channel + of_channel + 8 * i).to(gl.float32),)
        if rows.bias is not None:
            bias = bias + (gl.load(rows.bias + of_w + 8 * i),)
    if rows.gamma is not None:
        gamma = (gl.load(rows.gamma + of_w),)
        old = (gl.load(args.h + token * N + of_w, mask=exists, other=0.0).to(gl.float32),)
    return Output(exists, row_block, row, token, channel, bias, gamma, old)


@gluon.jit
def total_of(out, at, parity, i: gl.constexpr, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns the sum of all warps for a thread's output, or its up for i = 1, with scales, norm and bias."""
    T: gl.constexpr = C.table
    M: gl.constexpr = T.shape.tokens
    F: gl.constexpr = ptx(C.form, product, index)
    place = T.sums_start + parity * T.sums_bytes + out.row_block * ptx(T.sums_stride, product)
    place += ((out.row + 8 * i) * M + out.token) * 4
    total = asm(add_strided(T.warps, 64 * M), "=&f,r", [place], gl.float32) * F.k_block.factor
    if F.channel is not None and not (ptx(C.is_routed, product) and product == "down"):
        total *= out.channel[i]
    if ptx(C.normed, product):
        total *= asm(C.load_float, "=f,r", [at.start + T.rms_start + out.token * 4], gl.float32)
    if ptx(C.has_bias, product):
        total += out.bias[i]
    return total


@gluon.jit
def store_h(args, to, place, kept, gamma, exists, squares, C: gl.constexpr):
    """Stores a thread's element of h, and h * gamma in the vector `to`; returns the thread's `squares` with its square."""
    gl.store(args.h + place, kept, mask=exists)
    new = gl.where(exists, kept.to(gl.float32), 0.0)
    publish_pair(to + (place.to(gl.int64) - (place & 1)) * 2, new * gamma, exists.to(gl.int32), C)
    return squares + new * new


@gluon.jit
def store_squares(to, at, squares, C: gl.constexpr):
    """Stores a block's sums of squares in the vector `to`: those of token i are in the threads of warp i. Other blocks wait for
    x first, so they are added up when all of that is stored."""
    M: gl.constexpr = C.table.shape.tokens
    if warp_number() < M:
        for step in gl.static_range(5):
            squares += exchanged(squares, 1 << step)
        publish(to + (gl.program_id(0) * M + at.warp) * 4, squares, (at.lane == 0).to(gl.int32), C)


@gluon.jit
def finish(args, at, layer, out, begin, parity, squares, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Stores a thread's output of a flush; with a residual adds the square of h to the thread's `squares`."""
    N: gl.constexpr = ptx(C.table.shape.rows, product)
    exists = out.exists.to(gl.int32)
    total = total_of(out, at, parity, 0, product, index, C)
    place = out.token * N + (begin + out.row_block) * 16 + out.row
    if product == "gate_up":
        total = gate_times_up(total, total_of(out, at, parity, 1, product, index, C), C)
        place = (begin + out.row_block) * 8 + out.row
        if not ptx(C.is_routed, product):
            place += out.token * (N // 2)
        publish_pair(vector(args, layer, "gated", C) + (place.to(gl.int64) - (place & 1)) * 2, total, exists, C)
    elif product == "qkv":
        publish_pair(vector(args, layer, "qkv", C) + (place.to(gl.int64) - (place & 1)) * 2, total, exists, C)
    elif product == "head":
        gl.store(args.logits + place, total.to(args.h.dtype.element_ty), mask=out.exists)
    else:
        NAME: gl.constexpr = "mlp_x" if product == "o" else "next_x"
        kept = (total + out.old[0]).to(args.h.dtype.element_ty)
        squares = store_h(args, vector(args, layer, NAME, C), place, kept, out.gamma[0], out.exists, squares, C)
    return squares


@gluon.jit
def embed(args, at, layer, C: gl.constexpr):
    """Stores this block's rows of the tokens' embeddings in h, and their x and squares in the vectors of `layer`, which is the
    one after the last."""
    H: gl.constexpr = C.table.shape.hidden
    AT_ONCE: gl.constexpr = ptx(C.table.at_once, "down")
    HALF: gl.constexpr = args.h.dtype.element_ty
    at = same_thread(at, C)
    gamma = field(args, layer, "next_gamma", C).to(gl.pointer_type(gl.float32), bitcast=True)
    squares = at.lane.to(gl.float32) * 0.0
    first, end = own_row_blocks("down", C)
    for begin in range(first, end, AT_ONCE):
        exists, row_block, row, token = own_output(at, begin, gl.minimum(end - begin, AT_ONCE), "down", C)
        of_h = gl.minimum((begin + row_block) * 16 + row, H - 1)
        number = gl.load(args.tokens + gl.load(args.rows + token))
        value = gl.load(args.embedding + (number.to(gl.int64) * H + of_h))
        if args.row_scale is not None:
            value = (value.to(gl.float32) - 128.0) * gl.load(args.row_scale + number).to(gl.float32)
        kept = value.to(HALF)
        if C.embedding_scale != 1:
            kept = (kept.to(gl.float32) * C.embedding_scale).to(HALF)
        to = vector(args, layer, "next_x", C)
        squares = store_h(args, to, token * H + of_h, kept, gl.load(gamma + of_h), exists, squares, C)
    store_squares(vector(args, layer, "next_squares", C), at, squares, C)


@gluon.jit
def receive_x(x, args, at, layer, first: gl.constexpr, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Gathers x from chunk `first` on, as many chunks as shared memory has, and its sums if the weights' form needs them."""
    CHUNKS: gl.constexpr = min(ptx(C.table.chunks_at_once, product), ptx(C.table.chunks, product) - first)
    WAIT: gl.constexpr = "x of gate-up" if product == "gate_up" else "x of " + product
    if not (ptx(C.is_routed, product) and product == "gate_up"):  # the router has gathered that
        gather_x(x, args, at, layer, first, product, WAIT, C)
    if ptx(C.form, product, index).k_block.sums > 0 and not ptx(C.x_in_registers, product, index):
        store_x_sums(at, CHUNKS, product, index, C)


@gluon.jit
def multiply_own(
    args, at, layer, place, parity, x, squares_of, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """This block's rows of a product; returns the thread's sum of squares, too. Arguments as in `multiply_product`."""
    T: gl.constexpr = C.table
    M: gl.constexpr = T.shape.tokens
    AT_ONCE: gl.constexpr = ptx(T.at_once, product)
    CHUNKS: gl.constexpr = ptx(T.chunks, product)
    STEP: gl.constexpr = ptx(T.chunks_at_once, product)
    LONG: gl.constexpr = product == "gate_up" or product == "down"  # more weights than the ring holds, and x is next
    BY_CHUNKS: gl.constexpr = ptx(T.by_chunks, product)
    REGISTERS: gl.constexpr = ptx(C.x_in_registers, product, index)
    STRIDE: gl.constexpr = ptx(T.sums_stride, product)
    TURNS: gl.constexpr = C.squares_turns
    ROUTED: gl.constexpr = ptx(C.is_routed, product)
    SQUARES: gl.constexpr = ptx(C.normed, product) and not ROUTED
    rows = row_vectors(args, layer, product, index, C)
    scales = ()
    if ROUTED and product == "down":
        scales = channel_scales(args, at, layer, product, index, C)
    receive_x(x, args, at, layer, 0, product, index, C)
    if ROUTED and product == "down":
        store_factors(at, scales, product, index, C)
    of_x = ()
    of_sums = ()
    if REGISTERS:
        of_x, of_sums = x_of_chunks(at, product, index, C)
    if LONG:
        set_flag(at, 0, at.index == 0, C)
    zero, warp = at.lane.to(gl.float32) * 0.0, warp_number()
    squares = zero
    group, pair = at.lane >> 2, at.lane & 3
    own_sums = at.start + T.sums_start + at.warp * (64 * M) + (group * M + gl.minimum(2 * pair, max(M - 2, 0))) * 4
    first, end = own_row_blocks(product, C)
    for begin in range(first, end, AT_ONCE):
        count = gl.minimum(end - begin, AT_ONCE)
        out = output_of(args, at, rows, begin, count, product, C)
        factors = None
        if ROUTED and product == "down":
            factors = at.start + (T.factors_start + (begin - first) * (64 * T.shape.choices))
        to = own_sums + parity * T.sums_bytes
        loaded = (at.lane * 0 + EMPTY_WORD,) * TURNS
        if BY_CHUNKS:
            accs = (zero, zero, zero, zero) * AT_ONCE
            for part in gl.static_range(0, CHUNKS, STEP):
                if part > 0:
                    receive_x(x, args, at, layer, part, product, index, C)
                elif (begin > first) & (STEP < CHUNKS):
                    receive_x(x, args, at, layer, 0, product, index, C)
                if count == AT_ONCE:
                    for chunk in range(min(STEP, CHUNKS - part)):
                        if LONG and part + STEP >= CHUNKS:
                            set_flag(at, 1, (begin + count == end) & (part + chunk == CHUNKS - 1), C)
                        place, accs = multiply_chunk(
                            args, at, layer, place, accs, chunk, factors, part, AT_ONCE, product, index, C
                        )  # fmt: skip
                else:
                    for chunk in range(min(STEP, CHUNKS - part)):
                        if LONG and part + STEP >= CHUNKS:
                            set_flag(at, 1, part + chunk == CHUNKS - 1, C)
                        new = ()
                        for i in gl.static_range(AT_ONCE):
                            acc = accs[4 * i : 4 * i + 4]
                            if i < count:
                                of_rows = factors
                                if factors is not None:
                                    of_rows = factors + i * (64 * T.shape.choices)
                                place, acc = multiply_chunk(
                                    args, at, layer, place, acc, chunk, of_rows, part, 1, product, index, C
                                )  # fmt: skip
                            new = new + acc
                        accs = new
            for i in gl.static_range(AT_ONCE):
                run(C.store_sums, "=r,r,r,f,f,f,f", (to + i * STRIDE, pair) + accs[4 * i : 4 * i + 4])
        else:
            for row_block in range(count):
                last = begin + row_block == end - 1
                if LONG and REGISTERS:
                    set_flag(at, 1, last, C)
                if SQUARES:  # late, when they have arrived; products take longer than the loads
                    needed = (begin == first) & (row_block == count - 1) & (warp < M)
                    loaded = squares_ahead(loaded, squares_of, at, needed, C)
                acc = (zero, zero, zero, zero)
                of_rows = factors
                if factors is not None:
                    of_rows = factors + row_block * (64 * T.shape.choices)
                if REGISTERS:
                    place, acc = multiply_row_block(args, at, layer, place, of_x, of_sums, of_rows, product, index, C)
                else:
                    for chunk in range(CHUNKS):
                        if LONG:
                            set_flag(at, 1, last & (chunk == CHUNKS - 1), C)
                        place, acc = multiply_chunk(args, at, layer, place, acc, chunk, of_rows, 0, 1, product, index, C)
                run(C.store_sums, "=r,r,r,f,f,f,f", (to + row_block * STRIDE, pair) + acc)
        if SQUARES:
            needed = (begin == first) & (warp < M)
            rms_to_shared(loaded, squares_of, needed, rows.factor, args, at, layer, product, C)
        barrier()
        if warp < ptx(C.output_warps, product):
            squares = finish(args, at, layer, out, begin, parity, squares, product, index, C)
        parity = parity ^ 1
    return place, parity, squares


@gluon.jit
def multiply_product(
    args, at, layer, place, parity, x, squares_of, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """One product: its x is at address `x`; a norm's partial sums of squares [blocks, tokens] are at `squares_of`."""
    EVERY: gl.constexpr = ptx(C.table.row_blocks, product) >= C.table.blocks
    at = same_thread(at, C)
    if EVERY:
        place, parity, squares = multiply_own(args, at, layer, place, parity, x, squares_of, product, index, C)
    else:
        # Without a row block no warp may write x: attention uses the same memory, and no barrier would be between them.
        squares = at.lane.to(gl.float32) * 0.0
        first, end = own_row_blocks(product, C)
        if first < end:
            place, parity, squares = multiply_own(args, at, layer, place, parity, x, squares_of, product, index, C)
    if not ptx(C.normed, product):
        NAME: gl.constexpr = "mlp_squares" if product == "o" else "next_squares"
        store_squares(vector(args, layer, NAME, C), at, squares, C)
    return place, parity


@gluon.jit
def multiply_forms(args, at, layer, place, parity, x, squares_of, product: gl.constexpr, C: gl.constexpr):
    """As `multiply_product`, in the layer's form."""
    COUNT: gl.constexpr = len(ptx(C.table.shape.forms_of, product))
    if COUNT == 1:
        place, parity = multiply_product(args, at, layer, place, parity, x, squares_of, product, 0, C)
    else:
        form = field(args, layer, product + " form", C)
        for index in gl.static_range(COUNT):
            if form == index:
                place, parity = multiply_product(args, at, layer, place, parity, x, squares_of, product, index, C)
    return place, parity


# ---- experts


@gluon.jit
def router_words(args, at, layer, C: gl.constexpr):
    """Returns a lane's columns of this block's rows of the router, in the order [row][chunk]; of rows that do not exist those
    of others."""
    T: gl.constexpr = C.table
    K: gl.constexpr = T.shape.hidden
    ROWS: gl.constexpr = T.router_rows
    CHUNKS: gl.constexpr = ptx(T.chunks, "gate_up")
    router = field(args, layer, "router", C)
    first, _ = own_experts(C)
    words = ()
    for row in gl.static_range(ROWS):
        expert = gl.minimum(first + row, T.shape.experts - 1)
        for chunk in gl.static_range(CHUNKS):
            column = gl.minimum((chunk * T.warps + at.warp) * K_BLOCK + 4 * at.lane, K - 4)
            words = words + four_of_router(router + (expert * K + column).to(gl.int64) * 2, C)
    return words


@gluon.jit
def own_experts(C: gl.constexpr):
    """Returns the first expert whose logit this block computes, and the one after its last."""
    COUNT: gl.constexpr = C.table.shape.experts
    BLOCKS: gl.constexpr = C.table.blocks
    block = gl.program_id(0)
    return block * COUNT // BLOCKS, (block + 1) * COUNT // BLOCKS


@gluon.jit
def route(args, at, layer, parity, C: gl.constexpr):
    """Chooses the experts of all tokens: stores their numbers and weights, and 1 / rms, in shared memory. Every block computes
    its rows of the router, and the choice by itself. x stays in shared memory, for gate-up."""
    T: gl.constexpr = C.table
    M: gl.constexpr = T.shape.tokens
    ROWS: gl.constexpr = T.router_rows
    CHUNKS: gl.constexpr = ptx(T.chunks, "gate_up")
    K_BLOCKS: gl.constexpr = ptx(T.k_blocks, "gate_up")
    at = same_thread(at, C)
    warp = warp_number()
    words = router_words(args, at, layer, C)
    factor = row_vectors(args, layer, "gate_up", 0, C).factor
    gather_x(vector(args, layer, "mlp_x", C), args, at, layer, 0, "gate_up", "x of gate-up", C)
    set_flag(at, 0, at.index == 0, C)
    own_x = at.start + T.x_start + at.warp * T.x_warp_bytes + (at.lane >> 1) * (16 * M) + (at.lane & 1) * 8
    sums_at = at.start + (T.sums_start + parity * T.sums_bytes)
    for row in gl.static_range(ROWS):
        for token in gl.static_range(M):
            total = at.lane.to(gl.float32) * 0.0
            for chunk in gl.static_range(CHUNKS):
                w = words[2 * (row * CHUNKS + chunk) : 2 * (row * CHUNKS + chunk + 1)]
                product = product_of_four(w, own_x + (256 * M * chunk + 16 * token), C)
                total += gl.where(chunk * T.warps + at.warp < K_BLOCKS, product, 0.0)
            total = warp_sum(total)
            to = sums_at + ((row * M + token) * T.warps + at.warp) * 4
            run(C.store_float, "=r,r,f,r", [to, total, (at.lane == 0).to(gl.int32)])
    barrier()
    if warp < M:
        choose_experts(args, at, layer, sums_at, factor, C)
    barrier()
    return parity ^ 1


@gluon.jit
def choose_experts(args, at, layer, sums_at, factor, C: gl.constexpr):
    """Adds up this block's logits of a token, of which the warps' sums are at `sums_at`, and publishes them; then chooses the
    token's experts by all its logits. Warp i executes it for token i."""
    T: gl.constexpr = C.table
    M: gl.constexpr = T.shape.tokens
    EXPERTS: gl.constexpr = T.shape.experts
    TOP: gl.constexpr = T.shape.top_k
    ROWS: gl.constexpr = T.router_rows
    TURNS: gl.constexpr = C.logits_of_lane
    SQUARES: gl.constexpr = C.squares_turns
    at = same_thread(at, C)
    logits = vector(args, layer, "logits", C) + at.warp * (4 * EXPERTS)
    first, end = own_experts(C)
    for row in gl.static_range(ROWS):
        place = sums_at + ((row * M + at.warp) * T.warps + gl.minimum(at.lane, T.warps - 1)) * 4
        of_warp = asm(C.load_float, "=f,r", [place], gl.float32)
        total = warp_sum(gl.where(at.lane < T.warps, of_warp, 0.0))
        publish(logits + (first + row + at.lane * 0) * 4, total, ((at.lane == 0) & (first + row < end)).to(gl.int32), C)
    nothing = (at.lane * 0 + EMPTY_WORD,) * SQUARES
    rms_to_shared(nothing, vector(args, layer, "mlp_squares", C), warp_number() < M, factor, args, at, layer, "gate_up", C)
    run(C.sync_warp, "=r", [])
    root = asm(C.load_float, "=f,r", [at.start + (T.rms_start + 4 * at.warp)], gl.float32)
    addresses = ()
    for i in gl.static_range(TURNS):
        addresses = addresses + (logits + gl.minimum(at.lane + 32 * i, EXPERTS - 1) * 4,)
    words = poll(addresses, at.lane * 0 + 1, args.status, status_of(layer, BEFORE_GATE_UP, C), TURNS, 1, C)
    expert, key = choose(words, at.lane, EXPERTS, TOP, C)
    own = at.start + at.warp * (4 * TOP)
    store_choice(own + T.chosen_start, at.lane, expert, TOP, C)
    run(C.arrive, "=r,r,r", [at.start + T.routed_start, at.lane])
    store_choice(own + T.weights_start, at.lane, weights_of(words, key, root, at.lane, EXPERTS, TOP, C), TOP, C)


@gluon.jit
def factor_of_thread(at, turn: gl.constexpr, C: gl.constexpr):
    """Returns (number, chosen expert, row) of a thread's factor of rows of down: the factors are [own row block, chosen expert,
    row], divided among the threads in turns."""
    CHOICES: gl.constexpr = C.table.shape.choices
    number = turn * C.threads + at.index
    first, _ = own_row_blocks("down", C)
    row = (first + (number >> 4) // CHOICES) * 16 + (number & 15)
    return number, (number >> 4) % CHOICES, gl.minimum(row, C.table.shape.hidden - 1)


@gluon.jit
def channel_scales(args, at, layer, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Returns the scales of channels for a thread's factors, if down has such. It is called before the wait for x, in which its
    loads take no time."""
    CHANNEL: gl.constexpr = ptx(C.form, product, index).channel
    KIND: gl.constexpr = gl.float32 if CHANNEL == "fp32" else gl.bfloat16
    TURNS: gl.constexpr = C.factor_turns
    scales = ()
    if CHANNEL is not None:
        channel = field(args, layer, product + " channel_scale", C).to(gl.pointer_type(KIND), bitcast=True)
        for turn in gl.static_range(TURNS):
            _, chosen, row = factor_of_thread(at, turn, C)
            expert = chosen_expert(at.start, chosen, C)
            scales = scales + (gl.load(channel + (expert * C.table.shape.hidden + row)),)
    return scales


@gluon.jit
def store_factors(at, scales, product: gl.constexpr, index: gl.constexpr, C: gl.constexpr):
    """Stores a thread's factors in shared memory: the weight of the expert, times the scale of the row."""
    T: gl.constexpr = C.table
    TURNS: gl.constexpr = C.factor_turns
    for turn in gl.static_range(TURNS):
        number, chosen, _ = factor_of_thread(at, turn, C)
        factor = asm(C.load_float, "=f,r", [at.start + T.weights_start + 4 * chosen], gl.float32)
        if ptx(C.form, product, index).channel is not None:
            factor *= scales[turn].to(gl.float32)
        run(C.store_float, "=r,r,f,r", [at.start + T.factors_start + 4 * number, factor, (number < T.factors).to(gl.int32)])
    barrier()


# ---- the kernel


@gluon.jit
def math_warps(args, C: gl.constexpr):
    """The math warps: all stages of all layers."""
    T: gl.constexpr = C.table
    LAYERS: gl.constexpr = T.shape.layers
    WARPS: gl.constexpr = T.warps
    index = gl.arange(0, C.threads, gl.BlockedLayout([1], [32], [WARPS], [0]))
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32) + index * 0
    at = MathThread(index, index & 31, index >> 5, start)
    zero = gl.program_id(0) * 0
    place = RingPlace(zero, zero)
    parity = zero
    embed(args, at, zero + LAYERS, C)
    x = vector(args, zero + LAYERS, "next_x", C)
    squares = vector(args, zero + LAYERS, "next_squares", C)
    for layer in range(LAYERS):
        prefetch_layer(args, layer + 1, C)
        vectors = attention_vectors(args, layer, C)
        place, parity = multiply_forms(args, at, layer, place, parity, x, squares, "qkv", C)
        attention(args, at, layer, vectors, parity, C)
        attended = vector(args, layer, "attended", C)
        place, parity = multiply_forms(args, at, layer, place, parity, attended, attended, "o", C)
        if T.shape.experts > 0:
            parity = route(args, at, layer, parity, C)
        x = vector(args, layer, "mlp_x", C)
        squares = vector(args, layer, "mlp_squares", C)
        place, parity = multiply_forms(args, at, layer, place, parity, x, squares, "gate_up", C)
        gated = vector(args, layer, "gated", C)
        place, parity = multiply_forms(args, at, layer, place, parity, gated, gated, "down", C)
        x = vector(args, layer, "next_x", C)
        squares = vector(args, layer, "next_squares", C)
    if T.shape.has_head:
        multiply_product(args, at, zero + LAYERS, place, parity, x, squares, "head", 0, C)


@gluon.jit(do_not_specialize=["table_stride"])
def decode_step(
    layers, vectors, h, tokens, embedding, row_scale, tables, positions, rows, status, logits, table_stride, inverse_width, eps,
    C: gl.constexpr,
):  # fmt: skip
    """One thread block of the step."""
    ROWS: gl.constexpr = (C.table.shared_bytes + 127) // 128
    WARPS: gl.constexpr = C.table.warps
    shared = gl.allocate_shared_memory(gl.int32, [ROWS, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    index = gl.arange(0, C.threads, gl.BlockedLayout([1], [32], [WARPS], [0]))
    # Keeps the allocation alive, which PTX only uses by address.
    shared.index(0).store(gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    barrier()
    run(C.init, "=r,r", [index])
    barrier()
    args = StepArgs(
        layers, vectors, h, tokens, embedding, row_scale, tables, positions, rows, status, logits, table_stride, inverse_width,
        eps,
    )  # fmt: skip
    LOADERS: gl.constexpr = C.loaders
    gl.warp_specialize([(math_warps, (args, C)), (load, (args, C))], [LOADERS], [32])


class StepPlan:
    """Plan of a decode step in one launch: created once for a table and the forms of its weights, called many times.

    forms: of each product's weights, as `StepShape.forms`. biases: the products with a bias. head_norms: heads of q and k are
    normed; sinks: heads have sinks. embedding_scale: factor of embeddings. normalize: the weights of chosen experts are a
    softmax over them, not over all experts.
    """

    def __init__(
        self, table: StepTable, forms: tuple[tuple[WeightForm, ...], ...], dtype: torch.dtype, gate: Gate,
        biases: tuple[ProductName, ...] = (), head_norms: bool = False, sinks: bool = False, embedding_scale: float = 1.0,
        normalize: bool = True,
    ) -> None:  # fmt: skip
        self.table, half = table, half_type(dtype)
        products = tuple(
            tuple(_product_form(*each, half) for each in zip(units, of_product, strict=True))
            for units, of_product in zip(table.shape.forms, forms, strict=True)
        )
        epilogue = Epilogue(False, False, table.blocks, gate)
        self.config = DecodeStep(
            table, half, products, epilogue, biases, head_norms, sinks, embedding_scale, normalize
        )  # fmt: skip
        self.launch = Launcher(decode_step, (table.blocks, 1, 1), table.warps, cooperative=True)

    def __call__(
        self, layers: Tensor, vectors: Tensor, h: Tensor, tokens: Tensor, embedding: Tensor, row_scale: Tensor | None,
        tables: Tensor, positions: Tensor, rows: Tensor, status: Tensor, logits: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Computes h [M, H] and, if the table has a head, logits [M, V]; returns the head's x [M, H] and squares float32
        [blocks, M], both in `vectors`.

        layers int64 [layers + 1, fields]: what `StepShape.fields` names. vectors int32 [table.words]: any contents.
        tokens int32 [slots]. embedding [V, H]: of h's type, or uint8 codes with row_scale [V]. rows int32 [M]: the slots of
        tokens, positions and tables. status int32 [1]: 0, or the wait that took too long, which no launch clears.
        """
        vectors.fill_(EMPTY)
        self.launch(
            layers, vectors, h, tokens, embedding, row_scale, tables, positions, rows, status, logits, tables.stride(0),
            1.0 / h.shape[1], eps, self.config,
        )  # fmt: skip
        m, last = len(h), vectors[(self.table.shape.layers - 1) * self.table.start("end") :]
        new_x = last[self.table.start("next_x") :][: h.numel() // 2].view(h.dtype).view(h.shape)
        squares = last[self.table.start("next_squares") :][: self.table.blocks * m]
        return new_x, squares.view(torch.float32).view(self.table.blocks, m)


def _product_form(unit: UnitForm, form: WeightForm, dtype: HalfType) -> ProductForm:
    raw = KBlock.takes_raw(form.format, dtype, form.group, form.zero)
    chains = 2 if BLOCK_MMAS // max(1, BLOCK_K // (form.group or BLOCK_K)) >= 4 else 1
    k_block = KBlock(form.format, dtype, 8, form.group, form.zero, form.scale_dtype, raw, chains)
    channel = ("bf16" if form.subnormal else "fp32") if form.channel_scale else None
    return ProductForm(unit, k_block, channel)
