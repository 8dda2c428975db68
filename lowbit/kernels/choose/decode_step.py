"""The task table of a decode step in one launch: which block computes what, in which order, and where its data are.

A launch runs all layers (kernels/sm90/decode_step.py). Every block walks the same stages and takes its share of each:

    embedding
    qkv | attention of some splits | combination of splits | o | [router] | gate-up | down        of each layer, in order
    LM head

A block owns whole m16 row blocks of each product, so no sum crosses blocks; o and down have the same rows, so a block also owns
its rows of the residual, and of the embedding. A warp multiplies units: one row block times one k block (128 columns). Weights
of a block are a stream of slots of some units each, as many as fit. The stream does not depend on activations. Activations are
exchanged in `vectors`, in words of 32 bits (kernels/parts/polled.py). Each layer has vectors of its own, so each word is
written once in a launch.

The experts that a token has chosen are one MLP: rows of gate-up and columns of down of the first chosen expert, then those of
the second one, and so on. Tasks are parts of that MLP, so they do not depend on the choice; addresses of weights do.

Pure functions of a shape and a number of blocks, without Triton; `str(table)` prints a block's tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.attention import AttentionShape

ProductName = Literal["qkv", "o", "gate_up", "down", "head"]

LAYER_PRODUCTS: tuple[ProductName, ...] = ("qkv", "o", "gate_up", "down")

PRODUCT_NAMES: tuple[ProductName, ...] = (*LAYER_PRODUCTS, "head")

BLOCK_K = 128
"""Columns of a k block."""

TILE_K = 64
"""Columns of a tile of weights: K of a product is a multiple of it."""

WARPS = 16
"""Warps of a block that multiply."""

TOKENS = (1, 2, 4, 8)
"""Numbers of tokens of a step; those whose activations fit beside a ring of weights."""

MOST_SPLITS = 32
"""Largest number of splits of a row's keys and values: a warp combines them, one for each lane."""

FEWEST_SMS = 16

BYTES = 227 << 10
"""Shared memory of a block on sm_90."""

RESERVED_BYTES = 384
"""Shared memory for what the compiler adds for the roles of warps: 100 bytes at most with Triton 3.6 and 3.9."""

MOST_X_BYTES = 72 << 10
"""Activations that a block has at a time; more of them are gathered in parts of K."""

MOST_SLOT_BYTES = 21 << 10
"""Largest slot with more than one unit. More bytes would be few slots, of which a whole one is waited for."""

LEAST_SLOT_BYTES = 8 << 10
"""Smallest slot, if weights have larger ones: each slot takes the loader some time."""

MOST_SLOTS = 16

WAITS = (
    "x of qkv", "squares before qkv", "q, k and v", "splits of attention", "x of o", "x of gate-up",
    "squares before gate-up, or logits of experts", "x of down", "x of head", "squares before head", "weights",
    "a free slot, or the choice of experts",
)  # fmt: skip
"""What a block can wait for. A status of 1 + layer * len(WAITS) + i says that it waited for WAITS[i] too long."""

FIELDS: tuple[str, ...] = (
    *(f"{product} {part}" for product in PRODUCT_NAMES for part in ("codes", "scale", "channel_scale", "bias")),
    *(f"{product} form" for product in LAYER_PRODUCTS),
    "mlp_gamma", "next_gamma", "k", "v", "cos_sin", "q_gamma", "k_gamma", "sinks", "factors", "window",
)  # fmt: skip
"""The columns of the table of layers: addresses, and numbers: the form of each product's weights, an index into
`StepShape.forms`; `factors`: the float32 factors of the norms before qkv (or before the head) and before gate-up; `window`: of
attention in tokens, more than any context if there is none. The row after the last layer has the head, and as `next_gamma` that
of the first layer."""

EXPERT_FIELDS = (*FIELDS, "router")
"""The columns of the table of layers whose MLPs are experts; `router`: the 16-bit weight [experts, hidden]."""

MOST_EXPERTS, MOST_CHOSEN = 256, 16
"""Largest numbers of experts of a layer, and of a token: a warp chooses, with 8 logits in a lane."""


