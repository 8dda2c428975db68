"""Device functions of parts/ run as what they are, Python, on integers and arrays: no GPU, no compiler."""

from __future__ import annotations

import re
import types

import numpy as np


def plain(function, **names):
    """A device function with `names`, such as `gl` and other device functions that it calls, replaced."""
    python = function.fn
    return types.FunctionType(python.__code__, {**python.__globals__, **names}, python.__name__, python.__defaults__)


class Integer(int):
    """A scalar of a kernel."""

    def __rsub__(self, other):
        return Integer(other - int(self))

    def to(self, kind):
        return self


class Array(np.ndarray):
    """A tensor of a kernel."""

    def broadcast_to(self, shape):
        return np.broadcast_to(self, shape).view(Array)


class Pointer:
    """Into an array, as far as `index`."""

    def __init__(self, memory, index=0):
        self.memory, self.index = memory, index

    def __add__(self, index):
        return Pointer(self.memory, self.index + index)

    def __getitem__(self, axes):
        return Pointer(self.memory, self.index[axes])

    def to(self, kind):
        return self


def atomic_add(pointer, value, sem):
    before = pointer.memory[pointer.index]
    pointer.memory[pointer.index] += value
    return before


GL = types.SimpleNamespace(
    minimum=min,
    where=lambda condition, a, b: a if condition else b,
    arange=lambda first, end, layout: np.arange(first, end),
    SliceLayout=lambda dim, layout: None,
    static_range=range,
    int32=None,
    int64=None,
    store=lambda pointer, value: pointer.memory.__setitem__(pointer.index, value),
    load=lambda pointer: pointer.memory[pointer.index],
    atomic_add=atomic_add,
    reshape=lambda x, shape: np.reshape(x, shape).view(Array),
    permute=lambda x, order: np.transpose(x, order).view(Array),
    join=lambda a, b: np.stack([a, b], axis=-1).view(Array),
    split=lambda x: (x[..., 0], x[..., 1]),
    expand_dims=lambda x, axis: np.expand_dims(x, axis).view(Array),
    convert_layout=lambda x, layout, assert_trivial: x,
    constexpr=None,
)
"""Gluon's operations on arrays."""


def operands(text: str) -> set[int]:
    """Numbers of the operands that PTX names."""
    return {int(number) for number in re.findall(r"\$(\d+)", text)}


def check_operands(text: str, constraints: str) -> None:
    """PTX names all operands that its constraints have, and no others."""
    assert operands(text) == set(range(len(constraints.split(","))))
    assert text.count("{") == text.count("}")
