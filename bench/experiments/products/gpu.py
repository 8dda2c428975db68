"""First call: correctness of pieces of x, equal shares of K, sections; then times. `python gpu.py [dry]`."""
import os, sys, time, json, itertools, statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
import torch
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from lowbit.bench import choice
from lowbit.bench.protocol import Graph, Memory, gaussian, copies_needed, l2_bytes, warm_up
from lowbit.bench.quantized_x import Codes, quantized_x
from lowbit.engine.warm_up import compiled
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.mixed_gemm import GemmShape, WgmmaTile, choose, invariant_tiles, wgmma_candidate, wgmma_tiles
from lowbit.kernels.choose.scaled_gemm import candidates_scaled, choose_scaled
from lowbit.kernels.parts.launch import recording
import lowbit.kernels.sm90.mixed_gemm as mixed
from lowbit.ops.byte_gemm import plan_for_scaled
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.table import scaled_shape
from lowbit.pack import FragmentWeight, OperandWeight, weight_form
from lowbit.quantize import rtn
from asked import ASKED

DRY = "dry" in sys.argv
DEV = "cpu" if DRY else "cuda"
M9 = typical_machine(90)
torch.manual_seed(0)
OUT = Path(os.environ.get("OUT", "/tmp"))
t_start = time.time()
def say(*a): print(f"[{time.time()-t_start:6.1f}]", *a, flush=True)

RECORD = [False]
bad = []
small_cache = {}
def weight(scheme, n, k):
    key = (str(scheme), n, k)
    if key not in small_cache:
        if DRY or RECORD[0]:
            q = rtn(torch.ones(16, 128), scheme)   # recorded only
            small_cache_dry[key] = q
            return q
        small_cache[key] = rtn(torch.randn(n, k, device=DEV) * 0.02, scheme)
    return small_cache[key]
small_cache_dry = {}

def nan_like(shape, dtype):
    t = torch.full(shape, float("nan"), dtype=dtype, device=DEV); del t

poison_plan = {}
def poison_smem(dtype):
    """Leaves NaN in the shared memory of all SMs: a product with x of NaN."""
    if dtype not in poison_plan:
        q = rtn(torch.randn(128 * 132, 256, device=DEV), parse_scheme("w4a16_g128"))
        w = FragmentWeight.pack(q)
        form = weight_form(q.scheme, w.scale.dtype, None if w.channel_scale is None else w.channel_scale.dtype)
        shape = GemmShape(256, 128 * 132, 256, 4)
        plan = plan_for(WgmmaTile(256, 2, 4, 1, 2), shape, form, dtype, False, M9)
        x = torch.full((256, 256), float("nan"), dtype=dtype, device=DEV)
        poison_plan[dtype] = lambda: plan(x, w.codes, w.scale, w.channel_scale, None, torch.empty(1, device=DEV), torch.zeros(1, dtype=torch.int32, device=DEV))
    poison_plan[dtype]()

def guarded(f):
    def g(*a, **k):
        try: f(*a, **k)
        except Exception as e:
            if RECORD[0]: raise
            bad.append(("error", str(a[:5]), type(e).__name__, str(e)[-300:]))
    return g

@guarded
def mixed_case(scheme, tile, m, n, k, dtype=torch.float16, repeat=1):
    scheme = parse_scheme(scheme)
    q = weight(scheme, n, k); w = FragmentWeight.pack(q)
    form = weight_form(scheme, None if w.scale is None else w.scale.dtype, None if w.channel_scale is None else w.channel_scale.dtype)
    shape = GemmShape(m, n, k, scheme.weight.bits)
    plan = plan_for(tile, shape, form, dtype, False, M9)
    x = torch.randn(m, k, device=DEV).to(dtype) if not RECORD[0] else torch.empty(m, k, dtype=dtype)
    sums, counters = plan.workspace
    room = torch.full((max(1, sums),), float("nan"), device=DEV) if not RECORD[0] else torch.empty(1), torch.zeros(max(1, counters), dtype=torch.int32, device=DEV)
    def once():
        if not RECORD[0]:
            poison_smem(dtype); nan_like((m, n), dtype)
        return plan(x, w.codes, w.scale, w.channel_scale, None, *room)
    y = once()
    if RECORD[0]: return
    ref = x.double() @ q.dequantize(torch.float32).double().T
    err = ((y.double() - ref).norm(dim=1) / ref.norm(dim=1)).max().item()
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3
    same = all(torch.equal(once(), y) for _ in range(repeat))
    if not (err < limit) or not same or room[1].any().item():
        bad.append((str(scheme), str(tile), m, n, k, str(dtype), err, same, bool(room[1].any())))

