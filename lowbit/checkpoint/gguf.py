"""GGUF files (llama.cpp's), version 2 and 3: a header of metadata and tensors, then the tensors' blocks, row by row along K.

    Q4_0 32 weights: f16 d, 16 bytes, element j in the low nibble of byte j, j + 16 in the high one     w = d (q - 8)
    Q4_1 as Q4_0 with f16 m                                                                              w = d q + m
    Q5_0 as Q4_0 with 32 fifth bits before the nibbles                                                   w = d (q - 16)
    Q5_1 as Q5_0 with f16 m                                                                              w = d q + m
    Q8_0 32 weights: f16 d, int8                                                                         w = d q
    Q4_K 256 weights: f16 d and dmin, 8 scales and 8 minima of 6 bits, nibbles                           w = d s q - dmin m
    Q5_K as Q4_K with fifth bits                                                                         w = d s q - dmin m
    Q6_K 256 weights: nibbles, upper bits, 16 int8 scales, f16 d                                         w = d s (q - 32)
    MXFP4 32 weights: exponent e of two plus 127, nibbles e2m1 as in Q4_0                                w = 2^(e - 127) q

q is the number that is stored for a weight, d and dmin are scales of a block, s scales of its groups, m minima. The products
d s and dmin m have up to 19 bits and are kept exactly, in float32; other scales stay fp16. Scales may be negative or zero.
Experts are stacked: a tensor [E, N, K] has the blocks of all experts, one expert after another. Other types are refused; some
of them (IQ4_NL, the IQ types) index tables of unevenly spaced values.
Source: ggml's block structures and the package gguf 0.19 (quants.py, constants.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import ForeignEntry, e8m0_scales
from lowbit.checkpoint.schema import MAX_DIMENSION, CheckpointError
from lowbit.formats import PerGroup, QuantTensor, Scheme, ZeroPoint, float_format, int_format, uint_format
from lowbit.sources import regular_file

_MAX_COUNT = 1 << 20
_MAX_STRING = 1 << 24
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_NAME = 256  # ggml's own limit is 64
_WEIGHTS_AT_ONCE = 1 << 22  # bounds the temporary memory of decoding
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays in arrays
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_UNREAD = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 40: "NVFP4"}

Decoded = tuple[Tensor, Tensor, "Tensor | None"]
"""Codes [.., weights of a block], scales [.., groups of a block] and zeros of the same shape."""


def _half(block: Tensor, start: int) -> Tensor:
    return block[..., start : start + 2].contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    return torch.cat((data & 15, data >> 4), dim=-1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Returns the 32 bits of 4 bytes as uint8 [.., 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _q4_0(block: Tensor) -> Decoded:
    return _nibbles(block[..., 2:]), _half(block, 0), None


def _q4_1(block: Tensor) -> Decoded:
    return _nibbles(block[..., 4:]), _half(block, 0), _half(block, 2)


def _q5_0(block: Tensor) -> Decoded:
    return _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6]), _half(block, 0), None


def _q5_1(block: Tensor) -> Decoded:
    return _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8]), _half(block, 0), _half(block, 2)


def _q8_0(block: Tensor) -> Decoded:
    return block[..., 2:] ^ 0x80, _half(block, 0), None


def _k_scales(block: Tensor) -> tuple[Tensor, Tensor]:
    """Returns d s and -dmin m, float32 [.., 8], of a Q4_K or Q5_K block.

    12 bytes hold 8 scales and 8 minima of 6 bits. The bytes of the first four scales (minima) hold in their two upper bits
    the upper bits of the last four."""
    a, b, c = (block[..., start : start + 4] for start in (4, 8, 12))
    scale = torch.cat((a & 63, (c & 15) | (a >> 6 << 4)), dim=-1)
    minimum = torch.cat((b & 63, (c >> 4) | (b >> 6 << 4)), dim=-1)
    return _half(block, 0).float() * scale, -(_half(block, 2).float() * minimum)


def _q4_k(block: Tensor) -> Decoded:
    return (_nibbles(block[..., 16:].unflatten(-1, (4, 32))).flatten(-2), *_k_scales(block))


def _q5_k(block: Tensor) -> Decoded:
    low = _nibbles(block[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)
    fifth = (block[..., 16:48].unsqueeze(-2) >> shifts.unsqueeze(-1)) & 1  # [.., 8 groups, 32]
    return (low | (fifth.flatten(-2) << 4), *_k_scales(block))


def _q6_k(block: Tensor) -> Decoded:
    low = _nibbles(block[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=block.device)
    high = (block[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts.unsqueeze(-1)) & 3  # [.., 2 halves, 4 quarters, 32]
    scale = block[..., 192:208].contiguous().view(torch.int8).float() * _half(block, 208).float()
    return low | (high.flatten(-3) << 4), scale, None


def _mxfp4(block: Tensor) -> Decoded:
    return _nibbles(block[..., 1:]), e8m0_scales(block[..., :1]), None


@dataclass(frozen=True)
class BlockType:
    """A block type: name, weights and bytes per block, the scheme of its layers, and the decoder of blocks [.., bytes]."""

    name: str
    weights: int
    bytes: int
    scheme: Scheme
    decode: Callable[[Tensor], Decoded]


def _type(
    name: str, weights: int, size: int, bits: int, group: int, zeros: bool, decode: Callable[[Tensor], Decoded]
) -> BlockType:
    zero = ZeroPoint.FLOAT if zeros else ZeroPoint.NONE
    scheme = Scheme(uint_format(bits) if zeros else int_format(bits), None, PerGroup(group), zero)
    return BlockType(name, weights, size, scheme, decode)


BLOCKS = {
    2: _type("Q4_0", 32, 18, 4, 32, False, _q4_0),
    3: _type("Q4_1", 32, 20, 4, 32, True, _q4_1),
    6: _type("Q5_0", 32, 22, 5, 32, False, _q5_0),
    7: _type("Q5_1", 32, 24, 5, 32, True, _q5_1),
    8: _type("Q8_0", 32, 34, 8, 32, False, _q8_0),
    12: _type("Q4_K", 256, 144, 4, 32, True, _q4_k),
    13: _type("Q5_K", 256, 176, 5, 32, True, _q5_k),
    14: _type("Q6_K", 256, 210, 6, 16, False, _q6_k),
    39: BlockType("MXFP4", 32, 17, Scheme(float_format(2, 1), None, PerGroup(32)), _mxfp4),
}
"""ggml's type number -> block type."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's type number, shape (rows first) and the bytes [begin, end) of the file that hold it; end is 0 for types that
    are not supported."""

    kind: int
    shape: tuple[int, ...]
    begin: int
    end: int


def gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file at `path`, or the one in a folder without config.json; None if there is none.

    Raises CheckpointError for a folder with several GGUF files.
    """
    if path.suffix == ".gguf" and path.exists() and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{path}: holds {len(files)} GGUF files; give the path of one of them")
    return files[0] if files else None


