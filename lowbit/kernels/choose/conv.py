"""Choice of kernel and tile for a convolution: candidates, reasons against them, cost model.

Pure functions of a spec, a size and a machine, without Triton: a laptop can explain what a server would choose. Where several
kernels are feasible, a measured order decides (H200, 2026-11-21, ResNet-50; docs/log); of one kernel's tiles the cheapest.
The cost unit is 64 pixels x 128 outputs on the busiest SM.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lowbit.formats.conv import ACTIVATIONS, CODES, ConvSpec, ProductSpec
from lowbit.hardware.arch import arch_for
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.depthwise import depthwise_refusals, depthwise_tile
from lowbit.pack.conv_block import CHANNELS, CHUNK, EXPANDED
from lowbit.pack.conv_fragment import MmaFragments, fragment_bits
from lowbit.pack.conv_layout import ConvLayout
from lowbit.pack.conv_pair import STAGE_BYTES, STEP, PairLayout, ThirdStages
from lowbit.pack.conv_weight import WgmmaTiles, planes
from lowbit.pack.depthwise import DepthwiseTaps
from lowbit.pack.grouped import GroupedBlocks
from lowbit.pack.nhwc64 import Nhwc64, padded_channels
from lowbit.pack.stem import StemImages
from lowbit.pack.stem_fragment import StemFragments

UNIT = 1024
"""Alignment in bytes of regions of shared memory."""

BLOCK_BYTES = 1024
"""Bytes of shared memory that CUDA reserves in each thread block."""

MOST_ROWS = 256
"""Largest number of strip rows that one TMA copy loads."""

STRIPS = 2
"""Number of strips in shared memory: one is read while the next is filled."""

MOST_WIDTH = 63
"""Largest image width of the block kernel: the strip under the windows of 128 pixels is one copy, 256 pixels at most."""

FOLLOWING = (64, 128)
"""Numbers of output channels that the block kernel supports for the first convolution of the next block."""

NARROW_COST = 1.2
"""Cost factor of tiles of 64 pixels: their time relative to a third of the time of a 192-pixel tile (H200, 2026-11-21,
ResNet-50, batch 32)."""

DEEP_OUTPUTS = 128
"""Number of output channels in a tile of sm90/conv_deep.py."""

DEEP_UNITS = 227
"""KiB of shared memory for all blocks of sm90/conv_deep.py on an SM."""

TAIL_UNITS = 2
"""KiB of a block's shared memory for barriers and constants."""

RESIDUAL_STAGES = 3
"""Number of tiles of residual codes in flight."""

MOST_X_STAGES = 8
"""Limit of stages of x; more were no faster."""

WARPGROUPS = 4
"""Warpgroups on an SM in the block kernel, limited by registers; in two thread blocks where they fit, else in one."""

PAIR_CHANNELS = (128, 256)
"""Numbers of input channels that the pair kernel supports for its first convolution. With 512 its x does not fit in
registers."""

PAIR_ENTRIES = (256, 512)
"""Numbers of channels of a shortcut's input that the pair kernel supports."""

PAIR_LEAST_STAGES = 4
"""Smallest number of stages of weights of the pair kernel: those that are read, and two that are loaded meanwhile."""

WHOLE_WIDTH = (MOST_ROWS - 192) // 2 - 1
"""Largest image width of the pair kernel with a 3 x 3 convolution: the strip under the windows of 192 pixels is one copy."""

PAIR_STAGES = 12
"""Limit of stages of weights of the pair kernel."""

Size = tuple[int, int, int]