@guarded
def scaled_case(scheme, tile, m, n, k, repeat=1):
    scheme = parse_scheme(scheme)
    q = weight(scheme, n, k); w = OperandWeight.pack(q)
    shape = scaled_shape(scheme, m, n, k)
    plan = plan_for_scaled(tile, shape, scheme, torch.float16, "token", False, False, M9)
    if RECORD[0]:
        xq = choice._blank(choice.products_of(str(scheme), M9), m, k)
    else:
        xq = quantized_x(torch.randn(m, k, device=DEV).half(), scheme)
    sums, counters = plan.workspace
    room = torch.full((max(1, sums),), float("nan"), device=DEV) if not RECORD[0] else torch.empty(1), torch.zeros(max(1, counters), dtype=torch.int32, device=DEV)
    def once():
        if not RECORD[0]: poison_smem(torch.float16); nan_like((m, n), torch.float16)
        return plan(xq.codes, xq.scale, None, w.codes, w.scale, w.channel_scale, w.sums, None, *room)
    y = once()
    if RECORD[0]: return
    ref = (xq.codes.float() * xq.scale).double() @ q.dequantize(torch.float32).double().T
    err = ((y.double() - ref).norm(dim=1) / ref.norm(dim=1)).max().item()
    same = all(torch.equal(once(), y) for _ in range(repeat))
    if not (err < 2e-3) or not same or room[1].any().item():
        bad.append((str(scheme), str(tile), m, n, k, err, same, bool(room[1].any())))

