"""Microkernels: a conversion or a step of products, repeated on registers without memory accesses.

Each warp works alone and reads the clock of its SM before and after the loop. The words change each iteration: by an addition,
or, to measure latency, by the result of the previous iteration. Results go to stores that never execute. The cost of an empty
loop (`nothing`) is subtracted, so `clocks` and `instructions` are those of a tile: 16 rows x 64 k of weights, 32 per lane.
Instructions are counted in the machine code of the loop.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.mechanisms.kernels import DecodeLoop, StepLoop, decode_loop, step_loop
from benchmarks.mechanisms.trial import Row, Trial, blank
from benchmarks.mechanisms.ways import Decoding, ScaledFirst, Way, nothing, ways
from benchmarks.protocol import relative_error
from benchmarks.tiles import TOLERANCE
from lowbit.formats import code_values
from lowbit.hardware.half import HalfType
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.parts.k_block import BLOCK_K, KBlock
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.operand import REGISTERS
from lowbit.pack.fragment import FragmentOrder, word_places
from lowbit.tune.timing import WrongResult

TURNS = 1024
PARTITIONS = 4
"""Partitions of an SM; each issues one instruction per clock."""

CONVERSIONS: tuple[tuple[str, HalfType], ...] = (
    ("int8", "fp16"), ("int8", "bf16"), ("int4", "fp16"), ("int4", "bf16"), ("fp6_e3m2", "fp16"),
)  # fmt: skip
BLOCK_WARPS = 16
STEP_WARPS = 8
STEP_TOKENS = (8, 16, 32, 64)
STEP_GROUPS = (32, 128)


def conversion_trials(sms: int) -> Iterator[Trial]:
    """Yields a trial for each conversion of each format. Figures are per tile, as the module's docstring defines it.
    `latency_clocks` is the time of a single warp whose iterations depend on each other."""
    for fmt, dtype in CONVERSIONS:
        empty = _DecodeTrial(Way("nothing", nothing(fmt, dtype)), sms, False)
        for way in ways(fmt, dtype):
            row = blank("conversions", fmt, way.name, dtype=dtype)
            many, alone = _DecodeTrial(way, sms, False), _DecodeTrial(way, sms, True)

            def once(launched: tuple[_DecodeTrial, ...] = (empty, many, alone)) -> None:
                for each in launched:
                    each.launch(0)

            def measure(empty: _DecodeTrial = empty, many: _DecodeTrial = many, alone: _DecodeTrial = alone) -> Row:
                free, own, latency = empty.clocks(), many.clocks(), alone.clocks()
                per_tile = PARTITIONS / BLOCK_WARPS
                counts = [loop_instructions(each.launcher.kernel) for each in (empty, many)]
                figures: dict[str, float | None] = {
                    "instructions": None if None in counts else counts[1] - counts[0],  # type: ignore[operator]
                    "clocks": (own - free) * per_tile,
                    "loop_clocks": free * per_tile,
                    "latency_clocks": latency,
                    "weights_per_clock": PARTITIONS * 1024 / ((own - free) * per_tile),
                }
                return {"figures": figures, "rel_err": 0.0}

            yield Trial(row, once, measure)


class _DecodeTrial:
    """One conversion in `decode_loop`; `alone`: a single warp with dependent iterations."""

    def __init__(self, way: Way, sms: int, alone: bool) -> None:
        c = way.conversion
        self.way, warps = way, 1 if alone else BLOCK_WARPS
        dequantizer = Decoding(c.format.name, c.dtype, 0, "none", "fp16", by=c)
        self.config = DecodeLoop(dequantizer, warps, alone)
        self.threads = sms * self.config.threads
        self.launcher = Launcher(decode_loop, (sms, 1, 1), warps)

    def launch(self, turns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random words int32 [bits, threads], their registers int32 [16, threads], and clocks int32 [threads]."""
        generator = torch.Generator("cuda").manual_seed(turns)
        low, high = -(1 << 31), (1 << 31) - 1
        shape = (self.config.dequantizer.bits, self.threads)
        words = torch.randint(low, high, shape, dtype=torch.int32, device="cuda", generator=generator)
        out = torch.zeros(REGISTERS, self.threads, dtype=torch.int32, device="cuda")
        clocks = torch.zeros(self.threads, dtype=torch.int32, device="cuda")
        self.launcher(out, clocks, words, 0x3D1B58BB, turns, self.config)
        return words, out, clocks

    def clocks(self) -> float:
        """Returns the clocks of an iteration. Raises WrongResult unless the registers equal those computed by NumPy."""
        self.launch(TURNS)
        words, out, clocks = self.launch(TURNS)
        c = self.way.conversion
        given = words[:, :4096].cpu().numpy().view(np.uint32)
        runs = given.reshape(-1, c.fields.words, given.shape[1])
        expected = np.concatenate([np.stack(c.program.run(list(run))) for run in runs])
        if not np.array_equal(expected, out[:, :4096].cpu().numpy().view(np.uint32)):
            raise WrongResult(f"{c.name} by {self.way.name}: registers differ from what the instructions mean")
        return statistics.median(clocks.tolist()) / TURNS


