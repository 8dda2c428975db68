"""The kernels of this branch case by case on a GPU, each family in a process of its own, each case named before it is launched.

`python bench/kernel_cases.py` runs all families, ten seconds a case at most: a case that hangs is named, its process is ended, and
the family goes on after it. `python bench/kernel_cases.py list` goes through everything without a GPU.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lowbit.bench import choice
from lowbit.bench.quantized_x import quantized_x
from lowbit.engine.warm_up import compiled
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.mixed_gemm import GemmShape, WgmmaTile, choose, invariant_tiles, wgmma_candidate, wgmma_tiles
from lowbit.kernels.choose.scaled_gemm import candidates_scaled
from lowbit.kernels.parts.launch import recording
from lowbit.ops.byte_gemm import plan_for_scaled
from lowbit.ops.fragment_gemm import _gathered, plan_for
from lowbit.ops.table import scaled_shape
from lowbit.pack import FragmentWeight, OperandWeight, weight_form
from lowbit.quantize import rtn

H200 = typical_machine(90)
SECONDS = 10
Case = tuple[str, Callable[[], str]]


class Run:
    """One run through cases: on a GPU, or only to list kernels (`lists`)."""

    def __init__(self, lists: bool) -> None:
        self.lists, self.on = lists, "cpu" if lists else "cuda"
        self.weights: dict = {}

    def weight(self, scheme, n, k):
        if self.lists:
            return rtn(torch.ones(16, 128), scheme)
        key = str(scheme), n, k
        if key not in self.weights:
            self.weights[key] = rtn(torch.randn(n, k, device=self.on) * 0.02, scheme)
        return self.weights[key]

    def room(self, plan):
        sums, counters = plan.workspace
        sums, counters = (1, 1) if self.lists else (max(1, sums), max(1, counters))
        return torch.full((sums,), float("nan"), device=self.on), torch.zeros(counters, dtype=torch.int32, device=self.on)

    def verdict(self, y, reference, room, again, limit) -> str:
        if self.lists:
            return ""
        torch.cuda.synchronize()
        error = ((y.double() - reference).norm(dim=1) / reference.norm(dim=1)).max().item()
        same = all(torch.equal(again(), y) for _ in range(5))
        zero = not room[1].any().item()
        return "" if error < limit and same and zero else f"error {error:.3g}, same bits {same}, counters zero {zero}"

    def mixed(self, scheme, tile, m, n, k, dtype=torch.float16) -> str:
        scheme = parse_scheme(scheme)
        q = self.weight(scheme, n, k)
        w = FragmentWeight.pack(q)
        types = [None if t is None else t.dtype for t in (w.scale, w.channel_scale)]
        plan = plan_for(tile, GemmShape(m, n, k, scheme.weight.bits), weight_form(scheme, *types), dtype, False, H200)
        x = torch.randn(m, k, device=self.on).to(dtype)
        room = self.room(plan)
        call = lambda: plan(x, w.codes, w.scale, w.channel_scale, None, *room)  # noqa: E731
        y = call()
        reference = None if self.lists else x.double() @ q.dequantize(torch.float32).double().T
        return self.verdict(y, reference, room, call, 4e-3 if dtype == torch.bfloat16 else 1e-3)

    def scaled(self, scheme, tile, m, n, k) -> str:
        scheme = parse_scheme(scheme)
        q = self.weight(scheme, n, k)
        w = OperandWeight.pack(q)
        plan = plan_for_scaled(tile, scaled_shape(scheme, m, n, k), scheme, torch.float16, "token", False, False, H200)
        of = choice.products_of(str(scheme), H200)
        x = choice._blank(of, m, k) if self.lists else quantized_x(torch.randn(m, k, device=self.on).half(), scheme)
        room = self.room(plan)
        call = lambda: plan(x.codes, x.scale, None, w.codes, w.scale, w.channel_scale, w.sums, None, *room)  # noqa: E731
        y = call()
        reference = None if self.lists else (x.codes.float() * x.scale).double() @ q.dequantize(torch.float32).double().T
        return self.verdict(y, reference, room, call, 2e-3)

    def ordered(self, scheme, m, n, k, of_x, dtype) -> str:
        scheme = parse_scheme(scheme)
        q = self.weight(scheme, n, k)
        w = FragmentWeight.pack(q)
        types = [None if t is None else t.dtype for t in (w.scale, w.channel_scale)]
        shape, form = GemmShape(m, n, k, scheme.weight.bits), weight_form(scheme, *types)
        order = torch.randperm(k, device=self.on).int() if of_x[0] else None
        factor = torch.rand(k, device=self.on) + 0.5 if of_x[1] else None
        x = torch.randn(m, k, device=self.on).to(dtype)
        inside = plan_for(choose(shape, H200), shape, form, dtype, False, H200, of_x)
        plain = plan_for(choose(shape, H200), shape, form, dtype, False, H200)
        if not inside.gathers:
            return "" if 2 * m * k > 65536 or m == 3 else "not gathered inside"
        y = inside(x, w.codes, w.scale, w.channel_scale, None, *self.room(inside), order, factor)
        brought = x if self.lists else _gathered(x, order, factor)
        z = plain(brought, w.codes, w.scale, w.channel_scale, None, *self.room(plain))
        return "" if self.lists or torch.equal(y, z) else f"differs by {(y.float() - z.float()).abs().max().item():.3g}"


def tiles(bits=4) -> dict[tuple[int, int], WgmmaTile]:
    """A plain tile of each size."""
    found = wgmma_tiles(GemmShape(64, 4096, 4096, bits), in_chain=True)
    return {(t.tokens, t.warpgroups): t for t in found if t.splits == 1 and t.stages >= 2}


def pieces16(run) -> Iterator[Case]:
    for scheme, bits in (("w4a16_g128", 4), ("w6e3m2a16", 6), ("w8a16", 8)):
        for (tokens, _), tile in tiles(bits).items():
            for m in sorted({1, tokens // 2 - 3, tokens - tokens // 4, tokens - 1}):
                yield f"{scheme} {tile} M {m}", lambda s=scheme, t=tile, m=m: run.mixed(s, t, m, 1544, 1152)


def stream16(run) -> Iterator[Case]:
    for (tokens, _), plain in tiles().items():
        tile = replace(plain, stream_k=True)
        for m, n, k in ((tokens, 3080, 2048), (2 * tokens + 5, 6144, 1024), (5 * tokens, 4616, 640), (700, 5120, 512)):
            if not wgmma_candidate(tile, GemmShape(m, n, k, 4), H200).reasons:
                yield f"{tile} M {m} {n} x {k}", lambda t=tile, m=m, n=n, k=k: run.mixed("w4a16_g128", t, m, n, k)
    for scheme, dtype in (("w6e3m2a16", torch.float16), ("w8a16", torch.bfloat16), ("w4a16_g128_z", torch.bfloat16)):
        for size, plain in tiles(parse_scheme(scheme).weight.bits).items():
            if size in ((256, 2), (128, 2), (64, 4)):
                tile = replace(plain, stream_k=True)
                case = lambda s=scheme, t=tile, d=dtype: run.mixed(s, t, 3 * t.tokens + 1, 4616, 1024, d)  # noqa: E731
                yield f"{scheme} {tile}", case


def sections16(run) -> Iterator[Case]:
    for m in (1, 17, 64, 100, 300, 1500):
        for tile in invariant_tiles(GemmShape(m, 4096, 2048, 4), H200):
            yield f"{tile} M {m}", lambda t=tile, m=m: run.mixed("w4a16_g128", t, m, 4096, 2048)


def scaled8(run, stream: bool) -> Iterator[Case]:
    for scheme in ("w8e4m3a8e4m3", "w8a8", "w4a8_g128", "w4a8e4m3"):
        seen = set()
        for m in (5, 100, 200, 700):
            for row in candidates_scaled(scaled_shape(parse_scheme(scheme), m, 4616, 2048), H200):
                tile = row.tile
                key = tile.tokens_are_rows, tile.warpgroups, tile.columns, tile.pair
                wanted = tile.stream_k if stream else m < tile.tokens and not tile.stream_k
                if row.reasons or key in seen or not wanted or (tile.splits > 1 and not tile.pair):
                    continue
                seen.add(key)
                yield f"{scheme} {tile} M {m}", lambda s=scheme, t=tile, m=m: run.scaled(s, t, m, 4616, 2048)


def orders(run) -> Iterator[Case]:
    of = [(True, False), (True, True), (False, True)]
    for scheme, n, k, dtype in (
        ("w4a16_g128", 4096, 4096, torch.float16), ("w4a16_g128", 1544, 14336, torch.float16),
        ("w4a16_g128_z", 2048, 2176, torch.bfloat16),
    ):  # fmt: skip
        for m in (1, 2, 3, 4):
            for of_x in of:
                case = lambda a=(scheme, m, n, k, of_x, dtype): run.ordered(*a)  # noqa: E731
                yield f"{scheme} {n} x {k} M {m} {of_x}", case


FAMILIES = {
    "orders": orders,
    "sections": sections16,
    "pieces, 16 bits": pieces16,
    "pieces, 8 bits": lambda run: scaled8(run, False),
    "stream-K, 16 bits": stream16,
    "stream-K, 8 bits": lambda run: scaled8(run, True),
}


def child(name: str, skip: int) -> None:
    """The cases of a family from number `skip` on."""
    with recording() as wanted:
        for _, case in FAMILIES[name](Run(True)):
            case()
    print(f"compiling {len(wanted)} kernels", flush=True)
    for _ in compiled(wanted, 90):
        pass
    torch.zeros(1, device="cuda")
    for number, (label, case) in enumerate(FAMILIES[name](Run(False))):
        if number >= skip:
            print(f"begin {number} {label}", flush=True)
            print(f"end {case()}", flush=True)


def family(name: str) -> None:
    """All cases of a family, past those that hang."""
    skip, hung, bad, done = 0, 0, 0, 0
    while hung < 3:
        command = [sys.executable, __file__, "child", name, str(skip)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read(stream=process.stdout, lines=lines) -> None:
            for line in stream:
                lines.put(line.strip())
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        now, limit = "start", 90
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                print(f"{name}: HANGS in {now}", flush=True)
                os.killpg(process.pid, signal.SIGKILL)
                break
            if line is None:
                break
            if line.startswith("begin"):
                now, limit = line, SECONDS
                skip = int(line.split()[1]) + 1
            elif line.startswith("end"):
                done += 1
                if line != "end":
                    bad += 1
                    print(f"{name}: {now}: {line}", flush=True)
        if process.wait() == 0:
            break
        hung += 1
        print(f"{name}: process ended with {process.returncode} in {now}", flush=True)
    print(f"{name}: {done} cases, {bad} wrong, {hung} ended early", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["list"]:
        for name in FAMILIES:
            with recording() as wanted:
                labels = [(label, case())[0] for label, case in FAMILIES[name](Run(True))]
            print(f"{name}: {len(labels)} cases, {len(wanted)} kernels")
    else:
        begun = time.monotonic()
        for name in sys.argv[1:] or FAMILIES:
            family(name)
            print(f"{time.monotonic() - begun:.0f} s", flush=True)
