"""The chunked loop of the mma.sync kernel for many tokens, checked and timed beside main's loop before it, on an H200 within
110 s, from the root of the repository: `python bench/experiments/chunk/run.py`; `.. run.py list` needs no GPU.

1. Kernels are compiled by all cores; meanwhile a process for each family of cases starts, and waits for them.
2. Families: every tile by ragged shapes; schemes, types and lines; graphs of M 256, 4096 x 4096 with all tiles of the choice,
   of both loops, replayed in turn; and the same with sums that are given back after the capture, as a timing script once did,
   by main's loop: that one is to fail, and says whose fault an illegal access was. A case is named before it runs; a process
   that ends is started again behind the case that ended it.
3. Times, alone on the GPU: main's loop, the new one, and one whose copies all stand alone.
"""

from __future__ import annotations

import atexit
import importlib
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
READY = Path("/tmp/chunk_compiled")

import torch  # noqa: E402

from lowbit.bench import choice  # noqa: E402
from lowbit.bench.protocol import (  # noqa: E402
    Graph,
    Memory,
    copies_needed,
    gaussian,
    l2_bytes,
    times_in_turn,
    warm_up,
)  # fmt: skip
from lowbit.formats import parse_scheme  # noqa: E402
from lowbit.hardware.machine import typical_machine  # noqa: E402
from lowbit.kernels.choose.mixed_gemm import GemmShape, MmaTile, choose, mma_tiles  # noqa: E402
from lowbit.kernels.parts.launch import recording  # noqa: E402
from lowbit.ops.workspace import workspace  # noqa: E402
from lowbit.pack import FragmentWeight, InterleavedWeight, weight_form  # noqa: E402
from lowbit.quantize import rtn  # noqa: E402

BEGAN = time.monotonic()
OLDER = replace(typical_machine(90), arch=typical_machine(80).arch)
HALF, BF16 = torch.float16, torch.bfloat16
MODULES = {"new": "lowbit.kernels.sm80.wide_mixed_gemm", "main": "base_wide", "single": "single_wide"}
SECONDS = 12
SHAPES = ((8192, 8192), (4096, 4096), (28672, 4096))
MS = (64, 256, 512, 1024, 4096)
MARLIN = {  # us on the same H200, 2026-11-23, w4a16_g128
    (8192, 8192): {256: 96.8, 512: 182.7, 1024: 362.3, 4096: 1483.8},
    (4096, 4096): {256: 30.4, 512: 48.4, 1024: 99.6, 4096: 372.8},
    (28672, 4096): {256: 171.2, 512: 324.2, 1024: 652.9, 4096: 2722.6},
}
SINGLE = '''from lowbit.kernels.parts.stage_order import StageOrder as Together


class StageOrder(Together):
    """Copies that all stand alone."""

    def first_copy(self, position):
        room = self.positions - self.ahead
        return min(position, room) * len(self.copies) // room

'''


def variant():
    """The new kernel with each copy alone, as it was timed on 2026-11-23."""
    text = (ROOT / "lowbit/kernels/sm80/wide_mixed_gemm.py").read_text()
    of = "from lowbit.kernels.parts.stage_order import StageOrder\n"
    assert of in text
    (HERE / "single_wide.py").write_text("# ruff: noqa\n" + text.replace(of, SINGLE))


def plan_of(name, scheme, tile, m, n, k, w, dtype=HALF):
    types = [None if t is None else t.dtype for t in (w.scale, w.channel_scale)]
    form = weight_form(scheme, *types, interleaved=isinstance(w, InterleavedWeight))
    module = importlib.import_module(MODULES[name])
    return module.MmaPlan(GemmShape(m, n, k, scheme.weight.bits), tile, form, dtype, False)


