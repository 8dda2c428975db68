"""How codes lie in memory: lossless layouts between codes [N, K] and the bytes that a kernel reads."""

from lowbit.pack.bits import join_planes, pack_plane, plane_widths, split_planes, unpack_plane
from lowbit.pack.fragment import FragmentOrder
from lowbit.pack.layout import Layout, PackedTensor, RowMajor, pack
from lowbit.pack.scales import ScaleOrder
from lowbit.pack.tensorrt_llm import ColumnMajorTileInterleave

__all__ = [
    "ColumnMajorTileInterleave",
    "FragmentOrder",
    "Layout",
    "PackedTensor",
    "RowMajor",
    "ScaleOrder",
    "join_planes",
    "pack",
    "pack_plane",
    "plane_widths",
    "split_planes",
    "unpack_plane",
]
