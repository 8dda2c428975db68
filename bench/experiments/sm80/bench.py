"""warm I N | run. In the folder with the tree; modules of variants are written by `make`."""
import json, os, statistics, sys, time, traceback, importlib
from dataclasses import replace
from pathlib import Path
CARRY = Path(__file__).resolve().parent
sys.path[:0] = [os.getcwd(), str(CARRY)]
ROOT = Path("lowbit/kernels")

BASE = (CARRY / "base_wide.py").read_text()
NEW = (ROOT / "sm80/wide_mixed_gemm.py").read_text()

def sub(text, *pairs):
    for a, b in pairs:
        assert a in text, a
        text = text.replace(a, b)
    return text

LOOPCOPY = "        copy_stage(source, iteration + AHEAD, filled, C)\n"
B_NOBAR = ("C.stages - 2), \"=r\", [])\n    barrier()", "C.stages - 2), \"=r\", [])")
B_NOCOPY = (LOOPCOPY, "        run(\"cp.async.commit_group;\\n mov.b32 $0, 0;\", \"=r\", [])\n")
B_NOX = [("next_b = read_x(x, slot * STEPS + (step + 1), C)", "next_b = b"), ("next_b = read_x(x, following * STEPS, C)", "next_b = b")]
B_NODEC = [("next_registers = decode_turn(words, ready, (step + 1) // TURN, C)", "next_registers = registers"),
           ("                words, ready = read_weights(reader, following, C)\n                next_registers = decode_turn(words, ready, 0, C)", "                next_registers = registers")]
N_COPY = ("            for i in gl.static_range(ptx(C.first_copied, position), ptx(C.first_copied, position + 1)):\n                copy_piece(source, iteration + COPIED, filled, i, C)\n", "")
N_NOBAR = B_NOBAR

def ca(c, a):
    return ("CHUNK = 32\n", f"CHUNK = {c}\n"), ("AHEAD = 4\n", f"AHEAD = {a}\n")

MODULES = {
    "base": BASE,
    "base_nobar": sub(BASE, B_NOBAR),
    "base_nocopy": sub(BASE, B_NOCOPY),
    "base_nox": sub(BASE, *B_NOX),
    "base_nodec": sub(BASE, *B_NODEC),
    "base_nox_nodec": sub(BASE, *B_NOX, *B_NODEC),
    "base_onlymma": sub(BASE, *B_NOX, *B_NODEC, B_NOCOPY, B_NOBAR),
    "new": NEW,
    "c32a2": sub(NEW, *ca(32, 2)),
    "c32a3": sub(NEW, *ca(32, 3)),
    "c16a4": sub(NEW, *ca(16, 4)),
    "c64a1": sub(NEW, *ca(64, 1)),
    "c64a2": sub(NEW, *ca(64, 2)),
    "c128a1": sub(NEW, *ca(128, 1)),
    "new_nobar": sub(NEW, N_NOBAR),
    "new_nocopy": sub(NEW, N_COPY),
}
LOOP = "    for iteration in range(begin, end):\n"
U2 = (LOOP, "    for pair in range(0, (end - begin) // 2):\n      for half in gl.static_range(2):\n        iteration = begin + 2 * pair + half\n")
MODULES["u2"] = sub(NEW, U2)  # of an even number of iterations
MODULES["u2c32a2"] = sub(NEW, U2, *ca(32, 2))
TOGETHER = ("return min(position, room) * len(self.copies) // room", "return 0 if position < 2 else len(self.copies)")
MODULES["copies1"] = sub(NEW, TOGETHER)
MODULES["copies1c32a2"] = sub(NEW, TOGETHER, *ca(32, 2))
if "EXTRA" in os.environ:
    exec(Path(os.environ["EXTRA"]).read_text())

SCALED_NEW = (ROOT / "sm80/scaled_gemm.py").read_text()
SCALED = {"sbase": (CARRY / "base_scaled.py").read_text(), "snew": SCALED_NEW}
for few, many in ((4, 2), (8, 4), (3, 6)):
    SCALED[f"s{few}_{many}"] = sub(SCALED_NEW, ("FEW, MANY = (16, 6), (64, 3)", f"FEW, MANY = (16, {few}), (64, {many})"))

