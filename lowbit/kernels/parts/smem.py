"""Shared memory: one allocation per kernel, divided into named regions, and views of them.

The allocation is the kernel's only one, so its offset is 0 and PTX can address it (parts/pipeline.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.gluon import builtin, gl, gluon, part

UNIT = 1024
"""Alignment of regions in bytes, as swizzled tiles require. Also the unit of offsets below."""

UNIT_WORDS = gl.constexpr(UNIT // 4)


@dataclass(frozen=True)
class Regions:
    """Names and bytes of regions, in order; a region of 0 bytes does not exist."""

    sizes: tuple[tuple[str, int], ...]

    def start(self, name: str) -> int:
        """Start of a region, in units of UNIT bytes."""
        names = [known for known, _ in self.sizes]
        return sum(-(-size // UNIT) for _, size in self.sizes[: names.index(name)])

    def end(self, name: str) -> int:
        """End of a region, rounded up, in units of UNIT bytes."""
        return self.start(name) + -(-dict(self.sizes)[name] // UNIT)

    @property
    def units(self) -> int:
        return sum(-(-size // UNIT) for _, size in self.sizes)

    @property
    def bytes(self) -> int:
        return UNIT * self.units


@gluon.jit
def allocate(C: gl.constexpr):
    """Allocates shared memory for all regions of C.regions."""
    return gl.allocate_shared_memory(gl.int32, [C.regions.units, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@builtin
def view(memory, regions, name, dtype, shape, layout, _semantic=None):
    """Returns a region of `allocate` as a view with a type, shape and layout."""
    regions, name = (getattr(constant, "value", constant) for constant in (regions, name))
    return part(memory, regions.start(name), regions.end(name), dtype, shape, layout, _semantic=_semantic)


@builtin
def view_stages(memory, regions, name, count, descriptor, _semantic=None):
    """Returns a region as `count` blocks of a TMA descriptor's block shape, type and layout."""
    shape = [int(count), *descriptor.block_type.shape]
    return view(memory, regions, name, descriptor.dtype, shape, descriptor.layout, _semantic=_semantic)