def cases():
    count = 0
    H = torch.float16
    base = {(t.tokens, t.warpgroups): t for t in wgmma_tiles(GemmShape(64, 4096, 4096, 4), in_chain=True) if t.splits == 1}
    for (tokens, wg), t in base.items():
        for m in sorted({1, max(1, tokens // 2 - 3), tokens - tokens // 4, tokens - 1}):
            mixed_case("w4a16_g128", t, m, 1544, 1160 // 128 * 128, H); count += 1
        s = replace(t, stream_k=True)
        for m, n, k in ((tokens, 3080, 2048), (2 * tokens + 5, 6144, 1024), (tokens - 3, 4096, 2048), (5 * tokens, 4616, 640), (700, 5120, 512)):
            shape = GemmShape(m, n, k, 4)
            if not wgmma_candidate(s, shape, M9).reasons:
                mixed_case("w4a16_g128", s, m, n, k, H, repeat=8); count += 1
        if tokens * wg <= 256:
            mixed_case("w4a16_g128", replace(t, sections=4), 2 * tokens + 7, 1544, 2048, H); count += 1
    for scheme, dtype in (("w6e3m2a16", H), ("w8a16", torch.bfloat16), ("w3a16_g64", H), ("w4a16_g128_z", torch.bfloat16), ("w5a16_g32", torch.bfloat16)):
        bits = parse_scheme(scheme).weight.bits
        tiles = {(t.tokens, t.warpgroups): t for t in wgmma_tiles(GemmShape(64, 4096, 4096, bits), in_chain=True) if t.splits == 1 and t.stages >= 2}
        for key in ((256, 2), (128, 2), (64, 4), (16, 2)):
            if key in tiles:
                mixed_case(scheme, tiles[key], max(1, key[0] - key[0] // 4 - 1), 1544, 1024, dtype); count += 1
                if key[0] >= 64:
                    mixed_case(scheme, replace(tiles[key], stream_k=True), 3 * key[0] + 1, 4616, 1024, dtype, repeat=3); count += 1
    for scheme in ("w8e4m3a8e4m3", "w8a8", "w4a8_g128", "w4a8e4m3"):
        seen = set()
        for m in (5, 100, 200, 700):
            for row in candidates_scaled(scaled_shape(parse_scheme(scheme), m, 4616, 2048), M9):
                t = row.tile
                key = (t.tokens_are_rows, t.warpgroups, t.columns, t.stream_k, t.pair, m < t.tokens)
                if row.reasons or key in seen or (t.splits > 1 and not t.pair) or (t.columns, t.warpgroups) not in ((8, 1), (64, 1), (64, 2), (128, 2), (256, 2)): continue
                if not t.stream_k and m >= t.tokens: continue
                seen.add(key)
                scaled_case(scheme, t, m, 4616, 2048, repeat=3 if t.stream_k else 1); count += 1
    return count

INVARIANT = [("w4a16_g128", 4096, 4096), ("w6e3m2a16", 1536, 4096)]
def invariants():
    for scheme, n, k in INVARIANT:
        parsed = parse_scheme(scheme); q = weight(parsed, n, k); w = FragmentWeight.pack(q)
        form = weight_form(parsed, None if w.scale is None else w.scale.dtype, None if w.channel_scale is None else w.channel_scale.dtype)
        full = None
        shape = GemmShape(1, n, k, parsed.weight.bits)
        x = torch.randn(1500, k, device=DEV).half() if not RECORD[0] else torch.empty(1500, k, dtype=torch.float16)
        for m in (1500, 1, 3, 16, 17, 48, 64, 100, 128, 200, 256, 300, 700):
            tiles = [choose(GemmShape(m, n, k, parsed.weight.bits), M9, True)] if m not in (17, 300) else [t for t in invariant_tiles(GemmShape(m, n, k, parsed.weight.bits), M9) if t.stages >= 2]
            for tile in tiles:
                plan = plan_for(tile, GemmShape(m, n, k, parsed.weight.bits), form, torch.float16, False, M9)
                s, c = plan.workspace
                room = (torch.full((max(1, s),), float("nan"), device=DEV), torch.zeros(max(1, c), dtype=torch.int32, device=DEV)) if not RECORD[0] else (torch.empty(1), torch.zeros(1, dtype=torch.int32))
                y = plan(x[:m], w.codes, w.scale, w.channel_scale, None, *room)
                if RECORD[0]: continue
                if full is None:
                    full = y
                    ref = x.double() @ q.dequantize(torch.float32).double().T
                    err = ((y.double() - ref).norm() / ref.norm()).item()
                    if not err < 1e-3: bad.append(("invariant", scheme, str(tile), err))
                if not torch.equal(y, full[:m]): bad.append(("invariant", scheme, m, str(tile), (y.double() - full[:m].double()).abs().max().item()))

def ordered():
    """Products with order and factors inside, bit for bit those of x brought into order before; and their times."""
    from lowbit.ops.fragment_gemm import _gathered, aligned_rows
    for scheme, n, k, dtype in (("w4a16_g128", 4096, 4096, torch.float16), ("w4a16_g128", 1544, 14336, torch.float16), ("w3a16_g128", 4096, 1032 // 128 * 128, torch.bfloat16), ("w4a16_g128_z", 2048, 2176, torch.bfloat16)):
        parsed = parse_scheme(scheme); q = weight(parsed, n, k); w = FragmentWeight.pack(q)
        form = weight_form(parsed, None if w.scale is None else w.scale.dtype, None if w.channel_scale is None else w.channel_scale.dtype)
        order = torch.randperm(k, device=DEV).int() if not RECORD[0] else torch.empty(k, dtype=torch.int32)
        factor = (torch.rand(k, device=DEV) + 0.5) if not RECORD[0] else torch.empty(k)
        for m in (1, 2, 3, 4):
            x = torch.randn(m, k, device=DEV).to(dtype) if not RECORD[0] else torch.empty(m, k, dtype=dtype)
            shape = GemmShape(m, n, k, parsed.weight.bits)
            room = (torch.empty(1, device=DEV), torch.zeros(1, dtype=torch.int32, device=DEV)) if not RECORD[0] else (torch.empty(1), torch.zeros(1, dtype=torch.int32))
            for of_x in ((True, False), (True, True), (False, True)):
                inside = plan_for(choose(shape, M9), shape, form, dtype, False, M9, of_x)
                plain = plan_for(choose(shape, M9), shape, form, dtype, False, M9)
                given = (order if of_x[0] else None, factor if of_x[1] else None)
                if not inside.gathers:
                    if not RECORD[0] and 2 * m * k <= 65536 and m != 3: bad.append(("not inside", scheme, n, k, m))
                    continue
                if not RECORD[0]: poison_smem(torch.float16); nan_like((m, n), dtype)
                y = inside(x, w.codes, w.scale, w.channel_scale, None, *room, *given)
                z = plain(x if RECORD[0] else _gathered(x, *given), w.codes, w.scale, w.channel_scale, None, *room)
                if not RECORD[0] and not torch.equal(y, z): bad.append(("ordered", scheme, n, k, m, of_x, (y.float() - z.float()).abs().max().item(), z.float().abs().max().item()))

def ordered_times():
    from lowbit.ops.fragment_gemm import _gathered
    for n, k in ((4096, 4096), (6144, 4096), (4096, 14336), (8192, 8192), (28672, 4096)):
        of = choice.products_of("w4a16_g128", M9); scheme = of.scheme
        if RECORD[0]: weights = [of.pack(rtn(torch.ones(16, 128), scheme))]
        else:
            q = weight(scheme, n, k); first = of.pack(q); weights = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
            order = torch.randperm(k, device=DEV).int(); factor = torch.rand(k, device=DEV) + 0.5; memory = Memory()
        w = weights[0]; form = weight_form(scheme, w.scale.dtype, None if w.channel_scale is None else w.channel_scale.dtype)
        for m in (1, 2, 4):
            shape = GemmShape(m, n, k, 4); tile = choose(shape, M9)
            plain, inside = (plan_for(tile, shape, form, torch.float16, False, M9, of_x) for of_x in ((False, False), (True, True)))
            only = plan_for(tile, shape, form, torch.float16, False, M9, (True, False))
            if RECORD[0]:
                x = torch.empty(m, k, dtype=torch.float16); room = torch.empty(1), torch.zeros(1, dtype=torch.int32)
                for plan, more in ((plain, ()), (inside, (torch.empty(k, dtype=torch.int32), torch.empty(k))), (only, (torch.empty(k, dtype=torch.int32), None))):
                    plan(x, w.codes, w.scale, w.channel_scale, None, *room, *(more if plan.gathers else ()))
                continue
            x = gaussian(m, k, seed=2, dtype=torch.float16); room = torch.empty(1, device=DEV), torch.zeros(1, dtype=torch.int32, device=DEV)
            def call(plan, w, how, more=()):
                return plan(_gathered(x, order, None) if how else x, w.codes, w.scale, w.channel_scale, None, *room, *more)
            count = choice.launches(6 + n * k / 2 / 4e6, len(weights))
            graphs = [Graph([partial(call, plan, weights[i % len(weights)], how, more) for i in range(count)], memory)
                      for plan, how, more in ((plain, False, ()), (plain, True, ()), (only, False, (order, None)), (inside, False, (order, factor)))]
            us = [[], [], [], []]
            for _ in range(7):
                for i, g in enumerate(graphs): us[i].append(statistics.median(g.times_us(3, warm=1)))
            print(f"order {n}x{k} M {m}: plain {statistics.median(us[0]):.2f}, gather first {statistics.median(us[1]):.2f}, order inside {statistics.median(us[2]):.2f}, and factors {statistics.median(us[3]):.2f}", flush=True)

# ---- times

def time_tiles(scheme, n, k, rows):
    """us of (label, m, tile, whole) for one weight; `whole`: x in one copy."""
    of = choice.products_of(scheme, M9)
    if RECORD[0]:
        w = of.pack(rtn(torch.ones(16, 128), of.scheme)); weights = [w]
    else:
        q = weight(of.scheme, n, k); first = of.pack(q)
        weights = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
        memory = Memory()
    graphs = []
    for label, m, tile, whole in rows:
        keep = mixed.pieces_of_x
        if whole: mixed.pieces_of_x = lambda m, tokens: 1
        plan = of.plan(tile, m, n, k, weights[0])
        mixed.pieces_of_x = keep
        x = torch.empty(m, k, dtype=torch.float16) if RECORD[0] else gaussian(m, k, seed=2, dtype=torch.float16)
        s, c = plan.workspace
        room = (torch.empty(1), torch.zeros(1, dtype=torch.int32)) if RECORD[0] else (torch.empty(max(1, s), device=DEV), torch.zeros(max(1, c), dtype=torch.int32, device=DEV))
        if RECORD[0]:
            of.multiply(plan, x, weights[0], room); continue
        us = 1e6 * max(weights[0].nbytes / 4e12, 2.0 * m * n * k / 6e14)
        calls = [partial(of.multiply, plan, x, weights[i % len(weights)], room) for i in range(choice.launches(us, len(weights)))]
        graphs.append((label, m, tile, Graph(calls, memory)))
    if RECORD[0]: return
    for label, m, tile, graph in graphs:
        print(f"{scheme} {n}x{k} M {m} {label}: {statistics.median(graph.times_us(9, warm=2)):.2f} us  [{choice.written(tile)}]", flush=True)

def times():
    T = WgmmaTile
    for n, k in ((28672, 4096), (5120, 13824)):
        rows = []
        for m, tile in ((96, T(128, 2, 8, 1, 2)), (128, T(128, 2, 8, 1, 2)), (100, T(128, 2, 8, 1, 2)), (192, T(256, 2, 4, 1, 2)), (256, T(256, 2, 4, 1, 2)), (24, T(32, 4, 8, 1, 2)), (32, T(32, 4, 8, 1, 2)), (48, T(64, 4, 8, 1, 2)), (64, T(64, 4, 8, 1, 2)), (8, T(16, 4, 8, 1, 2)), (16, T(16, 4, 8, 1, 2))):
            rows.append(("pieces", m, tile, False))
            if m < tile.tokens: rows.append(("one copy", m, tile, True))
        time_tiles("w4a16_g128", n, k, rows)
    for n, k in ((4096, 4096), (6144, 4096), (8192, 28672), (28672, 8192)):
        rows = []
        for m in (1, 16, 32, 64, 256, 1024, 4096):
            shape = GemmShape(m, n, k, 4)
            rows += [("default", m, choose(shape, M9), False), ("invariant", m, choose(shape, M9, True), False)]
        time_tiles("w4a16_g128", n, k, rows)

def main():
    RECORD[0] = True
    wanted = []
    with recording() as found:
        global small_cache
        n = cases(); invariants(); ordered(); times(); ordered_times()
    small_cache.clear()
    wanted += found
    mine = len(wanted)
    wanted += [w for w in choice.kernels(ASKED, M9) if w not in wanted]
    say(f"{n} cases, {mine} + {len(wanted) - mine} kernels")
    if "compile" in sys.argv:
        from lowbit.kernels.parts.gluon import without_gpu
        from lowbit.kernels.parts.compile import compile_one
        without_gpu(90)
        for i, w in enumerate(wanted[:mine]):
            try: k = compile_one(w)
            except Exception as e: print("ERROR", i, w.name, w.arguments[-1], type(e), str(e)[-500:], flush=True); continue
            if i % 20 == 0: say(i)
        say("all compiled"); return
    if DRY: return
    RECORD[0] = False
    # what poisons
    t = time.time()
    try:
        for _ in compiled(wanted, 90): pass
    except Exception as e: say("compiling:", type(e), str(e)[-400:])
    say(f"compiled {len(wanted)} kernels in {time.time() - t:.1f} s on {os.cpu_count()} cores")
    n = cases(); torch.cuda.synchronize()
    say(f"correctness: {n} cases, {len(bad)} bad"); [print("BAD", b) for b in bad[:25]]; k = len(bad)
    invariants(); torch.cuda.synchronize()
    say(f"invariants: {len(bad) - k} bad"); [print("BAD", b) for b in bad[k:k + 15]]
    k = len(bad); ordered(); torch.cuda.synchronize()
    say(f"ordered: {len(bad) - k} bad"); [print("BAD", b) for b in bad[k:k + 10]]
    small_cache.clear(); torch.cuda.empty_cache()
    open("/tmp/prod_ready","w").close()
    if len(bad) > 60: return
    open("/tmp/prod_ready","w").close()
    while not os.path.exists("/tmp/prod_go"): time.sleep(0.2)
    say("go"); warm_up()
    times(); ordered_times(); say("times done")
    small_cache.clear(); torch.cuda.empty_cache()
    path, document = choice.run(ASKED, OUT / "prod-choice.json", say, lambda *a: None)
    say("choice done", len(document["rows"]))
    from lowbit.bench import choice_report as r
    rows = document["rows"]
    for half in ("tuned", "untuned"): print(half, r.summary([x for x in rows if x["half"] == half]))
    for ratio, row, more in r.falls(rows): print(f"fall {ratio:.3f} {row['scheme']} {row['n']}x{row['k']} M {row['m']} {row['chosen']} vs M {more['m']} {more['chosen']}")
    fails = {}
    for row in rows:
        for tile, why in row["failed"].items(): fails.setdefault((tile, why[:80]), []).append((row["scheme"], row["n"], row["k"], row["m"]))
    for key, of in list(fails.items())[:10]: print("failed", key, of[:3], len(of))
main()