@dataclass(frozen=True)
class ConvTile:
    """Tile of a convolution: pixels / 64 and channels, K bytes of a stage, stages, thread blocks per SM.

    `stages` is 0 where the kernel takes as many as its shared memory holds.
    """

    warpgroups: int
    outputs: int
    step_bytes: int
    stages: int
    blocks: int

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups

    def __str__(self) -> str:
        stages = f", {self.stages} stages" if self.stages else ""
        tile = f"{self.pixels} pixels x {self.outputs} outputs"
        return f"{tile}, steps of {self.step_bytes} bytes{stages}, {_blocks(self.blocks)}"

    def turns(self, pixels: int, outputs: int, machine: Machine) -> float:
        """Cost: 64 pixels x 128 outputs on the busiest SM."""
        tiles = -(-pixels // self.pixels) * -(-padded_channels(outputs) // self.outputs)
        return self.warpgroups * self.outputs / 128 * -(-tiles // machine.sm_count)


@dataclass(frozen=True)
class ConvCandidate:
    """A kernel and a tile for a layer: reasons against them (empty: feasible), cost, and an explanation of their rank.

    `kernel` is its file below lowbit/kernels/, and `layout` the layout of weights that it reads.
    """

    kernel: str
    tile: ConvTile | None
    layout: ConvLayout | None
    reasons: tuple[str, ...]
    turns: float
    why: str

    def __str__(self) -> str:
        tile = "" if self.tile is None else f" {self.tile}"
        cost = f", {self.turns:g} turns" if self.turns else ""
        return f"{self.kernel}{tile}{cost}: {'; '.join(self.reasons) or self.why}"


STEM_TILE = ConvTile(2, 64, 64, 4, 3)
"""The tile of a stem; each of its k blocks is one row of the window."""


def conv_candidates(
    spec: ConvSpec, size: Size, machine: Machine | None, images: StemImages | None = None, pooled: bool = False
) -> list[ConvCandidate]:
    """All candidates for inputs of `size` (images, height, width), the best first, infeasible ones last.

    `machine` is None for a CPU. With `images` the layer is a stem; with `pooled` the following max-pool is fused.
    """
    if machine is None:
        return [ConvCandidate("reference/conv", None, None, (), 0.0, "no GPU: computed in plain torch, exact and slow")]
    height, width = spec.output_size(*size[1:]) if images is None else images.output
    pixels = size[0] * height * width
    refused = features_refusals(spec, machine.arch.features)
    if spec.groups > 1:
        rows = _grouped_candidates(spec)
    elif "wgmma" not in machine.arch.features:
        rows = [_mma_candidate(spec, pixels, machine, images)]
    elif images is not None:
        rows = _stem_candidates(spec, pixels, machine, images)
    else:
        rows = [_strip_candidate(spec, size, pixels, machine), *_deep_candidates(spec, pixels, machine)]
        rows += [_window_candidate(spec, pixels, machine), _third_candidate(spec, pixels, machine)]
    if pooled:
        rows = [row if row.kernel == "sm90/stem_pool" else _refused(row, "it has no max-pool inside") for row in rows]
    else:
        rows = [_refused(row, "no max-pool follows") if row.kernel == "sm90/stem_pool" else row for row in rows]
    rows = [dataclasses.replace(row, reasons=(*refused, *row.reasons)) for row in rows]
    return sorted(rows, key=lambda row: bool(row.reasons))  # stable sort


def choose_conv(
    spec: ConvSpec, size: Size, machine: Machine | None, images: StemImages | None = None, pooled: bool = False
) -> ConvCandidate:
    """The kernel and tile for a layer; raises ValueError with every kernel's reasons where none is feasible."""
    rows = conv_candidates(spec, size, machine, images, pooled)
    if rows[0].reasons:
        raise ValueError(f"no kernel convolves {spec}: {'; '.join(map(str, rows))}")
    return rows[0]


def features_refusals(spec: ConvSpec, features: frozenset[str]) -> tuple[str, ...]:
    """Reasons why no kernel of a GPU with these features can run a layer; empty if some may."""
    reasons = []
    if spec.y not in ACTIVATIONS and (spec.residual is not None or spec.second is not None):
        reasons.append(f"an output in {spec.y} is written without a residual or second product")
    if "wgmma" in features and max(spec.stride) > 8:
        reasons.append(f"strides are 8 at most, got {spec.stride}")
    reach = max(*spec.padding, *(k - 1 - p for k, p in zip(spec.kernel, spec.padding, strict=True)))
    if "wgmma" in features and reach > 127:
        reasons.append(f"windows reach 127 pixels beyond the image at most, got {spec.kernel} with padding {spec.padding}")
    return tuple(reasons)


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count > 1 else ''} an SM"


def _refused(row: ConvCandidate, reason: str) -> ConvCandidate:
    return dataclasses.replace(row, reasons=(*row.reasons, reason))


def _mma_candidate(spec: ConvSpec, pixels: int, machine: Machine, images: StemImages | None) -> ConvCandidate:
    """The only tile of sm80/conv.py. Products of 4-bit codes and 4-bit weights use INT4 tensor cores where the GPU has them."""
    int4 = "mma_s4" in machine.arch.features
    layout = MmaFragments(spec.x, fragment_bits(spec, int4), spec.y, int4, images)
    tile = ConvTile(2, 64, 32, 0, 4)
    kinds = [fragment_bits(product, int4) for product in spec.products]
    why = " and ".join("m16n8k64 on INT4 tensor cores" if bits == 4 else "m16n8k32 in int8" for bits in dict.fromkeys(kinds))
    return ConvCandidate("sm80/conv", tile, layout, (), tile.turns(pixels, spec.outputs, machine), f"no wgmma; {why}")


def _grouped_candidates(spec: ConvSpec) -> list[ConvCandidate]:
    """The kernels of convolutions in groups, on all GPUs."""
    tile, blocks = depthwise_tile(spec), GroupedBlocks(spec.x, spec.groups, spec.channels, spec.outputs)
    own = ConvCandidate("sm80/depthwise", None, DepthwiseTaps(), depthwise_refusals(spec), 0.0, f"no sum over channels: {tile}")
    why = f"64 outputs read {64 * blocks.span} channels, with zeros between groups"
    return [own, ConvCandidate("sm80/grouped_conv", None, blocks, (), 0.0, why)]


def _stem_candidates(spec: ConvSpec, pixels: int, machine: Machine, images: StemImages) -> list[ConvCandidate]:
    codes = () if spec.y in ACTIVATIONS else (f"its output is stored as {spec.y}, not as codes",)
    pooling = ConvCandidate("sm90/stem_pool", None, StemFragments(images), codes, 0.0, "its max-pool runs inside")
    layout = WgmmaTiles(spec.x, spec.y, STEM_TILE.outputs, STEM_TILE.step_bytes, images=images)
    turns = STEM_TILE.turns(pixels, spec.outputs, machine)
    return [pooling, ConvCandidate("sm90/conv", STEM_TILE, layout, (), turns, "rows of 4 packed pixels at a time")]


def strip_rows(pixels: int, width: int, kernel: int, step_bytes: int) -> int:
    """Number of pixels of a strip, each a row in shared memory: those of a tile and the neighbours that its windows read.
    It is rounded up so that the strip's bytes are a multiple of 1 KiB."""
    rows, unit = pixels + kernel // 2 * 2 * (width + 1), UNIT // step_bytes
    return -(-rows // unit) * unit


def _strip_candidate(spec: ConvSpec, size: Size, pixels: int, machine: Machine) -> ConvCandidate:
    """The candidate of sm90/conv_strip.py, for 64 channels in and out and no change of size. It copies pixels once per tile,
    weights once per block.

    Layers whose channels are multiples of 128 use sm90/conv_deep.py instead, which also has strips.
    """
    step_bytes = Nhwc64(spec.x).pixel_bytes(CHANNELS)
    tile = ConvTile(2, 64, step_bytes, spec.taps, 2)
    reasons = list(strip_refusals(spec, tile, size[2], machine))
    channels = (padded_channels(spec.channels), padded_channels(spec.outputs))
    if channels != (64, 64):
        reasons.append(f"{channels[0]} channels and {channels[1]} outputs, not 64")
    if spec.kernel not in ((3, 3), (5, 5)):
        reasons.append(f"a window of {spec.kernel}, not 3 x 3 or 5 x 5")
    layout = WgmmaTiles(spec.x, spec.y, tile.outputs, tile.step_bytes)
    turns = tile.turns(pixels, spec.outputs, machine)
    why = "pixels copied once a tile, weights once a block: measured first"
    return ConvCandidate("sm90/conv_strip", tile, layout, tuple(reasons), turns, why)


def strip_refusals(spec: ConvSpec, tile: ConvTile, width: int, machine: Machine) -> tuple[str, ...]:
    """Reasons why sm90/conv_strip.py cannot run a layer with a tile on images of this width; empty if it can."""
    reasons = []
    if not spec.keeps_size or spec.second is not None:
        reasons.append("its output is not as large as its input, or it has a second product")
    if spec.y not in ACTIVATIONS:
        reasons.append(f"its output is stored as {spec.y}, not as codes")
    rows = strip_rows(tile.pixels, width, spec.kernel[0], tile.step_bytes)
    block_bytes = STRIPS * rows * tile.step_bytes + spec.taps * 64 * 64 + 2 * UNIT
    if rows > MOST_ROWS:
        reasons.append(f"a strip of images {width} pixels wide has {rows} pixels, at most {MOST_ROWS} are copied at once")
    elif tile.blocks * block_bytes > machine.arch.shared_per_sm_bytes:
        reasons.append(f"{tile.blocks} blocks of {block_bytes:,} bytes of shared memory do not fit an SM")
    return tuple(reasons)


def deep_refusals(spec: ConvSpec) -> tuple[str, ...]:
    """Reasons why sm90/conv_deep.py cannot run a layer; empty if it can."""
    reasons = []
    outputs, channels = padded_channels(spec.outputs), padded_channels(spec.channels)
    if outputs % 128 or channels % 128:
        reasons.append(f"{channels} channels and {outputs} outputs are not both multiples of 128")
    if spec.residual not in (None, spec.y):
        reasons.append(f"its residual is stored as {spec.residual}, its output as {spec.y}")
    if spec.y not in ACTIVATIONS:
        reasons.append(f"its output is stored as {spec.y}, not as codes")
    if spec.second is not None and (spec.second.x != spec.x or padded_channels(spec.second.channels) % 128):
        reasons.append("its second product reads another storage, or channels that are no multiple of 128")
    return tuple(reasons)


def deep_tile(spec: ConvSpec, multipliers: int, blocks: int) -> ConvTile:
    """A tile of sm90/conv_deep.py: math warpgroups of 64 pixels (1 or 3), thread blocks per SM."""
    return ConvTile(multipliers, DEEP_OUTPUTS, 16 * CODES[spec.x].bits, 0, blocks)


def _deep_candidates(spec: ConvSpec, pixels: int, machine: Machine) -> list[ConvCandidate]:
    """Both tiles of sm90/conv_deep.py, first the one with less work on the busiest SM.

    H200, 2026-11-21, ResNet-50: small tiles win at batches 1 and 8 and in the last stages up to batch 64, large ones otherwise;
    the better of the two beats the tiles of sm90/conv.py in nearly every layer.
    """
    across = -(-padded_channels(spec.outputs) // DEEP_OUTPUTS)
    tiles = -(-pixels // 64) * across
    wide, narrow = deep_tile(spec, 3, 1), deep_tile(spec, 1, 1 if tiles <= machine.sm_count else 2)
    layout = WgmmaTiles(spec.x, spec.y, DEEP_OUTPUTS, wide.step_bytes, taps_first=True)
    why, reasons = "whole 128 channels: warpgroups share the weights of a step", deep_refusals(spec)
    costs = [(wide, wide.turns(pixels, spec.outputs, machine))]
    costs.append((narrow, NARROW_COST * narrow.turns(pixels, spec.outputs, machine)))
    rows = [ConvCandidate("sm90/conv_deep", tile, layout, reasons, turns, why) for tile, turns in costs]
    return sorted(rows, key=lambda row: row.turns)


def _window_candidate(spec: ConvSpec, pixels: int, machine: Machine) -> ConvCandidate:
    tile = window_tile(spec, pixels)
    layout = WgmmaTiles(spec.x, spec.y, tile.outputs, tile.step_bytes)
    turns = tile.turns(pixels, spec.outputs, machine)
    return ConvCandidate("sm90/conv", tile, layout, (), turns, "takes any layer, a tap of a window at a time")


def _third_candidate(spec: ConvSpec, pixels: int, machine: Machine) -> ConvCandidate:
    """The candidate of sm90/conv_pair.py, for a 1 x 1 convolution of many channels with a residual."""
    reasons = []
    if spec.kernel != (1, 1) or spec.stride != (1, 1) or spec.padding != (0, 0) or not spec.relu or spec.residual is None:
        reasons.append("no 1 x 1 convolution of stride 1 with a residual and a ReLU")
    if spec.channels not in (*PAIR_CHANNELS, 512) or spec.outputs % 256 or len({spec.x, spec.y, spec.residual}) > 1:
        reasons.append(f"{spec.channels} channels and {spec.outputs} outputs, or several storages")
    tiles = -(-pixels // (64 * PairTile.multipliers))
    if 4 * tiles * 8 < 3 * machine.sm_count:
        reasons.append(f"{tiles} tiles are few")
    layout = None if reasons else ThirdStages(PairLayout(spec.x, spec.channels, spec.outputs, 0))
    return ConvCandidate("sm90/conv_pair", None, layout, tuple(reasons), 0.0, "x stays in registers, a thread loads its own")


def window_tile(spec: ConvSpec, pixels: int) -> ConvTile:
    """The tile of sm90/conv.py for a layer that sm90/conv_deep.py refuses, by number of output pixels.

    The numbers were measured on an H200, 2026-11-21, ResNet-50, batch 128, before sm90/conv_deep.py took most of the layers.
    """
    o64 = padded_channels(spec.outputs)
    pixel_bytes = [Nhwc64(product.x).pixel_bytes(product.channels) for product in spec.products]
    four = any(product.x == "u4" for product in spec.products)
    most = 64 if four else 128
    step_bytes = max(step for step in (32, 64, 128) if step <= most and all(size % step == 0 for size in pixel_bytes))
    if spec.second is not None:
        if o64 % 128:
            return ConvTile(2, 64, step_bytes, 4, 2)
        return ConvTile(2, 128, min(step_bytes, 64), 4, 1) if four else ConvTile(1, 128, min(step_bytes, 64), 3, 3)
    if o64 % 128:
        return ConvTile(2, 64, step_bytes, 4, 2) if four else ConvTile(1, 64, step_bytes, 3, 4)
    if spec.residual is not None:
        short = four or pixel_bytes[0] <= 128 or step_bytes < 128
        return ConvTile(1, 128, min(step_bytes, 64), 3, 3) if short else ConvTile(2, 64, 128, 4, 2)
    if four:
        few = pixels * o64 < 600 * 128 * 128 or spec.kernel != (1, 1)
        return ConvTile(1, 128, step_bytes, 3, 3) if few or step_bytes == 32 else ConvTile(2, 128, step_bytes, 4, 2)
    if step_bytes == 128 and pixels * o64 <= 132 * 64 * 64:  # the classifier takes 7.1 us instead of 12.9
        return ConvTile(1, 64, step_bytes, 4, 3)
    return ConvTile(1, 64, step_bytes, 4, 4) if step_bytes == 64 else ConvTile(2, 128, step_bytes, 3, 2)


def steps_of(product: ProductSpec, step_bytes: int) -> int:
    """Number of main-loop iterations for one tile."""
    return product.taps * Nhwc64(product.x).pixel_bytes(product.channels) // step_bytes


def resident_tiles(products: tuple[ProductSpec, ...], tile: ConvTile) -> int:
    """Number of weight tiles (one iteration, one plane) that stay in shared memory of a block of sm90/conv.py: all or none."""
    tiles = sum(steps_of(product, tile.step_bytes) * planes(product.x) for product in products)
    x_units = tile.stages * tile.pixels * tile.step_bytes // UNIT
    shared_bytes = (x_units + tiles * tile.outputs * tile.step_bytes // UNIT + 1) * UNIT
    return tiles if tile.blocks * (shared_bytes + BLOCK_BYTES) <= arch_for(90).shared_per_sm_bytes else 0


@dataclass(frozen=True)
class DeepStages:
    """Use of shared memory in sm90/conv_deep.py.

    `rows` is the number of rows in a stage of x. With `strips` a stage of x is a strip and `kernel` is the side of the window;
    else a stage is one tap and `kernel` is 1. `stages` and `x_stages` count stages of weights and of x, `resident` the weight
    tiles that stay in shared memory (0: none), `residual_stages` the stages of a residual."""

    rows: int
    strips: bool
    kernel: int
    stages: int
    x_stages: int
    resident: int
    residual_stages: int


def deep_stages(spec: ConvSpec, tile: ConvTile, width: int) -> DeepStages:
    """Stages for images of this width. x is loaded in strips where one TMA copy loads a strip. Weights stay resident if that
    leaves enough stages for x."""
    side, both = spec.kernel[0], planes(spec.x)
    rows = strip_rows(tile.pixels, width, side, tile.step_bytes)
    strips = spec.keeps_size and rows <= MOST_ROWS and spec.second is None
    rows, kernel = (rows, side) if strips else (tile.pixels, 1)
    residual_stages = 0 if spec.residual is None else RESIDUAL_STAGES
    residual_units = 0
    if spec.residual is not None:
        residual_units = residual_stages * tile.pixels * tile.outputs * CODES[spec.residual].bits // 8 // UNIT
    units = (DEEP_UNITS + 1) // tile.blocks - 1 - TAIL_UNITS - residual_units
    x_units, w_units = rows * tile.step_bytes // UNIT, both * tile.outputs * tile.step_bytes // UNIT
    steps = sum(steps_of(product, tile.step_bytes) for product in spec.products)
    least = 2 if kernel > 1 else 4
    if steps * w_units + least * x_units <= units:
        x_stages = min((units - steps * w_units) // x_units, MOST_X_STAGES)
        return DeepStages(rows, strips, kernel, steps, x_stages, steps * both, residual_stages)
    x_stages = least if kernel > 1 else units // (x_units + w_units)
    return DeepStages(rows, strips, kernel, (units - x_stages * x_units) // w_units, x_stages, 0, residual_stages)


@dataclass(frozen=True)
class BlockTile:
    """A tile of sm90/conv_block.py and its shared memory: 64 * warpgroups pixels, a strip of `rows` rows.

    x, y and z have the same storage. y has `expanded` channels, computed `chunk` at a time; z has `following` channels. With
    `shortcut` the residual is a product of the block's input. With `ahead` one chunk of y is multiplied while the previous
    chunk is requantized.
    """

    storage: str
    warpgroups: int
    rows: int
    expanded: int
    chunk: int
    following: int
    shortcut: bool
    ahead: bool

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups

    @property
    def bits(self) -> int:
        return CODES[self.storage].bits

    @property
    def row_bytes(self) -> int:
        """Bytes of a pixel of x."""
        return CHANNELS * self.bits // 8

    @property
    def strip_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def starts(self) -> tuple[int, ...]:
        """Byte offsets in shared memory of the four weights and of the constants, then the offset of their end."""
        size = self.expanded * CHANNELS
        sizes = (9 * CHANNELS * CHANNELS, size, size * self.shortcut, self.expanded * self.following, 4 * self.constants)
        return tuple(STRIPS * self.strip_bytes + sum(sizes[:i]) for i in range(6))

    @property
    def constants(self) -> int:
        """Number of float32 constants: s and b of the second convolution, of the next block's first, and of the third, then the
        shortcut's s."""
        return 2 * CHANNELS + 2 * self.following + (2 + self.shortcut) * self.expanded

    @property
    def tail(self) -> int:
        """Byte offset of the barriers in shared memory."""
        return -(-self.starts[5] // UNIT) * UNIT

    @property
    def shared_bytes(self) -> int:
        return self.tail + UNIT

    @property
    def blocks(self) -> int:
        """Number of thread blocks that share an SM."""
        fit = arch_for(90).shared_per_sm_bytes // (self.shared_bytes + BLOCK_BYTES)
        return max(1, min(WARPGROUPS // self.warpgroups, fit))

    @property
    def line(self) -> str:
        """Text for tables. Not `str`, which Triton uses to identify compile-time constants."""
        return f"{self.pixels} pixels, strips of {self.rows}, {self.chunk} outputs at a time, {_blocks(self.blocks)}"


def block_tile(storage: str, width: int, following: int, shortcut: bool) -> BlockTile:
    """The tile of a block for images of this width. Two thread blocks share an SM where shared memory allows it; else one block
    of twice the size."""
    for warpgroups in (WARPGROUPS // 2, WARPGROUPS):
        row_bytes = Nhwc64(storage).pixel_bytes(CHANNELS)
        rows, unit = strip_rows(64 * warpgroups, width, 3, row_bytes), 2048 // row_bytes
        tile = BlockTile(storage, warpgroups, -(-rows // unit) * unit, EXPANDED, CHUNK, following, shortcut, not shortcut)
        if tile.blocks * warpgroups == WARPGROUPS:
            break
    return tile


def block_refusals(
    second: ConvSpec, third: ConvSpec, following: ConvSpec, size: Size, machine: Machine | None
) -> tuple[str, ...]:
    """Reasons why three layers cannot run as one, for inputs of `size` (images, height, width); empty if they can."""
    reasons = []
    if machine is not None and "wgmma" not in machine.arch.features:
        reasons.append("the kernel for whole blocks is for sm_90")
    wanted = {"the second": (second, CHANNELS, CHANNELS, 3), "the third": (third, EXPANDED, CHANNELS, 1)}
    wanted["the next"] = (following, following.outputs, EXPANDED, 1)
    for name, (spec, outputs, channels, kernel) in wanted.items():
        shape = [outputs, channels, kernel, kernel]
        found = [spec.outputs, spec.channels, *spec.kernel]
        if found != shape or spec.stride != (1, 1) or spec.padding != (kernel // 2, kernel // 2):
            reasons.append(
                f"{name} convolution is {found} with stride {spec.stride} and padding {spec.padding}, "
                f"supported is {shape}, with stride 1, as large as its input"
            )
        if not spec.relu:
            reasons.append(f"{name} convolution has no ReLU")
        if spec.groups > 1:
            reasons.append(f"{name} convolution has {spec.groups} groups, supported is 1")
    if following.outputs not in FOLLOWING:
        reasons.append(f"the next convolution has {following.outputs} outputs, supported are {FOLLOWING}")
    shortcut = third.second
    added = third.residual if shortcut is None else shortcut.x
    storages = {second.x, second.y, third.x, third.y, following.x, following.y, added}
    if len(storages) > 1 or second.x not in ACTIVATIONS:
        reasons.append(f"all activations have one storage of codes, got {', '.join(sorted(map(str, storages)))}")
    if any(added is not None for spec in (second, following) for added in (spec.residual, spec.second)):
        reasons.append("only the third convolution adds something")
    if shortcut is not None and ((shortcut.channels, *shortcut.kernel) != (CHANNELS, 1, 1) or shortcut.stride != (1, 1)):
        found = [third.outputs, shortcut.channels, *shortcut.kernel]
        reasons.append(f"the shortcut is {found} with stride {shortcut.stride}, supported: 64 channels, 1")
    if size[2] > MOST_WIDTH:
        reasons.append(f"images are {size[2]} pixels wide, supported are up to {MOST_WIDTH}")
    return tuple(reasons)


@dataclass(frozen=True)
class PairTile:
    """A tile of sm90/conv_pair.py and its shared memory.

    All activations have the same storage. x has `channels` channels, y `expanded`, z `following`; the shortcut's input has
    `entry` channels, 0 without a shortcut. With a 3 x 3 convolution before, x is its output, and a strip of its input has
    `rows` rows, else 0. There are `stages` stages of weights. A job is one of `parts` parts of y's channels.
    """

    storage: str
    channels: int
    expanded: int
    following: int
    entry: int
    rows: int
    stages: int
    parts: int
    multipliers = 3
    """Number of math warpgroups, of 64 pixels each."""

    @property
    def pixels(self) -> int:
        return 64 * self.multipliers

    @property
    def bits(self) -> int:
        return CODES[self.storage].bits

    @property
    def layout(self) -> PairLayout:
        return PairLayout(self.storage, self.channels, self.expanded, self.following, self.entry, self.rows > 0)

    @property
    def weight_stages(self) -> int:
        """Number of stages of weights that a tile reads."""
        return self.layout.stages

    @property
    def constants(self) -> int:
        return self.layout.constants

    @property
    def stage_bytes(self) -> int:
        return STAGE_BYTES

    @property
    def chunk(self) -> int:
        """Number of outputs of y that are one product."""
        return self.layout.chunk

    @property
    def stage_tiles(self) -> int:
        """Number of weight tiles of a chunk and 128 channels in a stage."""
        return STAGE_BYTES // (self.chunk * STEP)

    @property
    def group_words(self) -> int:
        """Number of words with the codes of 8 columns."""
        return self.bits // 4

    @property
    def step_vectors(self) -> int:
        """Number of vectors of 64 bytes in the codes of 128 channels."""
        return STEP * self.bits // 8 // 64

    @property
    def x_vectors(self) -> int:
        """Number of vectors in a row of x."""
        return self.channels * self.bits // 8 // 64

    @property
    def entry_vectors(self) -> int:
        return self.entry * self.bits // 8 // 64

    @property
    def private_vector(self) -> int:
        """Distance in bytes of consecutive vectors of a thread in its own shared memory: all threads have 16 bytes of each."""
        return 16 * 128 * self.multipliers

    @property
    def residual_bytes(self) -> int:
        """Bytes from one iteration's residual codes to those of the next one: two rows of all threads."""
        return 2 * self.step_vectors * self.private_vector

    @property
    def x_vector(self) -> int:
        """Index of the first vector of x in a thread's own memory, after two iterations of residual codes."""
        return 0 if self.entry else 4 * self.step_vectors

    @property
    def entry_vector(self) -> int:
        return self.x_vector + (0 if self.rows else 2 * self.x_vectors)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a strip: 128 channels of a pixel."""
        return STEP * self.bits // 8

    @property
    def strip_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def strips_start(self) -> int:
        """Byte offset in shared memory of the strips, after the weights."""
        return self.stages * STAGE_BYTES

    @property
    def constants_start(self) -> int:
        return self.strips_start + STRIPS * self.strip_bytes

    @property
    def private_start(self) -> int:
        return -(-(self.constants_start + 4 * self.constants) // UNIT) * UNIT

    @property
    def barriers_start(self) -> int:
        return self.private_start + (self.entry_vector + 2 * self.entry_vectors) * self.private_vector

    @property
    def shared_units(self) -> int:
        """KiB of shared memory."""
        return self.barriers_start // UNIT + 1

    @property
    def line(self) -> str:
        """Text for tables. Not `str`, which Triton uses to identify compile-time constants."""
        return f"{self.pixels} pixels, {self.chunk} outputs at a time, {self.stages} stages"


def pair_tile(layout: PairLayout, width: int = 0, parts: int = 1) -> PairTile:
    """The tile of two convolutions, with as many stages of weights as fit. `width`: that of the images, which matters if a
    3 x 3 convolution is before them. `parts`: jobs of a tile."""
    rows = strip_rows(64 * PairTile.multipliers, width, 3, STEP * CODES[layout.storage].bits // 8) if layout.window else 0
    tiles = [
        PairTile(layout.storage, layout.channels, layout.expanded, layout.following, layout.entry, rows, stages, parts)
        for stages in range(PAIR_STAGES, PAIR_LEAST_STAGES - 1, -1)
    ]
    return next(tile for tile in tiles if tile.shared_units <= DEEP_UNITS)


def third_parts(tiles: int, outputs: int, sm_count: int) -> int:
    """The number of jobs of a tile of one convolution that has least work on the busiest SM; a job has an even number of
    iterations."""
    steps = outputs // STEP
    choices = [parts for parts in (1, 2, 4, 8) if steps % (2 * parts) == 0]
    return min(choices, key=lambda parts: -(-tiles * parts // sm_count) * (steps // parts))


def pair_layout(third: ConvSpec, following: ConvSpec, window: bool = False) -> PairLayout:
    """The layout of the weights of two convolutions that `pair_refusals` accepts, or three that `whole_refusals` accepts."""
    entry = 0 if third.second is None else third.second.channels
    return PairLayout(third.x, third.channels, third.outputs, following.outputs, entry, window)


def pair_refusals(third: ConvSpec, following: ConvSpec, size: Size, machine: Machine | None) -> tuple[str, ...]:
    """Reasons why two layers cannot run as one, for outputs of `size` (images, height, width); empty if they can."""
    reasons = []
    if machine is not None and "wgmma" not in machine.arch.features:
        reasons.append("the kernel for two convolutions is for sm_90")
    for name, spec in (("first", third), ("second", following)):
        if spec.kernel != (1, 1) or spec.stride != (1, 1) or spec.padding != (0, 0) or spec.groups > 1:
            reasons.append(f"the {name} convolution is {spec}, supported: 1 x 1, stride 1, one group")
        if not spec.relu:
            reasons.append(f"the {name} convolution has no ReLU")
    if third.channels not in PAIR_CHANNELS or third.outputs % 256 or following.outputs % 128:
        reasons.append(
            f"channels are {third.channels}, {third.outputs} and {following.outputs}, supported: {PAIR_CHANNELS}, multiples of "
            "256 and of 128"
        )
    if following.channels != third.outputs or following.residual is not None or following.second is not None:
        reasons.append("the second convolution reads what the first one writes, and adds nothing")
    shortcut = third.second
    added = third.residual if shortcut is None else shortcut.x
    storages = {third.x, third.y, following.x, following.y, added}
    if len(storages) > 1 or third.x not in ACTIVATIONS:
        reasons.append(f"all activations have one storage of codes, got {', '.join(sorted(map(str, storages)))}")
    if shortcut is not None:
        square = shortcut.kernel == (1, 1) and shortcut.padding == (0, 0) and shortcut.stride[0] == shortcut.stride[1]
        if shortcut.channels not in PAIR_ENTRIES or not square:
            reasons.append(
                f"the shortcut is {shortcut.channels} channels, {shortcut.kernel} with stride {shortcut.stride}, supported: "
                f"{PAIR_ENTRIES} channels, 1 x 1"
            )
    tiles = -(-size[0] * size[1] * size[2] // (64 * PairTile.multipliers))
    if machine is not None and 4 * tiles < 3 * machine.sm_count:
        reasons.append(f"{tiles} tiles leave more than a quarter of {machine.sm_count} SMs idle")
    return tuple(reasons)


def whole_refusals(
    second: ConvSpec, third: ConvSpec, following: ConvSpec, size: Size, machine: Machine | None
) -> tuple[str, ...]:
    """Reasons why a 3 x 3 convolution of 128 or 256 channels cannot run together with the two after it, for inputs of `size`
    (images, height, width); empty if it can."""
    reasons = list(pair_refusals(third, following, size, machine))
    channels = {second.channels, second.outputs, third.channels}
    if not second.keeps_size or second.kernel != (3, 3) or second.groups > 1 or len(channels) > 1:
        reasons.append(
            f"the convolution before is {second}, supported: 3 x 3, as large as its input, {third.channels} channels"
        )
    if not second.relu or second.residual is not None or second.second is not None:
        reasons.append("the convolution before has no ReLU, or adds something")
    if {second.x, second.y} != {third.x}:
        reasons.append(f"all activations have one storage of codes, got {second.x} and {second.y} before {third.x}")
    if third.second is not None:
        reasons.append("the block has a shortcut convolution")
    if size[2] > WHOLE_WIDTH:
        reasons.append(f"images are {size[2]} pixels wide, supported are up to {WHOLE_WIDTH}")
    return tuple(reasons)
