"""Words that blocks of one launch exchange through global memory by polling the data itself.

A word of 32 bits that has not been written is EMPTY, all ones. As float32 and as two halves that is a NaN which no arithmetic
and no conversion produces, so a consumer needs neither a flag nor a fence: it loads its words again until none is EMPTY. Words
are set to EMPTY before the launch, and written once.

Polls and waits for mbarriers are bounded. After `limit` attempts a warp stores a code at the address of the status, and goes on
with what it has; so does every other warp that waits and finds a status. So a launch ends, whatever has happened.

Source  the protocol LL of NCCL has flags beside data; that no rounded number is all ones makes them unnecessary here
"""

from __future__ import annotations

from lowbit.hardware.half import HalfType
from lowbit.kernels.parts.gluon import asm, gl, gluon, ptx, run

EMPTY = -1
"""A word that has not been written."""

LIMIT = 1 << 20
"""Number of attempts after which a block gives up: some tenths of a second, thousands of times the longest wait."""


class Polled:
    """The PTX of the exchange, for a kernel's configuration to inherit. `limit`: attempts of a wait."""

    limit: int

    @property
    def dtype(self) -> HalfType:
        """Type of halves."""
        raise NotImplementedError

    def poll(self, count: int, words: int, ahead: bool = False) -> str:
        """PTX that loads `count` vectors of `words` words until no word is EMPTY. A lane loads a vector again only if one of
        its words was EMPTY: all blocks poll the same lines, so each repeated load delays the words that are still to come.
        Inputs: addresses; whether the warp needs them; address of the status; the status of a wait that is too long; with
        `ahead`, words that were loaded before."""
        total = count * words
        out = [f"${i}" for i in range(total)]
        needed, status, code = (f"${total + count + i}" for i in range(3))
        lines = [".reg .b32 m, n; .reg .pred p, more;", f"mov.b32 n, 0; setp.eq.s32 p, {needed}, 0;"]
        lines += [f"mov.b32 {register}, 0;" for register in out]
        lines += ["vote.sync.any.pred p, p, 0xffffffff; @p bra DONE;"]
        if ahead:
            lines += [f"mov.b32 {register}, ${total + count + 3 + i};" for i, register in enumerate(out)] + ["bra.uni CHECK;"]
        else:
            lines += [f"mov.b32 {register}, {EMPTY};" for register in out]
        lines.append("AGAIN:")
        for i in range(count):
            of_vector = out[words * i : words * (i + 1)]
            lines += [*_largest(of_vector), "setp.eq.u32 p, m, 0xffffffff;"]
            lines.append("@p " + _loaded("relaxed.gpu.global", of_vector, f"${total + i}"))
        lines += ["CHECK:"] if ahead else []
        lines += [*_largest(out), "setp.eq.u32 p, m, 0xffffffff; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE;"]
        lines += self._once_more("n", "m", "AGAIN", "DONE", status, code, 255)
        lines += ["DONE: mov.b32 n, 0;"]
        return "{\n" + "\n".join(lines) + "\n}"

    def poll_constraints(self, count: int, words: int, ahead: bool = False) -> str:
        """The constraints of `poll`."""
        return ",".join(["=&r"] * (count * words) + ["l"] * count + ["r", "l", "r"] + ["r"] * (count * words * ahead))

    load_word = "ld.relaxed.gpu.global.b32 $0, [$1];"

    def words_types(self, count: int) -> tuple[gl.dtype, ...]:
        """The types of `count` words."""
        return (gl.int32,) * count

    def _once_more(self, n: str, other: str, again: str, done: str, status: str, code: str, rarely: int) -> list[str]:
        """PTX that branches to `again`, but to `done` after LIMIT attempts, whose status it writes, and if another block has
        given up, which is read every `rarely` + 1 attempts. It is the same branch for all lanes."""
        return [
            f"add.u32 {n}, {n}, 1; and.b32 {other}, {n}, {rarely}; setp.ne.u32 more, {other}, 0; @more bra {again};",
            f"ld.relaxed.gpu.global.b32 {other}, [{status}]; setp.ne.s32 more, {other}, 0;",
            f"vote.sync.any.pred more, more, 0xffffffff; @more bra {done};",
            f"setp.lt.u32 more, {n}, {self.limit}; @more bra {again};",
            f"st.relaxed.gpu.global.b32 [{status}], {code};",
        ]

    @property
    def await_barrier(self) -> str:
        """PTX that waits for the barrier $1 in the phase of parity $2. $3: address of the status, $4: its value if the wait is
        too long."""
        return "\n".join(
            [
                "{ .reg .pred p, more; .reg .b32 m, n; mov.b32 n, 0;",
                "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;",
                "vote.sync.all.pred p, p, 0xffffffff; @p bra DONE;",
                *self._once_more("n", "m", "AGAIN", "DONE", "$3", "$4", 255),
                "DONE: mov.b32 $0, 0; }",
            ]
        )

    publish_float = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.gpu.global.f32 [$1], $2; mov.b32 $0, 0; }"

    @property
    def publish_pair(self) -> str:
        """PTX by which even lanes store their float32 $2 and that of the next lane as two halves at $1, if $3 is not 0."""
        return (
            "{ .reg .b32 o, w, b, l; .reg .f32 u; .reg .pred p; mov.b32 b, $2; shfl.sync.bfly.b32 o, b, 1, 31, 0xffffffff;\n"
            f"mov.b32 u, o; cvt.rn.{self._pair}.f32 w, u, $2; mov.u32 l, %laneid; and.b32 l, l, 1;\n"
            "setp.ne.s32 p, $3, 0; setp.eq.and.s32 p, l, 0, p; @p st.relaxed.gpu.global.b32 [$1], w; mov.b32 $0, 0; }"
        )

    @property
    def publish_both(self) -> str:
        """PTX that stores the float32 $2 and $3 as two halves at $1, if $4 is not 0."""
        return (
            f"{{ .reg .b32 w; .reg .pred p; cvt.rn.{self._pair}.f32 w, $3, $2; setp.ne.s32 p, $4, 0;\n"
            "@p st.relaxed.gpu.global.b32 [$1], w; mov.b32 $0, 0; }"
        )

    @property
    def _pair(self) -> str:
        return "f16x2" if self.dtype == "fp16" else "bf16x2"