def make():
    for name, text in SCALED.items():
        (ROOT / f"sm80/x_{name}.py").write_text(text)
    (ROOT / "parts/x_tile_stage.py").write_text((CARRY / "base_tile_stage.py").read_text())
    for name, text in MODULES.items():
        (ROOT / f"sm80/x_{name}.py").write_text(text)

import torch
from lowbit.kernels.choose.mixed_gemm import GemmShape, MmaTile, choose
from lowbit.hardware.machine import typical_machine

T1 = MmaTile(128, 2, 8, 1, 4, 1)
T44 = MmaTile(128, 4, 4, 2, 4, 1)
T22 = MmaTile(128, 4, 2, 2, 3, 1)
T22b = MmaTile(64, 4, 4, 1, 4, 1)
K2 = MmaTile(64, 2, 4, 1, 4, 1, warps_k=2)
BIG = (1024, 8192, 8192)
PLAN = []  # (module, tile, (m, n, k))
for name in MODULES:
    PLAN.append((name, T1, BIG))
for name in ("base", "new", "c32a2", "c128a1"):
    PLAN += [(name, T44, BIG), (name, T22, BIG), (name, T22b, BIG)]
SMALL = {
    (64, 4096, 4096): [MmaTile(64, 2, 8, 1, 6, 8), MmaTile(64, 2, 4, 2, 6, 4), MmaTile(64, 2, 4, 1, 4, 4, warps_k=2), MmaTile(64, 2, 4, 1, 4, 2, warps_k=2),
                       MmaTile(64, 2, 2, 1, 4, 2, warps_k=4), MmaTile(64, 2, 2, 1, 3, 1, warps_k=4), MmaTile(32, 2, 4, 1, 4, 2, warps_k=2), MmaTile(64, 4, 2, 1, 3, 2, warps_k=4)],
    (256, 4096, 4096): [MmaTile(128, 2, 8, 1, 4, 4), MmaTile(64, 2, 8, 1, 6, 2), MmaTile(128, 2, 4, 2, 4, 2), MmaTile(64, 2, 4, 2, 6, 1),
                        MmaTile(64, 2, 4, 1, 4, 1, warps_k=2), MmaTile(128, 2, 4, 1, 3, 2, warps_k=2), MmaTile(128, 2, 2, 1, 2, 1, warps_k=4), MmaTile(64, 4, 2, 1, 3, 1, warps_k=4)],
    (64, 28672, 4096): [MmaTile(64, 2, 8, 1, 4, 1), MmaTile(64, 2, 4, 2, 6, 1), MmaTile(64, 2, 4, 1, 4, 1, warps_k=2), MmaTile(64, 2, 8, 1, 4, 2), MmaTile(64, 2, 2, 1, 2, 1, warps_k=4)],
    (256, 8192, 8192): [MmaTile(128, 2, 8, 1, 4, 2), MmaTile(64, 2, 8, 1, 4, 1), MmaTile(128, 2, 4, 2, 4, 1), MmaTile(128, 2, 4, 1, 3, 1, warps_k=2)],
}
for shape, tiles in SMALL.items():
    for tile in tiles:
        for name in ("base", "new", "c32a2"):
            if name != "base" or tile.warps_k == 1:
                PLAN.append((name, tile, shape))
PLAN += [("base", T1, (4096, 8192, 8192)), ("new", T1, (4096, 8192, 8192))]

_module = {}
def plan_of(name, tile, shape, scheme="w4a16_g128", bits=4, dtype=torch.float16, types=(torch.float16, torch.bfloat16)):
    from lowbit.pack import weight_form
    from lowbit.formats import parse_scheme
    if name not in _module:
        _module[name] = importlib.import_module(f"lowbit.kernels.sm80.x_{name}")
    m, n, k = shape
    form = weight_form(parse_scheme(scheme), *types)
    return _module[name].MmaPlan(GemmShape(m, n, k, bits), tile, form, dtype, False)

