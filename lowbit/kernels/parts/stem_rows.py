"""A network's first convolution with the weights as operand A and image rows as they lie as operand B, as PTX.

Without a swizzle, wgmma reads operand B by 8 rows of 16 bytes at a time, wherever they are: here rows are packed pixels
(pack/stem.py), one after the other, and a window of four is two steps of 32 bytes that begin one packed pixel later from row to
row. So windows overlap in shared memory, nothing is copied twice, and no instruction loads them. Weights stay in registers. A
thread ends with two neighbouring channels of pooled pixels 4 j + (lane mod 4): both columns of each.
Barriers: parts/pipeline.py. Source: PTX ISA, wgmma, matrix descriptor and K-major layout without swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.pack.stem import PIXEL_BYTES, WINDOW_PIXELS
from lowbit.pack.stem_fragment import STEP_BYTES

STEPS = PIXEL_BYTES * WINDOW_PIXELS // STEP_BYTES
"""Steps of K of a row of a window."""

STEP_REGISTERS = 4
"""Registers of operand A of a step."""

COLUMNS = 112
"""Columns of the convolution of a tile: 56 pooled pixels."""

ROW_BYTES = (COLUMNS + WINDOW_PIXELS - 1) * PIXEL_BYTES
"""Bytes of a row of a strip: what the windows of a tile touch."""


@dataclass(frozen=True)
class StemRows:
    """`window` rows of a window, a strip has one more; `strip_bytes` from strip to strip."""

    strips: StageBarriers
    window: int
    strip_bytes: int

    @property
    def copy(self) -> str:
        """Where $1 is not 0: waits until strip $2 has been read (parity $3), then fills it from the map $4.

        The strip begins $5 words of 8 bytes into row $6 of image $7; there are zeros outside the image.
        """
        full, empty = self.strips.start, self.strips.start + 8 * self.strips.stages
        return f"""{{ .reg .pred skip, done; .reg .b32 at, bar, to;
            setp.eq.s32 skip, $1, 0; @skip bra DONE;
            mov.u32 at, global_smem; mad.lo.u32 bar, $2, 8, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{empty}], $3; @!done bra WAIT;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar+{full}], {(self.window + 1) * ROW_BYTES};
            add.u32 bar, bar, {full}; mad.lo.u32 to, $2, {self.strip_bytes}, at;
            cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
                [to], [$4, {{$5, $6, $7}}], [bar];
            DONE: mov.b32 $0, 0; }}"""

    @property
    def weights(self) -> int:
        """Registers of weights of a thread."""
        return STEP_REGISTERS * STEPS * self.window

    @property
    def load(self) -> str:
        """The weights of thread $n + 1, 16 bytes a step, from $n."""
        n = self.weights
        lines = [f".reg .b64 from; mad.wide.u32 from, ${n + 1}, 16, ${n};"]
        for i in range(0, n, STEP_REGISTERS):
            registers = ", ".join(f"${i + j}" for j in range(STEP_REGISTERS))
            lines.append(f"ld.global.nc.v4.b32 {{{registers}}}, [from+{i // STEP_REGISTERS * 128 * 16}];")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def load_constraints(self) -> str:
        """Of `load`."""
        return ",".join(["=&r"] * self.weights + ["l", "r"])

    @property
    def sums(self) -> int:
        """Sums of a row of the convolution in a thread."""
        return COLUMNS // 2

    @property
    def products(self) -> str:
        """Sums of the upper row, then of the lower one: outputs. Inputs: the weights, the number of the strip.

        The descriptor: the address by 16, 16 bytes from one half of a step to the other, 128 from 8 rows to the next.
        """
        sums, inputs = self.sums, 2 * self.sums
        rows = ["{" + ", ".join(f"${i}" for i in range(first, first + sums)) + "}" for first in (0, sums)]
        lines = [
            ".reg .b64 d; .reg .b32 at, high, here; .reg .pred adds;",
            f"mov.u32 at, global_smem; mad.lo.u32 at, ${inputs + self.weights}, {self.strip_bytes}, at;",
            f"shr.u32 at, at, 4; or.b32 at, at, {(STEP_BYTES // 2 // 16) << 16};",
            f"mov.u32 high, {8 * PIXEL_BYTES // 16}; setp.eq.u32 adds, high, 0;",
            "wgmma.fence.sync.aligned;",
        ]
        for step in range(STEPS * self.window):
            first = inputs + STEP_REGISTERS * step
            a = "{" + ", ".join(f"${first + i}" for i in range(STEP_REGISTERS)) + "}"
            if step == 1:
                lines.append("setp.ne.u32 adds, high, 0;")
            for down, row in enumerate(rows):
                offset = (step // STEPS + down) * ROW_BYTES + step % STEPS * STEP_BYTES
                lines.append(f"add.u32 here, at, {offset // 16}; mov.b64 d, {{here, high}};")
                lines.append(f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k32.s32.s8.s8 {row}, {a}, d, adds;")
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def products_constraints(self) -> str:
        """Of `products`."""
        return ",".join(["=r"] * 2 * self.sums + ["r"] * (self.weights + 1))


ACROSS = """{ .reg .b32 p; shfl.sync.idx.b32 p, $3, $4, 0x1F, 0xFFFFFFFF; max.s32 p, p, $1; max.s32 $0, p, $2; }"""
"""The largest of $1, $2 and what lane $4 has in $3."""


def put(words: int, places: range, place_bytes: int) -> str:
    """Codes of up to four of a thread's pixels to shared memory, $1 bytes from its start on: of one word a byte each ($2), of
    two words two bytes ($2, $3). `places` numbers the pixels, which are `place_bytes` apart."""
    lines = [".reg .b32 at, x; .reg .b16 half; mov.u32 at, global_smem; add.u32 at, at, $1;"]
    size = 8 * words
    for i, place in enumerate(places):
        word, bit = divmod(size * i, 32)
        lines.append(f"shr.u32 x, ${2 + word}, {bit}; cvt.u16.u32 half, x; st.shared.u{size} [at+{place * place_bytes}], half;")
    return "{ " + "\n".join(lines) + "\nmov.b32 $0, 0; }"


GET = """{ .reg .pred there; .reg .b32 at, a, b, c, d; setp.ne.s32 there, $1, 0; mov.u32 at, global_smem; add.u32 at, at, $2;
    @there ld.shared.v4.b32 {a, b, c, d}, [at]; @there st.global.v4.b32 [$3], {a, b, c, d}; mov.b32 $0, 0; }"""
"""Where $1 is not 0: 16 bytes of shared memory, $2 bytes from its start on, to $3."""