def _largest(registers: list[str]) -> list[str]:
    """PTX of the largest of some words, in m: EMPTY if one of them is EMPTY."""
    return [f"mov.b32 m, {registers[0]};", *(f"max.u32 m, m, {register};" for register in registers[1:])]


def _loaded(kind: str, registers: list[str], address: str) -> str:
    if len(registers) == 1:
        return f"ld.{kind}.b32 {registers[0]}, [{address}];"
    return f"ld.{kind}.v{len(registers)}.b32 {{{', '.join(registers)}}}, [{address}];"


@gluon.jit
def poll(addresses, needed, status, code, count: gl.constexpr, words: gl.constexpr, C: gl.constexpr):
    """Returns `count` vectors of `words` words at `addresses` (int64), once all have arrived for all lanes of the warp; zeros
    if `needed` is 0 in some lane. `code` is stored at `status` if that takes too long."""
    return asm(
        ptx(C.poll, count, words), ptx(C.poll_constraints, count, words), addresses + (needed, status, code),
        ptx(C.words_types, count * words),
    )  # fmt: skip


@gluon.jit
def load_ahead(addresses, count: gl.constexpr, C: gl.constexpr):
    """Returns `count` words at `addresses` (int64) as they are now, for `poll_ahead`."""
    words = ()
    for i in gl.static_range(count):
        words = words + (asm(C.load_word, "=r,l", [addresses[i]], gl.int32),)
    return words


@gluon.jit
def poll_ahead(loaded, addresses, needed, status, code, count: gl.constexpr, C: gl.constexpr):
    """As `poll`, of words that `load_ahead` has loaded before: their latency has passed if they had arrived then."""
    return asm(
        ptx(C.poll, count, 1, True), ptx(C.poll_constraints, count, 1, True), addresses + (needed, status, code) + loaded,
        ptx(C.words_types, count),
    )  # fmt: skip


@gluon.jit
def await_barrier(barrier, parity, status, code, C: gl.constexpr):
    """Waits for the phase of parity `parity` of the mbarrier at an address in shared memory."""
    run(C.await_barrier, "=r,r,r,l,r", [barrier, barrier * 0 + parity, status, code])


@gluon.jit
def publish(address, value, exists, C: gl.constexpr):
    """Stores a float32 word where `exists` is not 0."""
    run(C.publish_float, "=r,l,f,r", [address, value, exists])


@gluon.jit
def publish_pair(address, value, exists, C: gl.constexpr):
    """Stores two halves as a word where `exists` is not 0: an even lane's value and that of the next lane."""
    run(C.publish_pair, "=r,l,f,r", [address, value, exists])


@gluon.jit
def publish_both(address, low, high, exists, C: gl.constexpr):
    """Stores two values of a lane as halves of a word where `exists` is not 0."""
    run(C.publish_both, "=r,l,f,f,r", [address, low, high, exists])
