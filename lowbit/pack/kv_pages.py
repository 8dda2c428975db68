"""Keys and values of a layer in pages of 128 tokens: in 16 bits, or as packed codes with a scale for each token and head.

In 16 bits, pages are k and v [pages, kv_heads, 128, head_dim] and there are no scales. Packed pages are uint8 [pages, kv_heads,
bytes], with head_dim padded to D, a multiple of 32. A page has 4 blocks of 32 tokens. A warp loads a block in vectors of 16
bytes, which are fragments of mma.sync.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"). A 32-bit word has 8 codes of 4
bits or 4 codes of 8 bits. For each r from 0 to 3 and each 32 elements, lane 4g + t (t from 0 to 3) has, in one word or two:

    K    operand A [tokens, elements]: the 8 elements from 32i + 8t on of token 8r + g of the block
    V    operand A [elements, tokens]: elements 32y + g, + 8, + 16, + 24 of tokens 8r + 2t and 8r + 2t + 1 of the block

Words of a lane are ordered by r, then by elements, and stored as [block][vector of 4 words][lane][word of the vector]. A
register holds two neighbours along the reduction of the product: elements 2j and 2j + 1 of K, or the two tokens of V. A word
has one neighbour in each half. Field j of both halves makes register j, so one mask extracts a register. No byte has codes of
two tokens, so a token is appended without reading others. Scales are fp16 [pages, kv_heads, 128]. The scale of token
32b + 8r + g of a page is at 32b + 4g + r, so that a lane group (the lanes with one g) loads its scales at once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.kv import KVFormat, KVScheme, dequantize_rows, quantize_rows

PAGE = 128
"""Number of tokens per page."""

BLOCK = 32
"""Number of tokens of a packed block, which a warp reads at a time."""


def padded_head(head_dim: int) -> int:
    """Returns the number of elements of a packed row: head_dim rounded up to a multiple of 32."""
    return -(-head_dim // 32) * 32


@dataclass(frozen=True)
class RowPlaces:
    """The places of the codes of each token of a page. bytes: int64 [128, bytes of a token], the index of each byte of a token
    within the page of a head. Byte i holds element low[i]; in 4-bit formats its upper half holds element high[i]."""

    bytes: Tensor
    low: Tensor
    high: Tensor | None


@functools.cache
def row_places(bits: int, head_dim: int, values: bool, device: torch.device) -> RowPlaces:
    """Returns the packed order of keys, or that of values if `values` is true."""
    d, fields = padded_head(head_dim), 16 // bits  # fields of half a word
    code = torch.arange(PAGE * d)
    if values:  # code is token * d + element: axes block r t half, y h field g
        axes = code.view(4, 4, 4, 2, d // 32, 4 // fields, fields, 8)
        ordered = axes.permute(0, 1, 4, 5, 7, 2, 3, 6)
    else:  # axes block r g, i t h field half
        axes = code.view(4, 4, 8, d // 32, 4, 4 // fields, fields, 2)
        ordered = axes.permute(0, 1, 3, 5, 2, 4, 7, 6)
    # block, vector, word of the vector, lane, fields of the word -> block, vector, lane, word, field
    ordered = ordered.reshape(4, -1, 4, 32, 2 * fields).transpose(2, 3).flatten()
    place = torch.empty_like(ordered)
    place[ordered] = code
    of_rows = place.view(PAGE, d)
    with torch.inference_mode(False):  # cached beyond this call
        if bits == 8:
            every = torch.arange(d, device=device)
            return RowPlaces(of_rows.to(device), every, None)
        low = (of_rows[0] % 2 == 0).nonzero().flatten()
        high = low + (8 if values else 2)
        return RowPlaces((of_rows[:, low] // 2).to(device), low.to(device), high.to(device))


def scale_places(place: Tensor) -> Tensor:
    """Returns the index of the scale of each token `place` of a page."""
    return place // BLOCK * BLOCK + place % 8 * 4 + place % BLOCK // 8


@dataclass(frozen=True)
class KVPages:
    """Keys and values of one layer, in the formats of `scheme`; the module docstring has the order of codes.

    In 16 bits k and v are [pages, kv_heads, 128, head_dim] of the model's type and there are no scales. Else k and v are uint8
    [pages, kv_heads, bytes], k_scale and v_scale fp16 [pages, kv_heads, 128].
    """

    scheme: KVScheme
    head_dim: int
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def make(
        cls, scheme: KVScheme, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVPages:
        """Returns uninitialised pages; `dtype` is the type of 16-bit pages, packed ones are uint8."""
        if not scheme.quantized:
            size = (pages, kv_heads, PAGE, head_dim)
            return cls(scheme, head_dim, *(torch.empty(size, dtype=dtype, device=device) for _ in range(2)))
        sizes = [(pages, kv_heads, head_bytes(fmt, head_dim)) for fmt in (scheme.k, scheme.v)]
        k, v = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        scales = (torch.empty((pages, kv_heads, PAGE), dtype=torch.float16, device=device) for _ in range(2))
        return cls(scheme, head_dim, k, v, *scales)

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.k.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in self.tensors if t is not None)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """k, v, k_scale, v_scale."""
        return self.k, self.v, self.k_scale, self.v_scale

    def clone(self) -> KVPages:
        """Returns equal pages in new memory."""
        return KVPages(self.scheme, self.head_dim, *(t if t is None else t.clone() for t in self.tensors))  # type: ignore[arg-type]

    def write(self, page: Tensor, place: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores keys and values [T, kv_heads, head_dim] of tokens at index `place` [T] of pages `page` [T], both int64. Packed
        pages get their codes and scales."""
        if self.k_scale is None or self.v_scale is None:
            self.k[page, :, place], self.v[page, :, place] = k.to(self.k.dtype), v.to(self.v.dtype)
            return
        self._write(self.k, self.k_scale, self.scheme.k, page, place, k, False)
        self._write(self.v, self.v_scale, self.scheme.v, page, place, v, True)

    def read(self, page: Tensor, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns keys and values [.., kv_heads, head_dim] in `dtype` of tokens at index `place` [..] of pages `page` [..],
        with rotations undone."""
        if self.k_scale is None or self.v_scale is None:
            return self.k[page, :, place].to(dtype), self.v[page, :, place].to(dtype)
        return (
            self._read(self.k, self.k_scale, self.scheme.k, page, place, dtype, False),
            self._read(self.v, self.v_scale, self.scheme.v, page, place, dtype, True),
        )

    def _write(
        self, packed: Tensor, scales: Tensor, fmt: KVFormat, page: Tensor, place: Tensor, rows: Tensor, values: bool
    ) -> None:  # fmt: skip
        codes, scale = quantize_rows(rows, fmt)
        padding = padded_head(self.head_dim) - self.head_dim
        codes = torch.nn.functional.pad(codes, (0, padding), value=math.ceil(fmt.offset))  # the code of 0
        places = row_places(fmt.bits, self.head_dim, values, packed.device)
        own = codes[..., places.low] if places.high is None else codes[..., places.low] | codes[..., places.high] << 4
        heads = torch.arange(self.kv_heads, device=packed.device)
        packed[page[:, None, None], heads[:, None], places.bytes[place][:, None]] = own
        scales[page[:, None], heads, scale_places(place)[:, None]] = scale

    def _read(
        self, packed: Tensor, scales: Tensor, fmt: KVFormat, page: Tensor, place: Tensor, dtype: torch.dtype, values: bool
    ) -> Tensor:  # fmt: skip
        places = row_places(fmt.bits, self.head_dim, values, packed.device)
        heads = torch.arange(self.kv_heads, device=packed.device)
        own = packed[page[..., None, None], heads[:, None], places.bytes[place][..., None, :]]
        codes = own if places.high is None else own.new_empty((*own.shape[:-1], padded_head(self.head_dim)))
        if places.high is not None:
            codes[..., places.low], codes[..., places.high] = own & 15, own >> 4
        scale = scales[page[..., None], heads, scale_places(place)[..., None]]
        return dequantize_rows(codes[..., : self.head_dim].contiguous(), scale, fmt, dtype)


def head_bytes(fmt: KVFormat, head_dim: int) -> int:
    """Returns the bytes of a page of one head of packed keys or values, without scales."""
    return PAGE * padded_head(head_dim) * fmt.bits // 8


def page_bytes(scheme: KVScheme, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a page of one layer: keys, values and scales. `dtype` is the type of 16-bit pages."""
    if not scheme.quantized:
        return 2 * kv_heads * PAGE * head_dim * dtype.itemsize
    return kv_heads * (head_bytes(scheme.k, head_dim) + head_bytes(scheme.v, head_dim) + 4 * PAGE)


def kv_refusals(scheme: KVScheme, head_dim: int) -> tuple[str, ...]:
    """Reasons why the kernels do not take packed pages of heads of `head_dim` elements; empty if they do."""
    if scheme.quantized and (head_dim % 8 or not 16 <= head_dim <= 256):
        return (f"packed keys and values have heads of 16 to 256 elements, a multiple of 8, got {head_dim}",)
    return ()