def key(entry):
    return f"{entry[0]} {entry[1]} M{entry[2][0]}"

def weights(n, k, copies, scheme="w4a16_g128"):
    from lowbit.pack import FragmentWeight
    from lowbit.quantize import rtn
    g = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(n, k, device="cuda", generator=g, dtype=torch.float32) * 0.05
    q = rtn(w, scheme)
    packed = FragmentWeight.pack(q)
    out = [packed]
    for _ in range(copies - 1):
        out.append(replace(packed, codes=packed.codes.clone(), scale=packed.scale.clone()))
    return q, out

def graph_of(calls):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        calls[0](); s.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            keep = [c() for c in calls]
        s.synchronize()
    return g, keep

def time_graphs(graphs, rounds=5):
    """name -> (graph, launches): median us of a launch, interleaved."""
    got = {name: [] for name in graphs}
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for r in range(rounds + 1):
        for name, (g, count) in graphs.items():
            a.record(); g.replay(); b.record(); b.synchronize()
            if r:
                got[name].append(a.elapsed_time(b) * 1000 / count)
    return {name: statistics.median(v) for name, v in got.items()}

import gpu_kernels
from gpu_kernels import Rate
from lowbit.kernels.parts.launch import Launcher, recording
from lowbit.kernels.parts.compile import compile_all, compile_one

DENSE = [(128, 256, 64, 8, 3), (128, 256, 32, 8, 4), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 32, 8, 4), (128, 128, 64, 4, 3),
         (128, 128, 32, 4, 4), (128, 128, 64, 8, 4), (64, 256, 64, 4, 4), (128, 128, 32, 4, 3), (256, 64, 32, 4, 4), (128, 128, 64, 4, 4), (64, 256, 32, 4, 4), (64, 128, 64, 4, 3)]

LAUNCHERS = {}

