"""Cases and times of one part of the products, on a GPU: `python cases.py PART`; `python cases.py PART list` needs no GPU.

Each family of cases has a process of its own. A case is named before it is launched and has ten seconds; one that hangs is
named, its process ended, and the family goes on after it. Then times of old beside new, in one process, each named too.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import torch

from lowbit.bench import choice
from lowbit.bench.protocol import Graph, Memory, copies_needed, gaussian, l2_bytes, times_in_turn, warm_up
from lowbit.bench.quantized_x import quantized_x
from lowbit.engine.warm_up import compiled
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose import mixed_gemm as chosen
from lowbit.kernels.choose.mixed_gemm import GemmShape, choose, wgmma_candidate, wgmma_tiles
from lowbit.kernels.choose.scaled_gemm import candidates_scaled
from lowbit.kernels.parts.launch import recording
from lowbit.ops.byte_gemm import plan_for_scaled
from lowbit.ops.fragment_gemm import _gathered, plan_for
from lowbit.ops.table import scaled_shape
from lowbit.pack import FragmentWeight, OperandWeight, weight_form
from lowbit.quantize import rtn

H200 = typical_machine(90)
SECONDS = 10
HALF, BF16 = torch.float16, torch.bfloat16
SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))


class Run:
    """One run through cases: on a GPU, or only to list kernels (`lists`)."""

    def __init__(self, lists):
        self.lists, self.on, self.weights = lists, "cpu" if lists else "cuda", {}

    def weight(self, scheme, n, k):
        if self.lists:
            return rtn(torch.ones(16, 128), scheme)
        key = str(scheme), n, k
        if key not in self.weights:
            self.weights[key] = rtn(torch.randn(n, k, device=self.on) * 0.02, scheme)
        return self.weights[key]

    def room(self, *plans):
        sums, counters = (1, 1) if self.lists else (max(1, *(p.workspace[i] for p in plans), 1) for i in (0, 1))
        return torch.full((sums,), float("nan"), device=self.on), torch.zeros(counters, dtype=torch.int32, device=self.on)

    def plan(self, scheme, tile, m, n, k, w, dtype=HALF, **more):
        types = [None if t is None else t.dtype for t in (w.scale, w.channel_scale)]
        return plan_for(tile, GemmShape(m, n, k, scheme.weight.bits), weight_form(scheme, *types), dtype, False, H200, **more)

    def verdict(self, call, reference, room, limit):
        """What is wrong with y of `call`: against float64, run after run, and whether counters are as before."""
        if self.lists:
            call()
            return ""
        torch.full(reference.shape, float("nan"), device="cuda", dtype=HALF)  # memory that the next y gets
        y = call()
        torch.cuda.synchronize()
        error = ((y.double() - reference).norm(dim=1) / reference.norm(dim=1)).max().item()
        same = all(torch.equal(call(), y) for _ in range(5))
        zero = not room[1].any().item()
        return "" if error < limit and same and zero else f"error {error:.3g}, same bits {same}, counters zero {zero}"

    def mixed(self, scheme, tile, m, n, k, dtype=HALF):
        scheme = parse_scheme(scheme)
        q = self.weight(scheme, n, k)
        w = FragmentWeight.pack(q)
        plan = self.plan(scheme, tile, m, n, k, w, dtype)
        x, room = torch.randn(m, k, device=self.on).to(dtype), self.room(plan)
        reference = None if self.lists else x.double() @ q.dequantize(torch.float32).double().T
        call = lambda: plan(x, w.codes, w.scale, w.channel_scale, None, *room)  # noqa: E731
        return self.verdict(call, reference, room, 4e-3 if dtype == BF16 else 1e-3)

    def scaled(self, scheme, tile, m, n, k):
        scheme = parse_scheme(scheme)
        q = self.weight(scheme, n, k)
        w = OperandWeight.pack(q)
        plan = plan_for_scaled(tile, scaled_shape(scheme, m, n, k), scheme, HALF, "token", False, False, H200)
        of = choice.products_of(str(scheme), H200)
        x = choice._blank(of, m, k) if self.lists else quantized_x(torch.randn(m, k, device=self.on).half(), scheme)
        room = self.room(plan)
        reference = None if self.lists else (x.codes.float() * x.scale).double() @ q.dequantize(torch.float32).double().T
        call = lambda: plan(x.codes, x.scale, None, w.codes, w.scale, w.channel_scale, w.sums, None, *room)  # noqa: E731
        return self.verdict(call, reference, room, 2e-3)

    def ordered(self, scheme, m, n, k, of_x, dtype):
        scheme = parse_scheme(scheme)
        q = self.weight(scheme, n, k)
        w = FragmentWeight.pack(q)
        order = torch.randperm(k, device=self.on).int() if of_x[0] else None
        factor = torch.rand(k, device=self.on) + 0.5 if of_x[1] else None
        x = torch.randn(m, k, device=self.on).to(dtype)
        tile = choose(GemmShape(m, n, k, scheme.weight.bits), H200)
        inside, plain = self.plan(scheme, tile, m, n, k, w, dtype, of_x=of_x), self.plan(scheme, tile, m, n, k, w, dtype)
        if not inside.gathers:
            return "" if 2 * (4 if m == 3 else m) * k > 65536 else "not gathered inside"
        room = self.room(inside)
        call = lambda: inside(x, w.codes, w.scale, w.channel_scale, None, *room, order, factor)  # noqa: E731
        brought = x if self.lists else _gathered(x, order, factor)
        reference = None if self.lists else brought.double() @ q.dequantize(torch.float32).double().T
        wrong = self.verdict(call, reference, room, 4e-3 if dtype == BF16 else 1e-3)
        z = plain(brought, w.codes, w.scale, w.channel_scale, None, *self.room(plain))
        if self.lists or torch.equal(call(), z):
            return wrong
        return f"{wrong} differs from x in order before by {(call().float() - z.float()).abs().max().item():.3g}"

    def invariant(self, scheme, n, k):
        """Rows of small batches beside those of the largest, bit for bit, with every tile that may be taken."""
        parsed = parse_scheme(scheme)
        q = self.weight(parsed, n, k)
        w = FragmentWeight.pack(q)
        x = torch.randn(1500, k, device=self.on).to(HALF)
        reference = None if self.lists else x.double() @ q.dequantize(torch.float32).double().T
        full, wrong = None, []
        for m in (1500, 1, 3, 16, 17, 48, 64, 100, 128, 200, 256, 300, 700):
            shape = GemmShape(m, n, k, parsed.weight.bits)
            tiles = [choose(shape, H200, True)]
            if m in (17, 300):
                tiles = [t for t in chosen.invariant_tiles(shape, H200) if t.stages >= 4]
            for tile in tiles:
                print(f"  {tile} M {m}", flush=True)
                plan = self.plan(parsed, tile, m, n, k, w)
                y = plan(x[:m], w.codes, w.scale, w.channel_scale, None, *self.room(plan))
                if self.lists:
                    continue
                torch.cuda.synchronize()
                if full is None:
                    full, error = y, ((y.double() - reference).norm() / reference.norm()).item()
                    if not error < 1e-3:
                        wrong.append(f"{tile} error {error:.3g}")
                if not torch.equal(y, full[:m]):
                    wrong.append(f"M {m} {tile} differs by {(y.double() - full[:m].double()).abs().max().item():.3g}")
        return "; ".join(wrong)


def plain_tiles(bits=4):
    """A plain tile of each size. (Not of chains: these leave 256 tokens 2 stages, with which the kernel waits for itself.)"""
    found = wgmma_tiles(GemmShape(64, 4096, 4096, bits))
    return {(t.tokens, t.warpgroups): t for t in found if t.splits == 1 and not getattr(t, "stream_k", False) and t.stages >= 4}


def orders(run):
    for scheme, n, k, dtype in (
        ("w4a16_g128", 4096, 4096, HALF), ("w4a16_g128", 1544, 14336, HALF), ("w4a16_g128_z", 2048, 2176, BF16),
        ("w6e3m2a16", 344, 200, HALF), ("w3a16_g64", 28672, 4096, HALF),
    ):  # fmt: skip
        for m in (1, 2, 3, 4):
            for of_x in [(True, False), (True, True), (False, True)]:
                yield f"{scheme} {n} x {k} M {m} {of_x}", partial(run.ordered, scheme, m, n, k, of_x, dtype)


def sections(run):
    for m in (1, 17, 64, 100, 300, 1500):
        for tile in chosen.invariant_tiles(GemmShape(m, 4096, 2048, 4), H200):
            if tile.stages >= 4:
                yield f"{tile} M {m}", partial(run.mixed, "w4a16_g128", tile, m, 4096, 2048)
    for scheme, tokens in (("w8a16", 128), ("w6e3m2a16", 32), ("w4a16_g128_z", 64)):
        for size, plain in plain_tiles(parse_scheme(scheme).weight.bits).items():
            if size == (tokens, 4 if tokens == 32 else 2):
                for dtype in (HALF, BF16):
                    tile = replace(plain, sections=3)
                    yield f"{scheme} {tile} {dtype}", partial(run.mixed, scheme, tile, 2 * tokens + 5, 1544, 2048, dtype)


def same_bits(run):
    for scheme, n, k in (("w4a16_g128", 4096, 4096), ("w6e3m2a16", 1536, 4096)):
        yield f"{scheme} {n} x {k}", partial(run.invariant, scheme, n, k)


def pieces16(run):
    for scheme, bits in (("w4a16_g128", 4), ("w6e3m2a16", 6), ("w8a16", 8)):
        for (tokens, _), tile in plain_tiles(bits).items():
            for m in sorted({1, tokens // 2 - 3, tokens - tokens // 4, tokens - 1}):
                yield f"{scheme} {tile} M {m}", partial(run.mixed, scheme, tile, m, 1544, 1152)


def stream16(run):
    for (tokens, _), plain in plain_tiles().items():
        tile = replace(plain, stream_k=True)
        for m, n, k in ((tokens, 3080, 2048), (2 * tokens + 5, 6144, 1024), (5 * tokens, 4616, 640), (700, 5120, 512)):
            if not wgmma_candidate(tile, GemmShape(m, n, k, 4), H200).reasons:
                yield f"{tile} M {m} {n} x {k}", partial(run.mixed, "w4a16_g128", tile, m, n, k)
    for scheme, dtype in (("w6e3m2a16", HALF), ("w8a16", BF16), ("w4a16_g128_z", BF16)):
        for size, plain in plain_tiles(parse_scheme(scheme).weight.bits).items():
            if size in ((256, 2), (128, 2), (64, 4)):
                tile = replace(plain, stream_k=True)
                yield f"{scheme} {tile}", partial(run.mixed, scheme, tile, 3 * tile.tokens + 1, 4616, 1024, dtype)


def scaled8(stream, run):
    for scheme in ("w8e4m3a8e4m3", "w8a8", "w4a8_g128", "w4a8e4m3"):
        seen = set()
        for m in (5, 100, 200, 700):
            for row in candidates_scaled(scaled_shape(parse_scheme(scheme), m, 4616, 2048), H200):
                tile = row.tile
                key = tile.tokens_are_rows, tile.warpgroups, tile.columns, tile.pair
                shared = getattr(tile, "stream_k", False)
                wanted = shared if stream else m < tile.tokens and not shared
                if row.reasons or key in seen or not wanted or (tile.splits > 1 and not tile.pair):
                    continue
                seen.add(key)
                yield f"{scheme} {tile} M {m}", partial(run.scaled, scheme, tile, m, 4616, 2048)


FAMILIES = {
    "ring": {"orders": orders},
    "invariant": {"sections": sections, "same bits": same_bits},
    "pieces": {"pieces, 16 bits": pieces16, "pieces, 8 bits": partial(scaled8, False)},
    "streamk": {"stream-K, 16 bits": stream16, "stream-K, 8 bits": partial(scaled8, True)},
}


# ---- times: for each product (label, [(variant, call made by `made(weights' number)`)])


class Timed:
    """Products of one weight, timed in turn."""

    def __init__(self, lists, scheme, n, k):
        self.lists, self.n, self.k = lists, n, k
        self.of = choice.products_of(scheme, H200)
        if lists:
            self.weights = [self.of.pack(rtn(torch.ones(16, 128), self.of.scheme))]
        else:
            first = self.of.pack(rtn(gaussian(n, k, seed=1) / k**0.5, self.of.scheme))
            self.weights = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
            self.memory = Memory()

    def given(self, m):
        if self.lists:
            return choice._blank(self.of, m, self.k)
        return self.of.given(gaussian(m, self.k, seed=2, dtype=HALF))

    def room(self, plan):
        return Run(self.lists).room(plan)

    def show(self, label, variants, m):
        """`variants`: name -> call of a weight."""
        if self.lists:
            for call in variants.values():
                call(self.weights[0])
            return
        us = 1e6 * max(self.weights[0].nbytes / 4e12, 2.0 * m * self.n * self.k / 6e14) + 2
        count, graphs = choice.launches(us, len(self.weights)), {}
        for name, call in variants.items():
            print(f"  capture {label} {name}", flush=True)
            graphs[name] = Graph([partial(call, self.weights[i % len(self.weights)]) for i in range(count)], self.memory)
        times = times_in_turn([*graphs.values()], 11, 3)
        medians = {name: statistics.median(found) for name, found in zip(graphs, times, strict=True)}
        first = next(iter(medians.values()))
        print(f"T {label}: " + ", ".join(f"{name} {us:.2f} ({us / first:.3f})" for name, us in medians.items()), flush=True)


def product(timed, tile, m, x):
    plan = timed.of.plan(tile, m, timed.n, timed.k, timed.weights[0])
    room = timed.room(plan)
    return lambda w: timed.of.multiply(plan, x, w, room)


def time_ring(lists):
    for n, k in SHAPES:
        timed = Timed(lists, "w4a16_g128", n, k)
        w0, run = timed.weights[0], Run(lists)
        order, factor = torch.randperm(k, device=run.on).int(), torch.rand(k, device=run.on) + 0.5
        for m in (1, 2, 4):
            x, tile = timed.given(m), choose(GemmShape(m, n, k, 4), H200)
            plans = {of: run.plan(timed.of.scheme, tile, m, n, k, w0, of_x=of) for of in ((False, False), (True, False), (True, True))}
            room = run.room(*plans.values())
            call = lambda of, x, w, plans=plans, room=room, more=(): plans[of](x, w.codes, w.scale, w.channel_scale, None, *room, *more)  # noqa: E731, E501
            variants = {"plain": partial(call, (False, False), x)}
            if not lists:
                variants["order before"] = lambda w, x=x, call=call: call((False, False), _gathered(x, order, None), w)
                variants["order, factor before"] = lambda w, x=x, call=call: call((False, False), _gathered(x, order, factor), w)
            for name, of, more in (("order inside", (True, False), (order, None)), ("both inside", (True, True), (order, factor))):
                if plans[of].gathers:
                    variants[name] = partial(call, of, x, more=more)
            timed.show(f"{n} x {k} M {m}", variants, m)


def time_invariant(lists):
    for n, k in (*SHAPES, (5120, 13824)):
        timed = Timed(lists, "w4a16_g128", n, k)
        for m in (1, 16, 64, 256, 1024):
            shape, x = GemmShape(m, n, k, 4), timed.given(m)
            plain = [wgmma_candidate(t, shape, H200) for t in wgmma_tiles(shape) if t.splits == 1 and not getattr(t, "stream_k", False)]
            old = min((row for row in plain if not row.reasons), key=lambda row: row.cost_us).tile
            tiles = {"default": choose(shape, H200), "invariant old": old, "invariant new": choose(shape, H200, True)}
            if m == 256:
                rows = [wgmma_candidate(t, shape, H200) for t in chosen.invariant_tiles(shape, H200)]
                rows = sorted((r for r in rows if not r.reasons), key=lambda row: row.cost_us)
                tiles |= {f"next {i}": row.tile for i, row in enumerate(rows[1:3])}
            variants = {f"{name} [{choice.written(t, choice.TILES)}]": product(timed, t, m, x) for name, t in tiles.items()}
            timed.show(f"{n} x {k} M {m}", variants, m)


def time_pieces(lists):
    import lowbit.kernels.sm90.mixed_gemm as mixed
    import lowbit.kernels.sm90.scaled_gemm as scaled

    def whole(*given):
        return 1

    for scheme in ("w4a16_g128", "w8e4m3a8e4m3"):
        for n, k in ((28672, 4096), (5120, 13824)):
            timed, bits = Timed(lists, scheme, n, k), 4
            for m, full in ((8, 16), (24, 32), (48, 64), (96, 128), (192, 256)):
                x, y = timed.given(m), timed.given(full)
                if scheme.startswith("w4"):
                    tile = next(t for (tokens, wg), t in plain_tiles(bits).items() if tokens == full and wg == 2)
                else:
                    found = candidates_scaled(timed.of.shape(full, n, k), H200)
                    tile = next(r.tile for r in found if not r.reasons and r.tile.tokens == full and r.tile.splits == 1)
                module = mixed if scheme.startswith("w4") else scaled
                keep, module.pieces_of_x = module.pieces_of_x, whole
                one = product(timed, tile, m, x)
                module.pieces_of_x = keep
                variants = {"one copy": one, "pieces": product(timed, tile, m, x), f"M {full}": product(timed, tile, full, y)}
                timed.show(f"{scheme} {n} x {k} M {m} [{choice.written(tile, choice.TILES)}]", variants, full)


def time_streamk(lists):
    for scheme in ("w4a16_g128", "w8e4m3a8e4m3"):
        for n, k in ((5120, 13824), (6144, 4096), (4096, 14336)):
            timed = Timed(lists, scheme, n, k)
            for m in (256, 1024):
                x = timed.given(m)
                rows = timed.of.able(m, n, k)
                old = [row.tile for row in rows if not getattr(row.tile, "stream_k", False)][:2]
                new = [row.tile for row in rows if getattr(row.tile, "stream_k", False)][:2]
                names = {f"old {i}": t for i, t in enumerate(old)} | {f"stream-K {i}": t for i, t in enumerate(new)}
                variants = {f"{name} [{choice.written(t, choice.TILES)}]": product(timed, t, m, x) for name, t in names.items()}
                timed.show(f"{scheme} {n} x {k} M {m}", variants, m)


TIMES = {"ring": time_ring, "invariant": time_invariant, "pieces": time_pieces, "streamk": time_streamk}


def wanted_of(part):
    with recording() as wanted:
        for cases in [] if "times" in sys.argv else FAMILIES[part].values():
            for _, case in cases(Run(True)):
                case()
        TIMES[part](True)
    return wanted


def child(part, name, skip):
    """The cases of a family from number `skip` on, or the times."""
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    if name == "times":
        warm_up(0.5)
        TIMES[part](False)
        return
    for number, (label, case) in enumerate(FAMILIES[part][name](Run(False))):
        if number >= skip:
            print(f"begin {number} {label}", flush=True)
            print(f"end {case()}", flush=True)


def family(part, name):
    """All cases of a family, past those that hang."""
    skip, hung, bad, done, began = 0, 0, 0, 0, time.monotonic()
    while hung < 3:
        process = subprocess.Popen(
            [sys.executable, __file__, part, "child", name, str(skip)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        lines = queue.SimpleQueue()

        def read(stream=process.stdout, lines=lines):
            for line in stream:
                lines.put(line.rstrip())
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        atexit.register(lambda process=process: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        now, limit, rest = "start", 60, []
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                print(f"{name}: HANGS in {now} {rest[-1:]}", flush=True)
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
            elif line.startswith("T "):
                print(line[2:], flush=True)
            else:
                rest.append(line)
        if process.wait() == 0:
            break
        hung += 1
        print(f"{name}: process ended with {process.returncode} in {now}\n" + "\n".join(rest[-6:]), flush=True)
        if name == "times":
            return
    print(f"{name}: {done} cases, {bad} wrong, {hung} ended early, {time.monotonic() - began:.0f} s", flush=True)


def main(part, verb="", *rest):
    if verb == "child":
        child(part, rest[0], int(rest[1]))
        return
    began = time.monotonic()
    wanted = wanted_of(part)
    print(f"{part}: {len(wanted)} kernels", {name: sum(1 for _ in made(Run(True))) for name, made in FAMILIES[part].items()})
    if verb == "list":
        return
    for _ in compiled(wanted, 90):
        pass
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for name in [*([] if verb == "times" else FAMILIES[part]), "times"]:
        family(part, name)
        print(f"{time.monotonic() - began:.0f} s", flush=True)


main(*sys.argv[1:])
