"""Codes fill their words without gaps, and few bit moves collect the codes that are split over words."""

from __future__ import annotations

import pytest

from lowbit.formats import float_format, int_format
from lowbit.hardware.fields import WORD_GROUPS, field_order

FLOATS = [float_format(e, m) for e, m in ((3, 2), (2, 3), (2, 2), (2, 1), (4, 3), (3, 3))]
FORMATS = [*(int_format(b) for b in range(2, 9)), *FLOATS]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("window", [16, 8])
def test_every_bit_of_the_words_is_used_once(fmt, window):
    order = field_order(fmt, window)
    places = [place for register in order.places for place in register]
    assert sorted(places) == [(word, bit) for word in range(order.words) for bit in range(window)]
    assert order.registers * order.bits == order.words * window
    assert all(len(register) == fmt.bits for register in order.places)


@pytest.mark.parametrize(("fmt", "pieces"), [(int_format(3), [3]), (float_format(3, 2), [4]), (float_format(2, 2), [3, 3, 4])])
def test_left_over_codes_are_gathered_in_few_pieces(fmt, pieces):
    assert [len(word) for word in field_order(fmt).gathered] == pieces


def test_word_groups_are_aligned_loads():
    for bits, groups in WORD_GROUPS.items():
        assert sum(groups) == bits and set(groups) <= {1, 2, 4} and list(groups) == sorted(groups, reverse=True)


def test_widths_are_refused():
    with pytest.raises(ValueError, match="codes have 2 to 8 bits here, got 9"):
        field_order(9)
    with pytest.raises(ValueError, match="codes have 2 to 4 bits here, got 5"):
        field_order(5, 4)