def step_trials(sms: int) -> Iterator[Trial]:
    """Yields trials of int4 in groups. Scales multiply either the sums after the product, as in the small-M kernel, or the
    weights before it."""
    for group in STEP_GROUPS:
        for tokens in STEP_TOKENS:
            for name, kind in (("after", KBlock), ("before", ScaledFirst)):
                trial = _StepTrial(kind("int4", "fp16", tokens, group, "none", "fp16"), sms)
                row = blank("scales", f"group {group}", name, m=tokens)
                yield Trial(row, lambda trial=trial: trial.launch(0), trial.measure)  # type: ignore[misc]


class _StepTrial:
    """A step of 16 rows and K 128 in `step_loop`; all warps have the same inputs."""

    def __init__(self, step: KBlock, sms: int) -> None:
        self.step, self.config = step, StepLoop(step, STEP_WARPS)
        self.threads = sms * self.config.threads
        self.launcher = Launcher(step_loop, (sms, 1, 1), STEP_WARPS)

    def launch(self, turns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Computes one step, then `turns` more. Returns the sums float32 [sums, lanes] of the first step, the expected sums,
        and the clocks int32 [threads] of the other steps."""
        lanes, expected = step_operands(self.step)
        words = lanes.repeat(1, self.threads // 32).cuda()
        out = torch.full((2 * self.step.accumulators, self.threads), math.nan, device="cuda")
        clocks = torch.zeros(self.threads, dtype=torch.int32, device="cuda")
        self.launcher(out, clocks, words, 0x3D1B58BB, turns, self.config)
        return out[: self.step.accumulators, :32], expected.cuda(), clocks

    def measure(self) -> Row:
        """Returns a row with the clocks that a partition of an SM takes for a step, and the step's instructions."""
        self.launch(TURNS)
        sums, expected, clocks = self.launch(TURNS)
        error = relative_error(sums * self.step.factor, expected)
        if not error <= TOLERANCE:
            raise WrongResult(f"{self.step}: relative error {error:.3g}")
        per_step = statistics.median(clocks.tolist()) / TURNS * PARTITIONS / STEP_WARPS
        count = loop_instructions(self.launcher.kernel)
        return {"figures": {"instructions": count, "clocks": per_step}, "rel_err": error}


def step_operands(step: KBlock) -> tuple[Tensor, Tensor]:
    """Returns the words int32 [words, 32] of random weights 16 x 128, of x and of scales in each lane, and the expected
    accumulators float64 [accumulators, 32]. Lane 4 g + t has rows g and g + 8 of tokens 2 t and 2 t + 1 of each n8 tile (PTX
    ISA, fragments of mma.m16n8k16)."""
    generator = torch.Generator().manual_seed(step.tokens)
    fmt = step.conversion.format
    codes = torch.randint(0, 1 << fmt.bits, (16, BLOCK_K), dtype=torch.uint8, generator=generator)
    x = torch.randn(step.tokens, BLOCK_K, generator=generator).half()
    scale = (
        (0.5 + torch.rand(16, step.groups, generator=generator)) * 2.0**15
    ).half()  # the range of stored scales (pack/weight.py)
    order = FragmentOrder(MMA_M16N8K16_F16, fmt)
    tiles = order.pack(codes, fmt.bits)[0][0]  # [tile, words of 32 lanes]
    words = tiles[:, word_places(fmt.bits)].permute(0, 2, 1).reshape(-1, 32)
    _, of_tile = order.tile.coordinates()  # [lane, register, element]
    k = torch.tensor(np.concatenate([of_tile, of_tile + 64], axis=1))
    lane = torch.arange(32)
    of_x = []
    for n8_tile in range(step.n8_tiles):
        # even registers have row g: for each product one with k, then one with k + 8
        for register in (i for i in range(32) if i % 2 == 0):
            pair = x[(8 * n8_tile + lane // 4)[:, None], k[:, register]]
            of_x.append(pair.contiguous().view(torch.int32)[:, 0])
    of_scale = [
        torch.stack([scale[lane // 4, group], scale[lane // 4 + 8, group]], dim=1).contiguous().view(torch.int32)[:, 0]
        for group in range(step.groups)
    ]
    values = code_values(fmt)[codes.long()].double() * scale.double().repeat_interleave(BLOCK_K // step.groups, dim=1)
    y = values @ x.double().T
    sums = [
        y[lane // 4 + 8 * (i // 2), 8 * n8_tile + 2 * (lane % 4) + i % 2] for n8_tile in range(step.n8_tiles) for i in range(4)
    ]
    return torch.cat([words, torch.stack([*of_x, *of_scale])]), torch.stack(sums)


def loop_instructions(kernel: Any) -> int | None:
    """Returns the instructions of the longest loop of a compiled kernel; None without a disassembler."""
    try:
        text = kernel.asm["sass"]
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return longest_loop(text)


def longest_loop(sass: str) -> int:
    """Returns the lines of the longest loop of code disassembled by Triton, without NOPs."""
    places: dict[str, int] = {}
    lines: list[str] = []
    longest = 0
    for line in sass.splitlines():
        if label := re.fullmatch(r"(LBB\d+):", line.strip()):
            places[label[1]] = len(lines)
        elif "\t" in line:
            text = line.split("\t", 1)[1]
            if "NOP" in text:
                continue
            lines.append(text)
            back = re.search(r"\bBRA\b.*?(LBB\d+)", text)
            if back and back[1] in places:
                longest = max(longest, len(lines) - places[back[1]])
    return longest