@dataclass(frozen=True)
class UnitForm:
    """The bytes of a unit of weights. `bits`: of a code, 16 for rows of 16-bit weights. `scale_bytes`: its scales."""

    bits: int
    scale_bytes: int = 0

    @property
    def dense(self) -> bool:
        """True for rows of 16-bit weights, False for codes in fragment order."""
        return self.bits == 16

    @property
    def code_bytes(self) -> int:
        """Codes of a unit."""
        return 16 * BLOCK_K * self.bits // 8

    def row_bytes(self, units: int) -> int:
        """Distance of rows of 16-bit weights in a slot. It is an odd number of vectors of 16 bytes, so that `ldmatrix` has no
        bank conflicts."""
        return units * 2 * BLOCK_K + 16

    def slot_bytes(self, units: int) -> int:
        """Bytes of a slot: codes of all units, then scales of all units."""
        return 16 * self.row_bytes(units) if self.dense else units * (self.code_bytes + self.scale_bytes)

    def units(self, most: int, slot_bytes: int) -> int:
        """Largest power of two of units, at most `most`, in a slot of `slot_bytes`; 1 if none fits."""
        units = most
        while units > 1 and self.slot_bytes(units) > slot_bytes:
            units //= 2
        return units


@dataclass(frozen=True)
class StepShape:
    """Shape of a decode step. `forms`: of each product in the order of PRODUCT_NAMES, the different forms of its weights in the
    layers; the head's is empty where the launch ends before the head. `vocab`: rows of the head. `windows`: some layers have a
    window. `experts`: those of a layer, of which a token has `top_k`; 0 for a dense MLP. `intermediate`: columns of down, of
    the chosen experts of all tokens together."""

    layers: int
    hidden: int
    intermediate: int
    attention: AttentionShape
    tokens: int
    forms: tuple[tuple[UnitForm, ...], ...]
    vocab: int = 0
    windows: bool = False
    experts: int = 0
    top_k: int = 1

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns of the table of layers."""
        return EXPERT_FIELDS if self.experts else FIELDS

    def is_routed(self, product: ProductName) -> bool:
        """True for the products of experts."""
        return self.experts > 0 and product in ("gate_up", "down")

    @property
    def choices(self) -> int:
        """Number of chosen experts of all tokens: those of the first token, then those of the second one, and so on. An expert
        may be among them several times."""
        return self.tokens * self.top_k

    @property
    def expert_row_blocks(self) -> int:
        """Number of m16 row blocks of gate-up of one expert."""
        return 2 * self.intermediate // self.choices // 16

    @property
    def expert_k_blocks(self) -> int:
        """Number of k blocks of down of one expert."""
        return self.intermediate // self.choices // BLOCK_K

    def x_rows(self, product: ProductName) -> int:
        """Rows of x of a product: the tokens; for down of experts one, as each of its k blocks has one token."""
        return 1 if product == "down" and self.experts else self.tokens

    def rows(self, product: ProductName) -> int:
        """N of a product; gate-up has rows of both."""
        a = self.attention
        sizes = {"qkv": a.features, "o": self.hidden, "gate_up": 2 * self.intermediate, "down": self.hidden, "head": self.vocab}
        return sizes[product]

    def columns(self, product: ProductName) -> int:
        """K of a product."""
        out = self.attention.heads * self.attention.head_dim
        return {"o": out, "down": self.intermediate}.get(product, self.hidden)

    def forms_of(self, product: ProductName) -> tuple[UnitForm, ...]:
        """The different forms of a product's weights."""
        return self.forms[PRODUCT_NAMES.index(product)]

    @property
    def layer_bytes(self) -> int:
        """Bytes of weights and scales of a layer in the first form of each product."""
        total = 0
        for product in LAYER_PRODUCTS:
            form = self.forms_of(product)[0]
            total += self.rows(product) * self.columns(product) * (form.code_bytes + form.scale_bytes) // (16 * BLOCK_K)
        return total

    @property
    def has_head(self) -> bool:
        """True if the launch computes the head."""
        return bool(self.forms_of("head"))

    @property
    def products(self) -> tuple[ProductName, ...]:
        """The products of the launch."""
        return PRODUCT_NAMES if self.has_head else LAYER_PRODUCTS


@dataclass(frozen=True)
class Slot:
    """A part of a block's stream of weights: k blocks `first_k_block` to `first_k_block + k_blocks` of a row block. Warp
    k block % warps multiplies a k block. A slot without k blocks completes a chunk of as many k blocks as there are warps."""

    product: ProductName
    row_block: int
    first_k_block: int
    k_blocks: int


