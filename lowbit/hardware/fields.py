"""Positions of the bits of codes in 32-bit words, chosen so that few instructions extract them into registers.

A register of 16-bit operands has two elements. The code of element e is in half e of a word, so one LOP3 or shift processes
both elements. Each 16-bit half is divided into *slots*, one per register; the remaining bits are *spare*:

    int4       | slot 3 | slot 2 | slot 1 | slot 0 |                       4 registers from a word
    int3       | x | slot 4 | slot 3 | slot 2 | slot 1 | slot 0 |          5 registers from a word, 1 spare bit (x)
    fp6_e3m2   | A: s | x x | A: e e e m m | B: s | x x | B: e e e m m |   slots A (bits where fp16 has them) and B (8 bits
                                                                           lower), 4 spare bits

Codes whose width is not a power of two do not fill words, so the spare bits of several words hold the codes of further
registers. 3 words of int3 hold 15 registers in slots, and one bit of the codes of a sixteenth register in each word. 3 words of
fp6 hold 6 registers in slots, and two more in the 4 spare bits of each word. These bits are first copied into a *gathered*
word, which has the same slots as the other words.

The words of one lane and tile are stored in aligned groups of 4, 2 and 1 words (6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1;
`WORD_GROUPS`). Source: storing every fourth FP6 code in spare bits is this library's idea (docs/log); storing 6 bits as 4 + 2
is FP6-LLM's, arXiv:2401.14112.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from lowbit.formats import FloatFormat, NumberFormat

WORD_BITS = 32

WORD_GROUPS: dict[int, tuple[int, ...]] = {8: (4, 4), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits of a code -> sizes, in words, of the groups in which a lane's words are stored. One load reads a group, of at most 128
bits. 32 codes take as many words as a code has bits."""

Slot = tuple[int, ...]
"""Position of each bit of a code, lowest bit first, within its half (or byte)."""

# Slots of float formats by (exponent, mantissa) bits. The bits of the first code are where fp16 has sign and magnitude.
_FLOAT_SLOTS: dict[tuple[int, int], tuple[Slot, ...]] = {
    (3, 2): ((8, 9, 10, 11, 12, 15), (0, 1, 2, 3, 4, 7)),
    (2, 3): ((7, 8, 9, 10, 11, 15), (2, 3, 4, 5, 6, 14)),
    (2, 2): ((8, 9, 10, 11, 15), (0, 1, 2, 3, 7)),
    (2, 1): ((9, 10, 11, 15), (6, 7, 8, 12), (3, 4, 5, 14), (0, 1, 2, 13)),
    (4, 3): ((7, 8, 9, 10, 11, 12, 13, 15), (0, 1, 2, 3, 4, 5, 6, 14)),
}


# Slots of float formats for 8-bit operands. The bits of the first code are where fp8 e4m3 has sign and magnitude.
_BYTE_FLOAT_SLOTS: dict[tuple[int, int], tuple[Slot, ...]] = {
    (3, 3): ((0, 1, 2, 3, 4, 5, 7),),
    (3, 2): ((1, 2, 3, 4, 5, 7),),
    (2, 3): ((0, 1, 2, 3, 4, 7),),
    (2, 2): ((1, 2, 3, 4, 7),),
    (2, 1): ((2, 3, 4, 7), (0, 1, 5, 6)),
}


@dataclass(frozen=True)
class Piece:
    """Bits that are copied into a gathered word: (words[word] >> shift) & mask, in each half or byte (`FieldOrder.window`). A
    negative shift is a left shift."""

    word: int
    shift: int
    mask: int


@dataclass(frozen=True)
class FieldOrder:
    """Bit positions of the codes of `registers` registers in `words` words. The bits of element e are `window` bits higher than
    those of element e - 1.

    The codes of register r are in slot r % len(slots) of word r // len(slots). Words with index `words` and higher are not
    stored but gathered: `gathered` lists the spare bits of which each is composed.
    """

    bits: int
    window: int
    slots: tuple[Slot, ...]
    registers: int
    words: int
    gathered: tuple[tuple[Piece, ...], ...]

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """places[register][bit of the code] = (word, bit) for element 0."""
        return tuple(
            tuple(self._origin(register // len(self.slots), bit) for bit in self.slots[register % len(self.slots)])
            for register in range(self.registers)
        )

    def _origin(self, word: int, bit: int) -> tuple[int, int]:
        if word < self.words:
            return word, bit
        (piece,) = (piece for piece in self.gathered[word - self.words] if piece.mask >> bit & 1)
        return piece.word, bit + piece.shift


@functools.cache
def field_order(fmt: NumberFormat | int, window: int = 16) -> FieldOrder:
    """Returns the bit positions of the codes of a format, or of integers of `fmt` bits. A register has 32 / window operands.

    `window` is 16 for fp16 and bf16, 8 for int8 and fp8 operands. Raises ValueError unless codes have 2 to 8 bits and at most
    `window` bits.
    """
    bits = fmt if isinstance(fmt, int) else fmt.bits
    if bits not in WORD_GROUPS or bits > window:
        raise ValueError(f"codes have 2 to {min(window, 8)} bits here, got {bits}")
    slots = _slots(fmt, bits, window)
    common = math.gcd(window, bits)
    registers, words = window // common, bits // common
    spare = [set(range(window)) - {bit for slot in slots for bit in slot} for _ in range(words)]
    gathered = []
    for first in range(words * len(slots), registers, len(slots)):
        wanted = {bit for slot in slots[: registers - first] for bit in slot}
        gathered.append(_gather(wanted, spare))
    return FieldOrder(bits, window, slots, registers, words, tuple(gathered))


def _slots(fmt: NumberFormat | int, bits: int, window: int) -> tuple[Slot, ...]:
    known = {16: _FLOAT_SLOTS, 8: _BYTE_FLOAT_SLOTS}.get(window, {})
    if isinstance(fmt, FloatFormat) and (fmt.exponent, fmt.mantissa) in known:
        return known[fmt.exponent, fmt.mantissa]
    # With 6 bits in a half, the four spare bits are the lowest. Both codes then fit the mantissa after at most one shift.
    start = 4 if (bits, window) == (6, 16) else 0
    return tuple(tuple(range(first, first + bits)) for first in range(start, window - bits + 1, bits))


def _gather(wanted: set[int], spare: list[set[int]]) -> tuple[Piece, ...]:
    """Assigns spare bits to the `wanted` bits of a gathered word. Repeatedly chooses the word and shift that provide most of
    the missing bits, and removes these bits from `spare`."""
    pieces = []
    wanted = set(wanted)
    while wanted:
        best = max(
            ((word, shift) for word in range(len(spare)) for shift in range(-15, 16)),
            key=lambda c: (len({bit for bit in wanted if bit + c[1] in spare[c[0]]}), c[1] == 0, c[1] < 0, -c[0], -abs(c[1])),
        )
        word, shift = best
        served = {bit for bit in wanted if bit + shift in spare[word]}
        pieces.append(Piece(word, shift, sum(1 << bit for bit in served)))
        wanted -= served
        spare[word] -= {bit + shift for bit in served}
    return tuple(pieces)
