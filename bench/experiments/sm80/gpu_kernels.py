"""Dense products by mma.sync, and its rate."""
from __future__ import annotations
from dataclasses import dataclass
import triton, triton.language as tl
@triton.jit
def dense(x, w, y, M, N, K, sx, sw, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr):
    pid = tl.program_id(0)
    tm, tn = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (G * tn)
    first = group * G
    size = tl.minimum(tm - first, G)
    pm = first + (pid % (G * tn)) % size
    pn = (pid % (G * tn)) // size
    om = pm * BM + tl.arange(0, BM)
    on = pn * BN + tl.arange(0, BN)
    ok = tl.arange(0, BK)
    px = x + om[:, None] * sx + ok[None, :]
    pw = w + on[None, :] * sw + ok[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        acc = tl.dot(tl.load(px), tl.load(pw), acc)
        px += BK
        pw += BK
    tl.store(y + om[:, None] * N + on[None, :], acc.to(tl.float16))

# ---- the rate of mma.sync

from lowbit.kernels.parts.gluon import gl, gluon, mma_v2, asm
@dataclass(frozen=True)
class Rate:
    warps_n: int
    warps_m: int
    strips: int
    eights: int  # of a warp
    read: int  # read b from shared memory at every step

    @property
    def warps(self): return self.warps_n * self.warps_m
    @property
    def rows(self): return 16 * self.strips * self.warps_n
    @property
    def columns(self): return 8 * self.eights * self.warps_m
    @property
    def acc(self): return gl.NVMMADistributedLayout([2, 0], [self.warps_n, self.warps_m], [16, 8])
    @property
    def a(self): return gl.DotOperandLayout(0, self.acc, 2)
    @property
    def b(self): return gl.DotOperandLayout(1, self.acc, 2)
    @property
    def copy(self): return gl.BlockedLayout([1, 8], [16, 2], [self.warps, 1], [1, 0])
    @property
    def shared(self): return gl.SwizzledSharedLayout(8, 4, 2, [1, 0])

@gluon.jit
def rate(x, y, clocks, n, C: gl.constexpr):
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    LA: gl.constexpr = C.a
    LB: gl.constexpr = C.b
    ra = gl.arange(0, ROWS, gl.SliceLayout(1, LA))
    ka = gl.arange(0, 16, gl.SliceLayout(0, LA))
    a = gl.load(x + ra[:, None] * 16 + ka[None, :])
    cb = gl.arange(0, COLUMNS, gl.SliceLayout(0, LB))
    kb = gl.arange(0, 16, gl.SliceLayout(1, LB))
    memory = gl.allocate_shared_memory(gl.float16, [4, COLUMNS, 16], C.shared)
    b = gl.load(x + cb[None, :] * 16 + kb[:, None])
    COPY: gl.constexpr = C.copy
    rc = gl.arange(0, COLUMNS, gl.SliceLayout(1, COPY))
    rk = gl.arange(0, 16, gl.SliceLayout(0, COPY))
    for i in gl.static_range(4):
        memory.index(i).store(gl.load(x + rc[:, None] * 16 + rk[None, :]))
    SUMS: gl.constexpr = C.acc
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS)
    before = asm("mov.u64 $0, %clock64;", "=l", [], gl.int64)
    for i in range(n):
        for j in gl.static_range(4):
            if C.read:
                b = memory.index((i + j) % 4).permute([1, 0]).load(LB)
            acc = mma_v2(a, b, acc)
    after = asm("mov.u64 $0, %clock64;", "=l", [], gl.int64)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, C.acc))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, C.acc))
    gl.store(y + rows[:, None] * COLUMNS + columns[None, :], acc)
    gl.store(clocks + gl.program_id(0), after - before)