@dataclass(frozen=True)
class StepTable:
    """The tasks of all blocks, and the layouts of shared memory and of `vectors`; a constant of the kernel."""

    shape: StepShape
    blocks: int
    warps: int = WARPS

    # ---- products

    def row_blocks(self, product: ProductName) -> int:
        """Number of m16 row blocks of a product; rows of the last one of the head may not exist."""
        return -(-self.shape.rows(product) // 16)

    def k_tiles(self, product: ProductName) -> int:
        """Number of tiles of K of a product."""
        return self.shape.columns(product) // TILE_K

    def k_blocks(self, product: ProductName) -> int:
        """Number of k blocks of a product; the last one may have one tile."""
        return -(-self.shape.columns(product) // BLOCK_K)

    def chunks(self, product: ProductName) -> int:
        """Number of k blocks of a row block that a warp multiplies."""
        return -(-self.k_blocks(product) // self.warps)

    def chunks_at_once(self, product: ProductName) -> int:
        """Number of chunks of x that a block has at a time: all, or about the same number in each part."""
        most = max(1, MOST_X_BYTES // (2 * BLOCK_K * self.shape.x_rows(product) * self.warps))
        return -(-self.chunks(product) // -(-self.chunks(product) // most))

    def parts(self, product: ProductName) -> int:
        """Number of parts in which x is gathered."""
        return -(-self.chunks(product) // self.chunks_at_once(product))

    def units(self, product: ProductName, form: int = 0) -> int:
        """Number of units of a slot: a power of two. A chunk has warps / units slots."""
        return self.shape.forms_of(product)[form].units(self.warps, self.slot_bytes)

    def slots_of_chunk(self, product: ProductName, form: int = 0) -> int:
        """Number of slots with the k blocks of all warps."""
        return self.warps // self.units(product, form)

    def own_row_blocks(self, product: ProductName, block: int) -> range:
        """The row blocks of a block."""
        count = self.row_blocks(product)
        return range(block * count // self.blocks, (block + 1) * count // self.blocks)

    def at_once(self, product: ProductName) -> int:
        """Number of row blocks whose sums a block reduces together. With a residual it is 2: a warp then has all rows of one
        token, and adds up their squares by itself."""
        if product in ("o", "down"):
            return 2
        most = min(-(-self.row_blocks(product) // self.blocks), self.warps // self.shape.tokens)
        if product == "head":  # of many row blocks; their sums shall take no more room from the ring
            most = min(most, max(8, self.at_once("gate_up")))
        return max(1, most if self.parts(product) == 1 else min(most, 4))

    def by_chunks(self, product: ProductName) -> bool:
        """True if a block multiplies chunk by chunk of the row blocks whose sums are reduced together, and reads x once for all
        of them; False: row block by row block."""
        return self.parts(product) > 1 or (self.chunks(product) > 2 and self.at_once(product) <= 4)

    def slots(self, block: int, product: ProductName, form: int = 0) -> Iterator[Slot]:
        """A block's stream of weights of a product, in order."""
        count, units, own = self.k_blocks(product), self.units(product, form), self.own_row_blocks(product, block)
        by_chunks, k_blocks = self.by_chunks(product), self.chunks(product) * self.warps
        at_once, step = (self.at_once(product), self.warps) if by_chunks else (1, k_blocks)
        for begin in range(own.start, own.stop, at_once):
            for part in range(0, k_blocks, step):
                for row_block in range(begin, min(begin + at_once, own.stop)):
                    for first in range(part, part + step, units):
                        yield Slot(product, row_block, first, max(0, min(units, count - first)))

    # ---- experts

    @property
    def router_rows(self) -> int:
        """Largest number of a block's rows of the router."""
        return -(-self.shape.experts // self.blocks)

    # ---- attention

    @property
    def splits(self) -> int:
        """Largest number of splits of a row and kv head: all blocks have work if contexts are long enough."""
        pairs = self.shape.tokens * self.shape.attention.kv_heads
        return max(1, min(MOST_SPLITS, self.blocks // pairs))

    @property
    def attention_tasks(self) -> int:
        """Number of splits of all rows and kv heads."""
        return self.shape.tokens * self.shape.attention.kv_heads * self.splits

    def own_tasks(self, block: int) -> range:
        """The tasks of a block: task = (row * kv_heads + kv head) * splits + split."""
        return range(block, self.attention_tasks, self.blocks)

    @property
    def tile_warps(self) -> int:
        """Number of warps that have tiles of keys and values: all, or half of them where the sums of many heads would take more
        shared memory."""
        return self.warps if self.shape.attention.group <= 4 else self.warps // 2

    @property
    def share_tokens(self) -> int:
        """Tokens of the smallest split: half of the tiles of 8 tokens that the warps compute at once. It divides a page."""
        return 4 * self.tile_warps

    def active(self, context: int) -> tuple[int, int]:
        """(number of splits with work, tokens of each) at `context` older tokens, as the kernel computes them. What warps
        compute at once is not split: splits take two exchanges between blocks."""
        shares = -(-context // self.share_tokens)
        active = 1 if shares <= 2 else min(self.splits, shares)
        each = max(1, -(-shares // active))
        return max(1, -(-shares // each)), each * self.share_tokens

    # ---- shared memory of a block, in bytes

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot: those of some units of a form, at least a unit of any. Slots of other forms are not full; the
        weights of all layers take the least memory of the ring."""
        forms = {product: self.shape.forms_of(product) for product in self.shape.products}
        least = max(form.slot_bytes(1) for of_product in forms.values() for form in of_product)
        sizes = {
            form.slot_bytes(form.units(most, MOST_SLOT_BYTES))
            for product in LAYER_PRODUCTS
            for form in forms[product]
            for most in (self.warps >> i for i in range(self.warps.bit_length()))
        }

        def bytes_in_ring(size: int) -> float:
            weights = {name: self.shape.rows(name) * self.shape.columns(name) / len(forms[name]) for name in LAYER_PRODUCTS}
            return sum(weights[name] * size / form.units(self.warps, size) for name in LAYER_PRODUCTS for form in forms[name])

        large = [size for size in sizes if size >= min(LEAST_SLOT_BYTES, max(sizes))]
        return max(least, min(large, key=lambda size: (bytes_in_ring(size), -size)))

    @property
    def x_warp_bytes(self) -> int:
        """Activations of one warp: its k blocks of all tokens, then their sums over the groups of columns of scales."""
        forms = [form for product in self.shape.products for form in self.shape.forms_of(product)]
        groups = max(max(1, form.scale_bytes // 32) for form in forms)  # a group has 32 bytes of scales, and as many of zeros
        return self.x_sums_start + -(-self._most_x * groups * 4 // 16) * 16

    @property
    def x_sums_start(self) -> int:
        """Start of the sums, in bytes from a warp's activations."""
        return 2 * BLOCK_K * self._most_x

    @property
    def _most_x(self) -> int:
        """Largest number of a warp's k blocks of x, those of each token counted."""
        return max(self.chunks_at_once(product) * self.shape.x_rows(product) for product in self.shape.products)

    @property
    def merge_bytes(self) -> int:
        """Sums of the attention of all warps, and a maximum and a total for each head."""
        return self.tile_warps * self.shape.attention.group * (self.shape.attention.head_dim + 2) * 4

    @property
    def sums_bytes(self) -> int:
        """Sums of all warps for the row blocks that are reduced together; or 8 heads of q, in attention."""
        sums = max(self.at_once(product) * self.sums_stride(product) for product in self.shape.products)
        return max(sums, 16 * self.shape.attention.head_dim, 4 * self.router_rows * self.shape.tokens * self.warps)

    def sums_stride(self, product: ProductName) -> int:
        """Distance of the sums of row blocks: those of all warps; with few tokens a part of the banks more, as a warp then
        reads those of several row blocks at a time."""
        parts = {1: 32 if product in ("gate_up", "head") else 64, 2: 64 if product == "gate_up" else 0}
        return self.warps * 64 * self.shape.tokens + parts.get(self.shape.tokens, 0)

    @property
    def x_start(self) -> int:
        """Start of the activations. Attention uses the same memory to merge the sums of its warps."""
        return self.ring_slots * self.slot_bytes

    @property
    def sums_start(self) -> int:
        """Start of two buffers of sums."""
        return self.x_start + self._x_bytes

    @property
    def rms_start(self) -> int:
        """Start of 1 / rms of the tokens, float32."""
        return self.sums_start + 2 * self.sums_bytes

    @property
    def barriers_start(self) -> int:
        """Start of the barriers: all slots' full, then all slots' empty."""
        return self.rms_start + 32

    @property
    def flag_start(self) -> int:
        """A word: 1 while math warps wait for activations or soon will."""
        return self.barriers_start + 16 * self.ring_slots

    @property
    def routed_start(self) -> int:
        """A barrier whose phase i ends when the experts of layer i are chosen."""
        return self.flag_start + 16

    @property
    def chosen_start(self) -> int:
        """Start of the numbers of the chosen experts, int32."""
        return self.routed_start + 16

    @property
    def weights_start(self) -> int:
        """Start of the router's weights of the chosen experts, float32."""
        return self.chosen_start + -(-4 * self.shape.choices // 16) * 16

    @property
    def factors_start(self) -> int:
        """Start of the factors of rows of down, float32 [own row block, chosen expert, row]: weights times scales of
        channels."""
        return self.weights_start + -(-4 * self.shape.choices // 16) * 16

    @property
    def factors(self) -> int:
        """Largest number of a block's factors."""
        return 16 * -(-self.row_blocks("down") // self.blocks) * self.shape.choices

    @property
    def routing_bytes(self) -> int:
        """Shared memory for experts."""
        return 16 + 2 * -(-4 * self.shape.choices // 16) * 16 + 4 * self.factors if self.shape.experts else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.flag_start + 16 + self.routing_bytes

    @property
    def ring_slots(self) -> int:
        """Number of slots of the ring, at most MOST_SLOTS: as many as fit."""
        left = BYTES - RESERVED_BYTES - self._x_bytes - 2 * self.sums_bytes - 48 - self.routing_bytes
        return max(0, min(MOST_SLOTS, left // (self.slot_bytes + 16)))

    @property
    def in_flight(self) -> tuple[int, int]:
        """Numbers of slots that memory is asked for at a time: while math warps wait for activations or soon will, and else.
        Activations queue behind weights, so more bytes would delay them. 34 and 68 KB were best for one token of Llama-3-8B's
        shape: 27.1 us a layer; 28.2 with a constant number of bytes, at best (H200, 2026-11-24).

        A warp that skips slots of other warps waits for the parity of a place of the ring. It must not do so before the
        place's last contents have arrived. Its own slot before that was asked for when all slots up to `many` before it were
        full; these include the last contents if `many` is at most the ring less a chunk. In a ring of whole chunks a place has
        the same warps each time, without a limit. (16 bits, 10 slots, 4 of a chunk: one of 75 launches on an H200 failed.)"""
        counts = {self.slots_of_chunk(name, i) for name in self.shape.products for i in range(len(self.shape.forms_of(name)))}
        most = min([self.ring_slots, *(self.ring_slots - count for count in counts if self.ring_slots % count)])
        few, many = (max(1, min(most, (size << 10) // self.slot_bytes)) for size in (34, 68))
        return few, many

    @property
    def _x_bytes(self) -> int:
        return -(-max(self.warps * self.x_warp_bytes, self.merge_bytes) // 128) * 128

    # ---- vectors, in words

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Start of each vector in a layer's words: 16-bit vectors next_x, mlp_x, qkv, attended, gated [tokens, features];
        float32 next_squares, mlp_squares [blocks, tokens], tops [tasks, group, 2], parts [tasks, group, head_dim], logits
        [tokens, experts] of a router, not yet divided by the rms. The embedding has the first two after the last layer's
        words."""
        s, a = self.shape, self.shape.attention
        widths = {"mlp_x": s.hidden, "qkv": a.features, "attended": a.heads * a.head_dim, "gated": s.intermediate}
        sizes = {"next_x": s.tokens * s.hidden // 2, "next_squares": self.blocks * s.tokens}
        sizes |= {name: s.tokens * width // 2 for name, width in widths.items()} | {"mlp_squares": self.blocks * s.tokens}
        sizes |= {"gated": s.x_rows("down") * s.intermediate // 2}
        sizes |= {"tops": self.attention_tasks * a.group * 2, "parts": self.attention_tasks * a.group * a.head_dim}
        sizes |= {"logits": s.tokens * s.experts} if s.experts else {}
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name] = at
            at += -(-size // 32) * 32
        return {**starts, "end": at}

    def start(self, name: str) -> int:
        """Start of a vector in a layer's words; "end": number of words of a layer."""
        return self.starts[name]

    @property
    def words(self) -> int:
        """Number of words of `vectors`."""
        return self.shape.layers * self.starts["end"] + self.starts["mlp_x"]

    def __str__(self) -> str:
        ring = f"{self.ring_slots} slots of {self.slot_bytes} bytes"
        lines = [f"{self.blocks} blocks, {ring}, {self.shared_bytes} bytes of shared memory"]
        for product in self.shape.products:
            shares = [len(self.own_row_blocks(product, block)) for block in range(self.blocks)]
            slots = [self.chunks(product) * self.slots_of_chunk(product, i) for i in range(len(self.shape.forms_of(product)))]
            lines.append(
                f"{product}: {self.row_blocks(product)} row blocks, {min(shares)} to {max(shares)} a block, in "
                f"{' or '.join(map(str, slots))} slots each"
            )
        if self.shape.experts:
            lines.append(f"router: {self.shape.experts} rows, up to {self.router_rows} a block")
        lines.append(
            f"attention: {self.attention_tasks} tasks, up to {self.splits} splits of {self.share_tokens} tokens or more"
        )
        return "\n".join(lines)


def step_refusals(shape: StepShape, machine: Machine) -> tuple[str, ...]:
    """Returns the reasons why one launch cannot compute a decode step; empty if it can."""
    a, reasons = shape.attention, []
    if "wgmma" not in machine.arch.features:
        reasons.append(f"one launch a step needs the shared memory of sm_90, this GPU is sm_{machine.arch.sm}")
    if machine.sm_count < FEWEST_SMS:
        reasons.append(f"one launch a step takes at least {FEWEST_SMS} SMs, not {machine.sm_count}")
    if shape.tokens not in TOKENS:
        reasons.append(f"one launch computes {', '.join(map(str, TOKENS))} tokens, not {shape.tokens}")
    for product in shape.products:
        padded = product == "head" and not any(form.dense for form in shape.forms_of(product))
        if (shape.rows(product) % 16 and not padded) or shape.columns(product) % TILE_K:
            size = f"{shape.rows(product)} x {shape.columns(product)}"
            reasons.append(f"weights have a multiple of 16 rows and of {TILE_K} columns, {product} is {size}")
    if a.head_dim not in (64, 128):
        reasons.append(f"heads have 64 or 128 elements, not {a.head_dim}: 8 lanes read values in vectors of 8")
    if a.rotary_dim != a.head_dim:
        reasons.append(f"all elements of a head turn, not {a.rotary_dim} of {a.head_dim}")
    if a.group > 8:
        reasons.append(f"at most 8 heads share a kv head, not {a.group}")
    if a.softcap:
        reasons.append("attention has no soft cap")
    reasons += _expert_refusals(shape)
    if not reasons:
        table = StepTable(shape, machine.sm_count)
        least = max(3, *(table.slots_of_chunk(name, i) for name in shape.products for i in range(len(shape.forms_of(name)))))
        if table.ring_slots < least:
            columns = max(map(shape.columns, shape.products))
            reasons.append(
                f"{shape.tokens} tokens of {columns} columns leave room for {table.ring_slots} slots of {table.slot_bytes} "
                f"bytes, one launch takes {least}"
            )
        if shape.experts and table.parts("gate_up") > 1:
            reasons.append(
                f"a router takes all of x at a time, at most {MOST_X_BYTES} bytes, not {shape.tokens} tokens of {shape.hidden}"
            )
    return tuple(dict.fromkeys(reasons))


def _expert_refusals(s: StepShape) -> list[str]:
    if not s.experts:
        return []
    reasons = []
    if s.intermediate % (s.choices * BLOCK_K):
        reasons.append(f"experts have a multiple of {BLOCK_K} columns of down, not {s.intermediate // s.choices}")
    if s.experts > MOST_EXPERTS or not 1 <= s.top_k <= min(MOST_CHOSEN, s.experts):
        reasons.append(f"a token chooses up to {MOST_CHOSEN} of up to {MOST_EXPERTS} experts, not {s.top_k} of {s.experts}")
    if any(form.dense for name in ("gate_up", "down") for form in s.forms[PRODUCT_NAMES.index(name)]):
        reasons.append("experts have codes in fragment order, not 16 bits")
    return reasons


def step_table(shape: StepShape, machine: Machine) -> StepTable:
    """Returns the table of a decode step, one block for each SM. Raises ValueError with `step_refusals`, if there are any."""
    reasons = step_refusals(shape, machine)
    if reasons:
        raise ValueError(f"a decode step in one launch: {'; '.join(reasons)}")
    return StepTable(shape, machine.sm_count)


def wait_of(status: int) -> tuple[int, str]:
    """Returns (layer, what a block waited for) of a status that is not 0."""
    return divmod(status - 1, len(WAITS))[0], WAITS[(status - 1) % len(WAITS)]


# ---- where one launch is faster


@dataclass(frozen=True)
class Faster:
    """A measurement: one launch is faster than the launches of a chain on the GPU of the product name `gpu`, in steps of
    `tokens` tokens with an 8-bit head, for layers whose products all have weights in the format `number` and of `form`, of
    which a step reads `least_bytes` to `most_bytes`, with `group` heads for each kv head. `context`: the longest measured one,
    in tokens. `experts`: of MLPs that are experts, else of dense ones."""

    gpu: str
    tokens: int
    number: str
    form: UnitForm
    group: int
    least_bytes: int
    most_bytes: int
    context: int
    experts: bool = False


FASTER = (
    Faster("H200", 1, "int4", UnitForm(4, 32), 4, 100 * 10**6, 130 * 10**6, 8192),
    Faster("H200", 2, "int4", UnitForm(4, 32), 4, 100 * 10**6, 130 * 10**6, 1024),
    Faster("H200", 1, "fp6_e3m2", UnitForm(6), 4, 150 * 10**6, 180 * 10**6, 1024),
    Faster("H200", 2, "fp6_e3m2", UnitForm(6), 4, 150 * 10**6, 180 * 10**6, 1024),
    Faster("H200", 1, "int8", UnitForm(8), 4, 200 * 10**6, 240 * 10**6, 1024),
    Faster("H200", 1, "int4", UnitForm(4, 32), 8, 25 * 10**6, 35 * 10**6, 1024, experts=True),
    Faster("H200", 2, "int4", UnitForm(4, 32), 8, 42 * 10**6, 56 * 10**6, 1024, experts=True),
    Faster("H200", 4, "int4", UnitForm(4, 32), 8, 76 * 10**6, 100 * 10**6, 1024, experts=True),
)
"""All such measurements, on one H200 with an 8-bit head. By `python -m benchmarks e2e --one-launch`, context 1,024, 2026-11-29
(benchmarks/results/h200/2026-11-29-e2e-one-launch.json and .. -qwen3-30b-a3b.json), ms of a step in one launch / by launches:
Llama-3-8B in w4a16_g128 at 1, 2, 4, 8 tokens 1.396 / 1.571, 1.530 / 1.627, 1.742 / 1.712, 2.522 / 2.093; in w6e3m2a16
1.779 / 1.895, 1.878 / 1.978, 2.054 / 2.058, 2.658 / 2.384; in 16 bits 4.000 / 3.965 at 1 token; Qwen3-30B-A3B in w4a16_g128
at 1, 2, 4 tokens 1.422 / 2.043, 1.728 / 2.424, 2.326 / 2.847. Of 2026-11-28, by a script that is not kept, us: 8 layers, int4
at 1 token and context 8,192 503 / 551, w8a16 at 1 token 600 / 645; SmolLM2-135M in 8 bits 422 / 355. `persistent_step=None` of
an engine chooses the launches where there is no row."""


def faster_context(shape: StepShape, machine: Machine, number: str) -> int:
    """Returns the longest context at which one launch was measured to be faster; 0 if there is none. `number`: name of the
    format of all weights of the layers."""
    forms = {form for product in LAYER_PRODUCTS for form in shape.forms_of(product)}
    if shape.forms_of("head") != (UnitForm(8),):
        return 0
    kind = machine.product, shape.tokens, number, forms, shape.attention.group, shape.experts > 0
    rows = (row for row in FASTER if (row.gpu, row.tokens, row.number, {row.form}, row.group, row.experts) == kind)
    return max((row.context for row in rows if row.least_bytes <= shape.layer_bytes <= row.most_bytes), default=0)