def dense_call(cfg, x, w, y):
    bm, bn, bk, warps, stages = cfg
    m, k = x.shape
    n = w.shape[0]
    if (cfg, m) not in LAUNCHERS:
        made = Launcher(gpu_kernels.dense, (-(-m // bm) * -(-n // bn), 1, 1), warps)
        made.options |= {"num_stages": stages, "arch": "sm80"}
        LAUNCHERS[cfg, m] = made
    LAUNCHERS[cfg, m](x, w, y, m, n, k, x.stride(0), w.stride(0), bm, bn, bk, 8)
    return y

RATES = [Rate(4, 1, 2, 16, 0), Rate(8, 1, 2, 16, 0), Rate(8, 1, 4, 8, 0), Rate(16, 1, 1, 8, 0), Rate(8, 1, 2, 16, 1), Rate(4, 2, 4, 8, 1), Rate(4, 1, 2, 16, 1)]


def rate_call(c, x, y, clocks, n):
    if c not in LAUNCHERS:
        LAUNCHERS[c] = Launcher(gpu_kernels.rate, (132, 1, 1), c.warps)
    LAUNCHERS[c](x, y, clocks, n, c)

def rates():
    print("rate of mma.sync: warps x strips x eights, read: cycles per HMMA and scheduler, GHz, TFLOP/s", flush=True)
    x = torch.randn(1024, 16, device="cuda", dtype=torch.float16)
    for c in RATES:
        y = torch.empty(c.rows * c.columns, device="cuda", dtype=torch.float32)
        clocks = torch.zeros(132, device="cuda", dtype=torch.int64)
        n = 4000
        call = lambda: rate_call(c, x, y, clocks, n)
        call(); torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        best = []
        for _ in range(8):
            a.record(); call(); b.record(); b.synchronize(); best.append(a.elapsed_time(b))
        ms = statistics.median(best)
        cycles = float(clocks.double().median())
        per = n * 4 * c.strips * c.eights * c.warps / 4
        print(f"  {c.warps_n}x{c.warps_m} warps {c.strips} strips {c.eights} eights read {c.read}: {cycles / per:.2f} cycles, {cycles / ms / 1e6:.3f} GHz, {132 * 4 * per * 4096 / ms / 1e9:.0f} TFLOP/s", flush=True)

def watch_clock(label, call, seconds=0.4):
    import subprocess
    end = time.time() + seconds
    p = None
    while time.time() < end:
        for _ in range(20): call()
        if p is None and time.time() > end - seconds / 2:
            p = subprocess.Popen(["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True)
        torch.cuda.synchronize()
    while p.poll() is None:
        for _ in range(20): call()
        torch.cuda.synchronize()
    print(f"  under {label}: {p.stdout.read().strip()}", flush=True)

# ---- parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCHEMES = ["w2a16_g64", "w3a16_g128", "w4a16_pc", "w5a16_g32", "w6a16_g128", "w8a16", "w6e3m2a16", "w8e4m3a16", "w4a16_g16_z", "w4a16_g32_fz"]
RAGGED = ((77, 1000, 1096), (300, 2056, 64 * 41))

def cases():
    done = set()
    for name, tile, _ in PLAN:
        if "_no" in name or "only" in name or (name, tile) in done: continue
        done.add((name, tile))
        for shape in RAGGED[: 2 if name == "new" else 1]:
            yield name, tile, "w4a16_g128", torch.float16, shape
    for scheme in SCHEMES:
        for dtype in (torch.float16, torch.bfloat16):
            yield "new", T1, scheme, dtype, RAGGED[1]
            yield "new", K2, scheme, dtype, RAGGED[0]

def weight_of(scheme, n, k):
    from lowbit.pack import FragmentWeight
    from lowbit.quantize import rtn
    if (scheme, n, k) not in WEIGHTS:
        q = rtn(torch.randn(n, k, device=DEVICE) * 0.05, scheme)
        WEIGHTS[scheme, n, k] = q, FragmentWeight.pack(q)
    return WEIGHTS[scheme, n, k]

def call_case(case, x):
    from lowbit.ops.fragment_gemm import aligned_rows
    from lowbit.ops.workspace import workspace
    name, tile, scheme, dtype, (m, n, k) = case
    _, w = weight_of(scheme, n, k)
    types = [None if t is None else t.dtype for t in (w.scale, w.channel_scale)]
    plan = plan_of(name, tile, (m, n, k), scheme, w.scheme.weight.bits, dtype, types)
    torch.full((m, n), float("nan"), dtype=dtype, device=x.device)
    room = workspace(x.device, *plan.workspace) if DEVICE == "cuda" else (torch.empty(1), torch.empty(1, dtype=torch.int32))
    return plan(aligned_rows(x), w.codes, w.scale, w.channel_scale, None, *room)

def wanted():
    """All kernels; those measured of tensors without memory."""
    from tests.kernels.calls import mixed_call
    with recording() as listed:
        for case in cases():
            call_case(case, torch.zeros(case[4][0], case[4][2], dtype=case[3], device=DEVICE))
        for name, tile, (m, n, k) in PLAN:
            plan = plan_of(name, tile, (m, n, k))
            x, codes, scale, channel, bias, a, b = mixed_call(GemmShape(m, n, k, 4), torch.float16, 128, torch.float16)
            plan(x, codes, scale, channel.to(torch.bfloat16), None, a, b)
        meta = lambda *s, dtype=torch.float16: torch.empty(*s, dtype=dtype, device="meta")
        for cfg in DENSE:
            dense_call(cfg, meta(1024, 8192), meta(8192, 8192), meta(1024, 8192))
        LAUNCHERS.clear()
        from tests.kernels.calls import scaled_call
        for name in SCALED:
            for scheme in S_SCHEMES:
                for m, n, k in S_SHAPES[1:3]:
                    plan = scaled_plan(name, scheme, m, n, k)
                    call = list(scaled_call(scheme, m, n, k))
                    call[7] = None
                    plan(*call)
        for c in RATES:
            rate_call(c, meta(1024, 16), meta(c.rows * c.columns, dtype=torch.float32), meta(132, dtype=torch.int64), 4000)
        LAUNCHERS.clear()
    return listed

S_SHAPES = [(m, 4096, 4096) for m in (1, 16, 64, 256, 1024)]

def scaled_plan(name, scheme, m, n, k):
    from lowbit.formats import parse_scheme
    from lowbit.ops.byte_gemm import scaled_shape
    parsed = parse_scheme(scheme)
    module = importlib.import_module(f"lowbit.kernels.sm80.x_{name}")
    return module.PlainPlan(scaled_shape(parsed, m, n, k, False), parsed, torch.bfloat16, "token", False, False)

S_SCHEMES = ("w8a8", "w4a8_g128", "w8e4m3a8e4m3")

def scaled():
    """The plain kernel for activations of 8 bits, before and after."""
    from lowbit.formats import parse_scheme
    from lowbit.ops.workspace import workspace
    from lowbit.pack import OperandWeight
    from lowbit.quantize import rtn
    for scheme in S_SCHEMES:
        m, n, k = S_SHAPES[-1]
        q = rtn(torch.randn(n, k, device="cuda") * 0.05, scheme)
        w = OperandWeight.pack(q)
        copies = [replace(w, codes=w.codes.clone()) for _ in range(6)]
        from lowbit.kernels.reference.activations import CODE_DTYPES
        kind = CODE_DTYPES[parse_scheme(scheme).activation.name]
        x = torch.randint(-100, 100, (m, k), device="cuda").to(torch.int8) if kind == torch.int8 else torch.randn(m, k, device="cuda").to(kind)
        x_scale = torch.rand(m, 1, device="cuda") + 0.5
        expected = (x.double() * x_scale.double()) @ q.dequantize(torch.float32).double().T
        for m, _, _ in S_SHAPES:
            graphs = {}
            for name in SCALED:
                plan = scaled_plan(name, scheme, m, n, k)
                call = lambda w, plan=plan, m=m: plan(x[:m], x_scale[:m], None, w.codes, w.scale, w.channel_scale, w.sums, None, *workspace(x.device, 0, 0))
                y = call(w)
                e = float((y.double() - expected[:m]).norm() / expected[:m].norm())
                if not e < 4e-3: print("  WRONG", name, scheme, m, e, flush=True)
                g, keep = graph_of([lambda w=w, call=call: call(w) for w in copies])
                graphs[name] = (g, len(copies)); KEEP.append(keep)
            got = time_graphs(graphs, 5)
            print(f"  {scheme} M {m}: " + ", ".join(f"{name} {us:.1f}" for name, us in got.items()), flush=True)
            KEEP.clear()

def check():
    """Correct against float64: each variant's tile, ragged shapes; schemes and types of the new kernel."""
    from lowbit.kernels.reference.gemm import mixed_gemm_reference
    bad = count = 0
    for case in cases():
        if time.time() > CHECK_END:
            print("  out of time", flush=True); break
        name, tile, scheme, dtype, (m, n, k) = case
        q, w = weight_of(scheme, n, k)
        x = torch.randn(m, k, device=DEVICE, dtype=dtype)
        ref = mixed_gemm_reference(x, q)
        plain = torch.nn.functional.linear(x, q.dequantize(dtype))
        honest = float((plain.double() - ref).norm() / ref.norm())
        try:
            y, again = call_case(case, x), call_case(case, x)
            error, same = float((y.double() - ref).norm() / ref.norm()), torch.equal(y, again)
        except Exception as e:
            error, same = repr(e)[:200], False
        count += 1
        if not (isinstance(error, float) and error < 1.5 * honest + 1e-5 and same):
            bad += 1
            print("  WRONG", name, tile, scheme, dtype, (m, n, k), error, honest, same, flush=True)
    print(f"correctness: {count} of variants, tiles, schemes and types, {bad} wrong", flush=True)

def measure():
    from lowbit.ops.workspace import workspace
    from lowbit.ops.fragment_gemm import aligned_rows, plan_for
    from lowbit.kernels.choose.mixed_gemm import RingTile
    from lowbit.pack import weight_form
    from lowbit.formats import parse_scheme
    from lowbit.hardware.machine import machine_of
    here = machine_of("cuda")
    shapes = []
    for _, _, s in PLAN:
        if s not in shapes: shapes.append(s)
    results = {}
    for shape in shapes:
        m, n, k = shape
        copies = max(2, min(8, int(2e8 // (n * k / 2)) + 1))
        q, ws = weights(n, k, copies)
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        count = copies * max(1, (8 if m * n * k > 5e10 else 16) // copies)
        graphs = {}
        def add(label, plan):
            work = workspace(x.device, *plan.workspace)
            calls = [lambda w=ws[i % copies]: plan(x, w.codes, w.scale, w.channel_scale, None, *work) for i in range(count)]
            g, keep = graph_of(calls)
            graphs[label] = (g, count); KEEP.append(keep)
        for entry in PLAN:
            if entry[2] == shape:
                try: add(f"{entry[0]:15s} {entry[1]}", plan_of(*entry))
                except Exception as e: print("  failed", key(entry), repr(e)[:200], flush=True)
        form = weight_form(parse_scheme("w4a16_g128"), ws[0].scale.dtype, ws[0].channel_scale.dtype)
        gs = GemmShape(m, n, k, 4)
        chosen = choose(gs, here)
        add(f"{'chosen here':15s} {chosen}", plan_for(chosen, gs, form, torch.float16, False, here))
        dw = [q.dequantize(torch.float16)]
        dw += [dw[0].clone() for _ in range(max(1, int(2e8 // (n * k * 2))))]
        calls = [lambda w=dw[i % len(dw)]: torch.nn.functional.linear(x, w) for i in range(8)]
        g, keep = graph_of(calls); graphs["torch fp16"] = (g, 8); KEEP.append(keep)
        if shape[1:] == (8192, 8192):
            y = torch.empty(m, n, device="cuda", dtype=torch.float16)
            for cfg in DENSE:
                if m < cfg[0]: continue
                try:
                    dense_call(cfg, x, dw[0], y)
                    if shape == BIG:
                        ref = x[:64].double() @ dw[0].double().T
                        e = float((y[:64].double() - ref).norm() / ref.norm())
                        if e > 5e-4: print("  dense wrong", cfg, e)
                    g, keep = graph_of([lambda w=dw[i % len(dw)]: dense_call(cfg, x, w, y) for i in range(8)])
                    graphs[f"dense triton {cfg}"] = (g, 8); KEEP.append(keep)
                except Exception as e: print("  dense failed", cfg, repr(e)[:160], flush=True)
            for pad in (4, 1):
                xp = torch.zeros(m, k + pad, device="cuda", dtype=torch.float16)[:, :k]; xp.copy_(x)
                wp = torch.zeros(n, k + pad, device="cuda", dtype=torch.float16)[:, :k]; wp.copy_(dw[0])
                g, keep = graph_of([lambda: torch.nn.functional.linear(xp, wp) for i in range(4)])
                graphs[f"torch fp16, rows + {pad}"] = (g, 4); KEEP.append((keep, xp, wp))
                if shape == BIG:
                    try:
                        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                            torch.nn.functional.linear(xp, wp); torch.cuda.synchronize()
                        print("  rows +", pad, [e.key[:110] for e in prof.key_averages()][:3], flush=True)
                    except Exception as e: print("  profiler", repr(e)[:100])
        got = time_graphs(graphs, 7 if m < 4096 else 4)
        results[str(shape)] = got
        print(f"== M {m}, {n} x {k}", flush=True)
        for label, us in sorted(got.items(), key=lambda p: p[1]):
            print(f"  {us:8.2f} us {2 * m * n * k / us / 1e6:5.0f}  {label}", flush=True)
        if shape == BIG:
            for label in list(graphs)[:1] + ["torch fp16"] + [l for l in graphs if l.startswith("new ")][:1]:
                try: watch_clock(label[:30], graphs[label][0].replay)
                except Exception as e: print("  clock", repr(e)[:100])
        KEEP.clear(); graphs.clear(); del ws, q, dw, x
        torch.cuda.empty_cache()
        if OUT: Path(OUT, "results.json").write_text(json.dumps(results))

def part(function):
    try:
        function()
    except Exception:
        traceback.print_exc()
        print(f"{function.__name__} failed, see err", flush=True)

def chain():
    """Four layers of Llama-3-8B's shape by the kernels of a GPU without wgmma: eight launches a layer and five."""
    from lowbit.bench.e2e import engine_for
    from lowbit.bench.language_model import random_model
    from lowbit.bench.step import Trial
    from lowbit.engine.warm_up import compiled
    from lowbit.hardware.arch import arch_for
    from lowbit.hardware.machine import machine_of
    older = replace(machine_of("cuda"), product="H200 by the kernels of an A100", arch=arch_for(80))
    for name in ("fragment_gemm", "gated_gemm", "chained_gemm", "attention"):
        importlib.import_module(f"lowbit.ops.{name}").machine_of = lambda device: older
    importlib.import_module("lowbit.engine.chain").features_of = lambda device: older.arch.features
    model = random_model("Llama-3-8B", "w4a16_g128", "w8a16", torch.float16, torch.device("cuda"), 4)
    engine = engine_for(model, [(rows, 1024 + 256) for rows in (16, 32, 64)])
    for rows in (16, 32, 64):
        trial, said = Trial(engine, rows, 1024), []
        for most in (8, 64):
            engine.program.chain.most = most
            with torch.inference_mode(), recording() as listed:
                trial.run()
            for _ in compiled(listed, 90): pass
            trial.measure({}, [])
            us, logits = trial.measure({}, [])
            said.append((us, logits))
        error = float((said[0][1] - said[1][1]).norm() / said[0][1].norm())
        print(f"  step of {rows} rows: eight launches {said[0][0]:.1f} us, five {said[1][0]:.1f}, logits apart by {error:.2g}", flush=True)

KEEP, WEIGHTS = [], {}
OUT = os.environ.get("OUT", "")
if __name__ == "__main__":
    what = sys.argv[1]
    if what == "make":
        make()
    elif what == "compile":  # here, without a GPU
        from lowbit.kernels.parts.gluon import without_gpu
        without_gpu(90)
        some = wanted()
        print(len(some), "kernels")
        pick = sys.argv[2:]
        for each in some:
            label = str(each.module) + " " + str([a for a in each.arguments if hasattr(a, "warps")])[:200]
            if pick and not any(p in label for p in pick): continue
            t = time.time()
            try:
                made = compile_one(each)
                print(f"{time.time() - t:.1f} s", made.n_regs if False else "", label[:150], flush=True)
            except Exception as e:
                print("FAILED", label, repr(e)[-300:], flush=True)
    elif what == "run":
        CHECK_END = time.time() + 100
        torch.set_grad_enabled(False)
        t = time.time(); some = wanted()
        for done in compile_all(some, 90): pass
        print(f"{done} kernels compiled, {time.time() - t:.0f} s", flush=True)
        t = time.time(); check(); print(f"{time.time() - t:.0f} s", flush=True)
        end = time.time() + 60
        while OUT and not Path(OUT, "tests_done").exists() and time.time() < end: time.sleep(0.5)
        print(f"waited for tests {60 - end + time.time():.0f} s", flush=True)
        t = time.time(); part(rates); print(f"{time.time() - t:.0f} s", flush=True)
        t = time.time(); part(measure); print(f"{time.time() - t:.0f} s", flush=True)
        t = time.time(); part(scaled); print(f"{time.time() - t:.0f} s", flush=True)
        t = time.time(); part(chain); print(f"{time.time() - t:.0f} s", flush=True)
