"""Shares of the last wave (stream-K) on an H200: right, and how long beside the tiles without. `run.py list` needs no GPU.

Cases, then times, each in a process of its own, which is ended if one of its lines takes more than ten seconds.
"""

import contextlib
import io
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial

import torch

from lowbit.bench.choice import TILES, launches
from lowbit.bench.protocol import Graph, Memory, copies_needed, gaussian, l2_bytes, times_in_turn, warm_up
from lowbit.engine.warm_up import compiled
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.kept import written
from lowbit.kernels.choose.mixed_gemm import GemmShape, WgmmaTile, candidates
from lowbit.kernels.parts.launch import recording
from lowbit.ops.fragment_gemm import plan_for
from lowbit.pack import FragmentWeight, weight_form
from lowbit.quantize import rtn

H200, HALF, BF16, LISTS = typical_machine(90), torch.float16, torch.bfloat16, "list" in sys.argv
ASKED = [(5120, 13824), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
TOKENS = (256, 1024, 2048, 4096, 8192)
TIMED = [
    *(("w4a16_g128", HALF, n, k, TOKENS) for n, k in ASKED),
    # products of the kept results where shares are chosen by the costs
    ("w4a16_g128", HALF, 10240, 8192, (128, 256)), ("w4a16_g128", HALF, 55296, 5120, (128, 1024)),
    *((scheme, dtype, n, k, TOKENS) for scheme, dtype in (("w6e3m2a16", HALF), ("w4a16_g128", BF16)) for n, k in ASKED),
]  # fmt: skip
CASES = [  # tiles left over before, within and after whole waves; a last tile of tokens, and an iteration, that are not full
    (scheme, dtype, m, n, k)
    for scheme, dtype in (("w4a16_g128", HALF), ("w4a16_g128_z", BF16), ("w6e3m2a16", HALF), ("w8a16", BF16))
    for m, n, k in ((256, 3080, 2048), (700, 5120, 1000), (1024, 5120, 2048), (517, 6144, 1024), (1280, 4616, 640))
]


def weight(scheme, n, k):
    """The reference and the packed weight; of a list a small one."""
    q = rtn(torch.ones(16, 128) if LISTS else gaussian(n, k, seed=1) / k**0.5, parse_scheme(scheme))
    return q, FragmentWeight.pack(q)


def call_of(scheme, dtype, tile, m, n, k, w):
    """A function of a weight, and the workspace."""
    form = weight_form(parse_scheme(scheme), *(None if t is None else t.dtype for t in (w.scale, w.channel_scale)))
    plan = plan_for(tile, GemmShape(m, n, k, parse_scheme(scheme).weight.bits), form, dtype, False, H200)
    sums, counters = (1, 1) if LISTS else (max(1, each) for each in plan.workspace)
    on = w.codes.device
    room = torch.full((sums,), float("nan"), device=on), torch.zeros(counters, dtype=torch.int32, device=on)
    return lambda x, w: plan(x, w.codes, w.scale, w.channel_scale, None, *room), room


def given(m, k, dtype):
    return torch.empty(m, k, dtype=dtype) if LISTS else gaussian(m, k, seed=2, dtype=dtype)


def able(scheme, m, n, k):
    """Tiles in the choice's order: without shares, with."""
    shape = GemmShape(m, n, k, parse_scheme(scheme).weight.bits)
    tiles = [row.tile for row in candidates(shape, H200) if not row.reasons]
    shared = [tile for tile in tiles if isinstance(tile, WgmmaTile) and tile.splits == 0]
    return [tile for tile in tiles if tile not in shared], shared, tiles[0] in shared


def cases():
    bad = done = 0
    for scheme, dtype, m, n, k in CASES:
        q, w = weight(scheme, n, k)
        x = given(m, k, dtype)
        for tile in able(scheme, m, n, k)[1]:
            call, room = call_of(scheme, dtype, tile, m, n, k, w)
            print(f"case {scheme} {dtype} {n} x {k} M {m} {tile}", flush=True)
            y = call(x, w)
            if LISTS:
                continue
            torch.cuda.synchronize()
            reference = x.double() @ q.dequantize(torch.float32).double().T
            error = ((y.double() - reference).norm(dim=1) / reference.norm(dim=1)).max().item()
            same, zero = all(torch.equal(call(x, w), y) for _ in range(5)), not room[1].any().item()
            right = error < (1e-3 if dtype == HALF else 4e-3) and same and zero
            done, bad = done + 1, bad + (not right)
            if not right:
                print(f"V WRONG {tile} M {m} {n} x {k}: error {error:.3g}, same bits {same}, counters zero {zero}", flush=True)
    print(f"V cases: {done}, wrong {bad}", flush=True)


def times():
    if not LISTS:
        warm_up(0.5)
    extra = {128: [], 256: []}
    for scheme, dtype, n, k, tokens in TIMED:
        _, first = weight(scheme, n, k)
        weights = [first]
        if not LISTS:
            weights += [first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1)]
            memory = Memory()
        for m in tokens:
            plain, shared, chosen = able(scheme, m, n, k)
            whole = [t for t in plain if isinstance(t, WgmmaTile) and t.splits == 1 and t.tokens >= 128]
            tiles, x, graphs = list(dict.fromkeys([*plain[:2], *whole, *shared])), given(m, k, dtype), {}
            us = 1e6 * max(first.nbytes / 4e12, 2.0 * m * n * k / 6e14) + 2
            for tile in tiles:
                call, _room = call_of(scheme, dtype, tile, m, n, k, first)
                if LISTS:
                    call(x, first)
                    continue
                print(f"case times {scheme} {dtype} {n} x {k} M {m} {tile}", flush=True)
                calls = [partial(call, x, weights[i % len(weights)]) for i in range(launches(us, len(weights)))]
                graphs[tile] = Graph(calls, memory)
            if LISTS or not shared:
                continue
            found = times_in_turn([*graphs.values()], 9, 2)
            found = {tile: statistics.median(each) for tile, each in zip(graphs, found, strict=True)}
            old = min(found[tile] for tile in plain[:2])
            new = min(found[tile] for tile in shared)
            row = ", ".join(f"[{written(tile, TILES)}] {us:.2f}" for tile, us in found.items())
            verdict = "GAIN" if new < 0.99 * old else "LOSS" if new > 1.01 * old else "even"
            wrong = " CHOSEN WRONGLY" if chosen and new > 1.01 * old else ""
            wrong = " NOT CHOSEN" if not chosen and new < 0.97 * old else wrong
            kind = str(dtype).removeprefix("torch.")
            print(f"V {scheme} {kind} {n}x{k} M {m}: shared/old {new / old:.3f} {verdict}{wrong} | {row}", flush=True)
            for tile in shared:
                same = [t for t in whole if t.tokens == tile.tokens]
                if same:
                    count = -(-m // tile.tokens) * -(-n // tile.rows)
                    ideal = 1.15 + (found[same[0]] - 1.15) * count / 132 / -(-count // 132)
                    extra[tile.tokens].append(found[tile] - ideal)
    for size, each in extra.items():
        if each:
            a, b, c = statistics.quantiles(each, n=4)
            print(f"V meeting, {size} tokens: {b:.1f} us, quarters {a:.1f} {c:.1f}; a KiB {2 * b / size:.3f}", flush=True)


def watched(name):
    """A part in a process of its own; its lines that begin with V are printed, and what it was at where it hangs or fails."""
    process = subprocess.Popen(
        [sys.executable, __file__, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines, began, now, rest, limit = queue.SimpleQueue(), time.monotonic(), "start", [], 40

    def read():
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            print(f"V HANGS in {now}", flush=True)
            os.killpg(process.pid, signal.SIGKILL)
            break
        if line is None:
            break
        if line.startswith("V "):
            print(line[2:], flush=True)
        elif line.startswith("case "):
            now, limit = line, 10
        else:
            rest.append(line)
    if process.wait():
        print(f"{name} ended with {process.returncode} in {now}\n" + "\n".join(rest[-8:]), flush=True)
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return process.returncode == 0


def main():
    began = time.monotonic()
    global LISTS
    LISTS = True
    with recording() as wanted, contextlib.redirect_stdout(io.StringIO()):
        for part in (cases, times):
            part()
    print(f"{len(wanted)} kernels, {len(CASES)} problems of cases, {sum(len(each[-1]) for each in TIMED)} of times", flush=True)
    if "list" in sys.argv:
        return
    for _ in compiled(wanted, 90):
        pass
    print(f"compiled, {time.monotonic() - began:.0f} s", flush=True)
    if watched("cases"):
        watched("times")


if sys.argv[1:] in (["cases"], ["times"]):
    torch.manual_seed(0)
    {"cases": cases, "times": times}[sys.argv[1]]()
else:
    main()