class GgufReader:
    """One GGUF file. Opening it parses and checks the header and raises CheckpointError if it is invalid.

    `metadata` has the scalars and strings, `arrays` the lengths of the arrays (their values are skipped), `tensors` every
    tensor by name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.arrays: dict[str, int] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._size = regular_file(self.path).stat().st_size
            with self.path.open("rb") as file:
                self._read_header(_Cursor(file, self._size, self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error})") from error

    def entry(self, name: str) -> ForeignEntry | None:
        """Returns shape and scheme of a quantized matrix, None for a plain tensor. Raises CheckpointError for other types."""
        if self._block(name) is None:
            return None
        shape = self.tensors[name].shape
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.path}: {name}: quantized tensors are matrices here, or stacked experts where a model has them; this "
                f"has the shape {shape}"
            )
        return self._entry(name)

    def stacked_entry(self, name: str) -> tuple[int, ForeignEntry]:
        """Returns E, and the shape and scheme of one expert, for a quantized tensor [E, N, K] of stacked experts.

        Raises CheckpointError for other shapes and types, and for a plain tensor.
        """
        shape = self.tensors[name].shape
        if self._block(name) is None or len(shape) != 3:
            raise CheckpointError(
                f"{self.path}: {name}: experts are quantized tensors of 3 dimensions, this has the shape {shape} "
                f"{'and is not quantized' if self._block(name) is None else ''}"
            )
        return shape[0], self._entry(name)

    def layer(self, name: str, device: torch.device | str = "cpu", expert: int | None = None) -> QuantTensor:
        """Returns a quantized matrix, decoded on a device. expert: which matrix of stacked experts, else None."""
        tensor, block = self.tensors[name], self._block(name)
        assert block is not None, f"{name} is a plain tensor"
        n, k = tensor.shape[-2:]
        size = n * (k // block.weights) * block.bytes
        start = 0 if expert is None else expert * size
        blocks = self._bytes(name, start, start + size).to(device).reshape(n, k // block.weights, block.bytes)
        decoded = [block.decode(rows) for rows in blocks.split(max(1, _WEIGHTS_AT_ONCE // k))]
        codes, scale = torch.cat([codes for codes, _, _ in decoded]), torch.cat([scale for _, scale, _ in decoded])
        zeros = [zero for _, _, zero in decoded if zero is not None]
        zero = torch.cat(zeros) if zeros else None
        for what, values in (("scales", scale), ("minima", zero)):
            if values is not None and not bool(values.isfinite().all()):
                raise CheckpointError(f"{self.path}: {name}: some {what} are not finite; the file is damaged")
        return QuantTensor(
            codes.reshape(n, k), scale.reshape(n, -1), None if zero is None else zero.reshape(n, -1), block.scheme
        )

    def _block(self, name: str) -> BlockType | None:
        """Returns the block type of a tensor, None for a plain one. Raises CheckpointError for other types."""
        kind = self.tensors[name].kind
        if kind in _PLAIN:
            return None
        if kind not in BLOCKS:
            raise CheckpointError(
                f"{self.path}: {name}: blocks of the type {_UNREAD.get(kind, f'number {kind}')} are not supported; "
                f"{', '.join(block.name for block in BLOCKS.values())} are. Load the file with Transformers (gguf_file=...), "
                "save_pretrained it in 16 bits, and quantize that"
            )
        return BLOCKS[kind]

    def _entry(self, name: str) -> ForeignEntry:
        tensor = self.tensors[name]
        return ForeignEntry((tensor.shape[-2], tensor.shape[-1]), BLOCKS[tensor.kind].scheme)

    def get(self, name: str) -> Tensor:
        """Returns a plain tensor."""
        tensor = self.tensors[name]
        return self._bytes(name, 0, tensor.end - tensor.begin).view(_PLAIN[tensor.kind]).reshape(tensor.shape)

    def _bytes(self, name: str, start: int, end: int) -> Tensor:
        """Returns bytes [start, end) of a tensor."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.tensors[name].begin + start)
                data = bytearray(file.read(end - start))
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name}: cannot be read ({error})") from error
        if len(data) != end - start:
            raise CheckpointError(f"{self.path}: {name}: the file ends inside it")
        return torch.frombuffer(data, dtype=torch.uint8)

    def _read_header(self, cursor: _Cursor) -> None:
        if cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file")
        version = cursor.number("I")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version}; supported are 2 and 3, little-endian")
        tensors, pairs = cursor.count("Q"), cursor.count("Q")
        for _ in range(pairs):
            key = cursor.string()
            if key in self.metadata or key in self.arrays:
                raise CheckpointError(
                    f"{self.path}: its metadata has the key {key[:80]!r} twice, and readers may use either value; write "
                    "the file again"
                )
            kind = cursor.number("I")
            if kind == _ARRAY:
                self.arrays[key] = cursor.skip_array()
            else:
                self.metadata[key] = cursor.value(kind)
        rows = []
        for _ in range(tensors):
            name, extents = cursor.string(), cursor.number("I")
            if len(name) > _MAX_NAME:
                raise CheckpointError(
                    f"{self.path}: {name[:80]!r}..: a tensor's name has {len(name):,} characters; at most {_MAX_NAME} are read"
                )
            if extents > 4:
                raise CheckpointError(f"{self.path}: {name}: {extents} dimensions; at most 4 are known")
            shape = tuple(reversed([cursor.number("Q") for _ in range(extents)]))
            rows.append((name, shape, cursor.number("I"), cursor.number("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        for name, shape, kind, offset in rows:
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path}: {name}: its offset {offset:,} is no multiple of general.alignment, {alignment}; the file is "
                    "damaged"
                )
            self.tensors[name] = self._placed(name, shape, kind, start + offset)
        if len(self.tensors) != tensors:
            raise CheckpointError(f"{self.path}: several tensors have one name")
        self._check_apart()

    def _check_apart(self) -> None:
        """Raises CheckpointError if two tensors share bytes."""
        before, end = "", 0
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise CheckpointError(
                    f"{self.path}: {name}: begins at byte {tensor.begin:,}, but {before} ends at {end:,}; tensors overlap, the "
                    "file is damaged"
                )
            if tensor.end > end:
                before, end = name, tensor.end

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        if not all(0 < extent < MAX_DIMENSION for extent in shape) or not shape:
            raise CheckpointError(f"{self.path}: {name}: invalid shape {shape}")
        count = 1
        for extent in shape:
            count *= extent
        if kind in _PLAIN:
            size = count * _PLAIN[kind].itemsize
        elif kind in BLOCKS:
            block = BLOCKS[kind]
            if shape[-1] % block.weights:
                raise CheckpointError(f"{self.path}: {name}: rows of {shape[-1]} are no whole {block.name} blocks")
            size = count // block.weights * block.bytes
        else:
            return GgufTensor(kind, shape, begin, 0)
        if begin + size > self._size:
            raise CheckpointError(f"{self.path}: {name}: ends at byte {begin + size:,} of {self._size:,}; truncated or damaged")
        return GgufTensor(kind, shape, begin, begin + size)


class _Cursor:
    """Reads a header sequentially, within the size of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self._size - self.position:
            raise CheckpointError(f"{self._path}: ends inside its header; truncated or damaged")
        self.position += count
        return self._file.read(count)

    def skip(self, count: int) -> None:
        if count > self._size - self.position:
            raise CheckpointError(f"{self._path}: ends inside its header; truncated or damaged")
        self.position += count
        self._file.seek(self.position)

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, code: str) -> int:
        value: int = self.number(code)
        if value > _MAX_COUNT:
            raise CheckpointError(f"{self._path}: its header states {value:,} entries, more than the limit of {_MAX_COUNT:,}")
        return value

    def string(self) -> str:
        length: int = self.number("Q")
        if length > _MAX_STRING:
            raise CheckpointError(f"{self._path}: its header has a string of {length:,} bytes, limit {_MAX_STRING:,}")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Returns a scalar or a string."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _STRING:
            raise CheckpointError(f"{self._path}: its metadata has a value of the unknown type {kind}")
        return self.string()

    def skip_array(self, depth: int = 0) -> int:
        """Skips an array and returns its number of values."""
        kind: int = self.number("I")
        length: int = self.number("Q")
        if kind in _SCALARS:
            self.skip(length * struct.calcsize(f"<{_SCALARS[kind]}"))
            return length
        if kind not in (_STRING, _ARRAY) or depth == _MAX_DEPTH:
            raise CheckpointError(f"{self._path}: its metadata has an array of the unknown type {kind}")
        for _ in range(length):  # raises at the end of the file
            if kind == _STRING:
                self.skip(self.number("Q"))
            else:
                self.skip_array(depth + 1)
        return length