class Run:
    """On a GPU, or only to list kernels (`lists`)."""

    def __init__(self, lists):
        self.lists, self.weights, self.types = lists, {}, {}

    def weight(self, scheme, n, k, lines=False):
        """(weight as integers and scales, packed); of other sizes where kernels are only listed."""
        kind = InterleavedWeight if lines else FragmentWeight
        if self.lists:
            n, k = 64, 128
        key = str(scheme), n, k, lines
        if key not in self.weights:
            q = rtn(torch.randn(n, k, device="cpu" if self.lists else "cuda") * 0.05, scheme)
            self.weights[key] = q, kind.pack(q)
        return self.weights[key]

    def call(self, name, scheme, tile, m, n, k, dtype=HALF, lines=False):
        q, w = self.weight(scheme, n, k, lines)
        plan = plan_of(name, scheme, tile, m, n, k, w, dtype)
        on = "meta" if self.lists else "cuda"
        meta = lambda t: None if t is None else t.to("meta")  # noqa: E731
        parts = [w.codes, w.scale, w.channel_scale]
        if self.lists:
            x, parts, room = torch.empty(m, k, dtype=dtype, device=on), [meta(t) for t in parts], None
            plan(x, *parts, None, torch.empty(1, device=on), torch.empty(1, dtype=torch.int32, device=on))
            return None
        wide = torch.zeros(m, -(-k // 8) * 8, dtype=dtype, device=on)[:, :k]
        wide.copy_(torch.randn(m, k, device=on))
        room = workspace(wide.device, *plan.workspace)
        room[0].fill_(float("nan"))
        return partial(plan, wide, *parts, None, *room), wide, q

    def check(self, name, scheme, tile, m, n, k, dtype=HALF, lines=False):
        """What is wrong, or nothing."""
        scheme = parse_scheme(scheme)
        made = self.call(name, scheme, tile, m, n, k, dtype, lines)
        if made is None:
            return ""
        call, x, q = made
        reference = x.double() @ q.dequantize(torch.float64).T
        torch.full((m, n), float("nan"), device="cuda", dtype=dtype)  # memory that y gets
        y = call()
        torch.cuda.synchronize()
        error = ((y.double() - reference).norm(dim=1) / reference.norm(dim=1)).max().item()
        same = all(torch.equal(call(), y) for _ in range(2))
        good = error < (5e-3 if dtype == BF16 else 1e-3) and same
        return "" if good else f"error {error:.3g}, same bits {same}"


TILES = [
    *dict.fromkeys(
        t for n, k in SHAPES for m in (64, 1024) for t in mma_tiles(GemmShape(m, n, k, 4), OLDER) if t.splits in (1, 8)
    ),
    MmaTile(128, 2, 8, 1, 2, 1), MmaTile(64, 2, 8, 1, 4, 3, in_turn=True), MmaTile(256, 1, 8, 1, 3, 1),
    MmaTile(128, 4, 4, 2, 4, 1), MmaTile(128, 4, 2, 2, 3, 1), MmaTile(64, 2, 4, 1, 4, 2, warps_k=2),
]  # fmt: skip
SCHEMES = ["w2a16_g64", "w3a16_g128", "w4a16_pc", "w5a16_g32", "w6a16_g128", "w7a16_g128", "w8a16", "w6e3m2a16", "w8e4m3a16",
           "w4a16_g16_z", "w4a16_g32_fz"]  # fmt: skip
LARGE, SMALL = MmaTile(128, 2, 8, 1, 3, 2), MmaTile(64, 2, 4, 2, 4, 3)


def ragged(run, part):
    for i, tile in enumerate(TILES):
        if i % 2 == part:
            n = 3989 if i % 4 < 2 else 4008  # pieces of 16 bytes, or not
            for m, k in ((77, 1096), (300, 64 * 41)):
                yield f"{tile} {m} {n} {k}", partial(run.check, "new", "w4a16_g128", tile, m, n, k)


def schemes(run, part):
    for dtype in (HALF, BF16)[part : part + 1]:
        for scheme in SCHEMES:
            few = scheme in ("w3a16_g128", "w8a16", "w4a16_g16_z")
            for tile, shape in ((LARGE, (300, 1000, 1096)), (SMALL, (77, 2056, 64 * 9)))[: 2 if few else 1]:
                yield f"{scheme} {dtype} {tile} {shape}", partial(run.check, "new", scheme, tile, *shape, dtype)
        for scheme in ("w4a16_g128", "w8a16"):
            for tile in (LARGE, SMALL):
                yield f"lines {scheme} {dtype} {tile}", partial(run.check, "new", scheme, tile, 200, 2048, 1024, dtype, True)


KEPT = []


def graph_of(call, drop):
    """A graph of 16 launches; with `drop` nobody keeps the sums of its splits, which torch gives back at the next capture."""
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            ys = [call() for _ in range(16)]
        stream.synchronize()
    KEPT.append((graph, ys, None if drop else call))
    return graph, ys


def graphs(run, names, drop=False):
    """M 256, 4096 x 4096: each tile of the choice captured; at last all of them replayed in turn, named each."""
    m, n, k, scheme = 256, 4096, 4096, parse_scheme("w4a16_g128")
    made = {}

    def capture(name, tile):
        if drop and not run.lists:
            run.weight(scheme, n, k)
            torch.cuda.empty_cache()
        found = run.call(name, scheme, tile, m, n, k)
        if found is None:
            return ""
        call, x, q = found
        if "reference" not in made:
            made["x"] = x
            made["reference"] = x.double() @ q.dequantize(torch.float64).T
        x.copy_(made["x"])
        KEPT.append(x)
        made[name, tile] = graph_of(call, drop)
        return ""

    def replay(name, tile):
        if run.lists:
            return ""
        graph, ys = made[name, tile]
        for y in ys:
            y.fill_(float("nan"))
        for _ in range(7):
            graph.replay()
        torch.cuda.synchronize()
        errors = [float((y.double() - made["reference"]).norm() / made["reference"].norm()) for y in (ys[0], ys[-1])]
        same = all(torch.equal(y, ys[0]) for y in ys)
        return "" if max(errors) < 1e-3 and same else f"errors {errors}, same bits {same}"

    tiles = mma_tiles(GemmShape(m, n, k, 4), OLDER)
    if drop:  # 16 MiB of sums, more than what torch cuts from a larger piece of memory
        tiles = [MmaTile(128, 2, 8, 1, 4, 4), MmaTile(64, 2, 8, 1, 4, 1)]
    pairs = [(name, tile) for tile in tiles for name in names]
    for what, function in (("capture", capture), ("replay", replay)):
        for name, tile in pairs:
            yield f"{what} {name} {tile}", partial(function, name, tile)


FAMILIES = {
    "ragged shapes 0": partial(ragged, part=0),
    "ragged shapes 1": partial(ragged, part=1),
    "schemes fp16": partial(schemes, part=0),
    "schemes bf16": partial(schemes, part=1),
    "graphs of M 256": partial(graphs, names=("main", "new")),
    "main's loop, sums not kept (to fail)": partial(graphs, names=("main",), drop=True),
}


def child(name, skip):
    torch.zeros(1, device="cuda")
    torch.manual_seed(0)
    while not READY.exists():
        time.sleep(0.1)
    # Behind a process that ended, graphs are captured once more, and replayed from `skip` on.
    for number, (label, case) in enumerate(FAMILIES[name](Run(False))):
        if number >= skip or label.startswith("capture"):
            print(f"begin {number} {label}", flush=True)
            print(f"end {case()}", flush=True)


class Family(threading.Thread):
    """All cases of a family, past those that end its process or hang."""

    def __init__(self, name):
        super().__init__(daemon=True)
        self.name_of, self.said, self.done, self.bad, self.ended, self.end = name, [], 0, 0, 0, time.monotonic()
        self.process = None
        atexit.register(self.stop)
        self.start()

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def run(self):
        skip = 0
        while self.ended < 2:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "child", self.name_of, str(skip)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )  # fmt: skip
            lines = queue.SimpleQueue()
            threading.Thread(target=self.read, args=(self.process.stdout, lines), daemon=True).start()
            now, limit, rest = "start", 75, []
            while (line := self.next(lines, limit)) is not None:
                if line.startswith("begin"):
                    now, limit, skip = line, SECONDS, int(line.split()[1]) + 1
                elif line.startswith("end"):
                    self.done += 1
                    if line != "end ":
                        self.bad += 1
                        self.said.append(f"  WRONG {now}: {line}")
                else:
                    rest.append(line)
            self.stop()
            if self.process.wait() == 0:
                break
            self.ended += 1
            why = next((line for line in rest if "rror" in line and "CUDA" in line), rest[-1] if rest else "no word: hung")
            self.said.append(f"  ENDED in {now}: {why[:160]}")
        self.end = time.monotonic()

    @staticmethod
    def read(stream, lines):
        for line in stream:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    @staticmethod
    def next(lines, limit):
        try:
            return lines.get(timeout=limit)
        except queue.Empty:
            return None


def times(run):
    """Both loops in turn; where kernels are only listed, nothing else. int4 in groups at first, then fp6."""
    worst = {}
    for text in ("w4a16_g128", "w6e3m2a16"):
        scheme = parse_scheme(text)
        names = ("main", "new", "single") if text.startswith("w4") else ("main", "new")
        for n, k in SHAPES:
            if not run.lists:
                w = FragmentWeight.pack(rtn(gaussian(n, k, seed=1) / k**0.5, scheme))
                copies = [w, *(w.clone() for _ in range(copies_needed(w.nbytes, l2_bytes()) - 1))]
            for m in MS:
                tile = choose(GemmShape(m, n, k, scheme.weight.bits), OLDER)
                if not isinstance(tile, MmaTile):
                    continue
                if time.monotonic() - BEGAN > 104:
                    print(f"OUT OF TIME before {text} {n} x {k} M {m}", flush=True)
                    continue
                if run.lists:
                    for name in names:
                        run.call(name, scheme, tile, m, n, k)
                    continue
                x, calls = gaussian(m, k, seed=2, dtype=HALF), {}
                for name in names:
                    plan = plan_of(name, scheme, tile, m, n, k, w)
                    room = workspace(x.device, *plan.workspace)
                    calls[name] = lambda i, plan=plan, room=room, x=x, copies=copies: plan(
                        x, copies[i].codes, copies[i].scale, copies[i].channel_scale, None, *room
                    )
                us = max(w.nbytes / 4e6, 2.0 * m * n * k / 4e8) + 2
                count, memory = choice.launches(us, len(copies)), Memory()
                made = {
                    name: Graph([partial(call, i % len(copies)) for i in range(count)], memory) for name, call in calls.items()
                }
                torch.cuda.synchronize()
                found = times_in_turn([*made.values()], 7, 2)
                us_of = {name: statistics.median(t) for name, t in zip(made, found, strict=True)}
                ratio = us_of["new"] / us_of["main"]
                worst[text, n, k, m] = ratio
                line = f"T {text} {n} x {k} M {m}: " + ", ".join(f"{name} {us:.2f}" for name, us in us_of.items())
                line += f"; new / main {ratio:.3f}"
                rival = MARLIN[n, k].get(m) if text.startswith("w4") else None
                if rival:
                    share = us_of["new"] / rival
                    bar = "within" if share <= 0.87 else "MISSES"
                    line += f"; of Marlin {us_of['main'] / rival:.3f} to {share:.3f} ({bar} 0.87)"
                print(f"{line} [{tile}]", flush=True)
                del made, memory
    if worst:
        late = {key: round(r, 3) for key, r in worst.items() if r > 1.01}
        print(
            f"VERDICT times: new / main {min(worst.values()):.3f} to {max(worst.values()):.3f}; slower by more than 1 %: {late}"
        )


def main(verb="", *rest):
    if verb == "child":
        child(rest[0], int(rest[1]))
        return
    began = time.monotonic()
    torch.set_grad_enabled(False)
    READY.unlink(missing_ok=True)
    variant()
    families = [] if verb == "list" else [Family(name) for name in FAMILIES]
    run = Run(True)
    with recording() as wanted:
        for cases in FAMILIES.values():
            for _, case in cases(run):
                case()
        times(run)
    print(f"{len(wanted)} kernels", {name: sum(1 for _ in made(run)) for name, made in FAMILIES.items()}, flush=True)
    if verb == "list":
        return
    from lowbit.engine.warm_up import compiled

    for _ in compiled(wanted, 90):
        pass
    READY.touch()
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for family in families:
        family.join(timeout=max(68 - (time.monotonic() - began), 0.1))
        late = ", NOT DONE" if family.is_alive() else ""
        family.stop()
        print(
            f"VERDICT {family.name_of}: {family.done} cases, {family.bad} wrong, {family.ended} ended early{late}", flush=True
        )
        print("\n".join(family.said[:8]), flush=True)
    print(f"checked after {time.monotonic() - began:.0f} s", flush=True)
    warm_up(0.5)
    times(Run(False))
    print(f"all after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
