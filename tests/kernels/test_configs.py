"""Kernel configurations: Triton's cache distinguishes them by `str`, so `str` must contain every field."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit import kernels
from lowbit.kernels.choose.attention import AttentionShape, DecodeTile
from lowbit.kernels.choose.conv import block_tile, pair_tile
from lowbit.kernels.choose.decode_step import StepShape, StepTable, UnitForm
from lowbit.kernels.elementwise.append import Append
from lowbit.kernels.elementwise.gather_kv import GatherKv
from lowbit.kernels.elementwise.lora import Lora
from lowbit.kernels.elementwise.route import ChooseConfig, SortConfig
from lowbit.kernels.parts.conv_tile import WgmmaConv
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.k_block import KBlock
from lowbit.kernels.parts.kv_rows import KVRows
from lowbit.kernels.parts.ring import Ring, RowRing
from lowbit.kernels.reference.route import RouterRule
from lowbit.kernels.sm80.conv import MmaConv, MmaProduct
from lowbit.kernels.sm80.expert_large_m_gemm import ExpertMmaGemm
from lowbit.kernels.sm80.expert_scaled_gemm import ExpertScaledGemm
from lowbit.kernels.sm80.expert_small_m_gemm import ExpertRingGemm, TaskRing
from lowbit.kernels.sm80.large_m_gemm import MmaGemm
from lowbit.kernels.sm80.lora_sums import LoraSums
from lowbit.kernels.sm80.packed_attention import PackedAttention
from lowbit.kernels.sm80.paged_attention import PagedAttention
from lowbit.kernels.sm80.scaled_gemm import PlainGemm
from lowbit.kernels.sm80.small_m_gemm import RingGemm
from lowbit.kernels.sm90.conv_block import BlockConv
from lowbit.kernels.sm90.conv_deep import DeepConv
from lowbit.kernels.sm90.conv_pair import PairConv
from lowbit.kernels.sm90.conv_strip import StripConv
from lowbit.kernels.sm90.decode_step import DecodeStep, ProductForm
from lowbit.kernels.sm90.expert_large_m_gemm import ExpertWgmmaGemm
from lowbit.kernels.sm90.large_m_gemm import WgmmaGemm
from lowbit.kernels.sm90.scaled_gemm import ScaledGemm
from lowbit.kernels.sm90.stem_pool import StemPool
from lowbit.kernels.sm90.sub_byte_scaled_gemm import NarrowGemm
from lowbit.pack.conv_pair import PairLayout

HALF = torch.float16
HEADS = AttentionShape(32, 8, 128, 0.1, 128)
CONFIGS = [
    WgmmaConv("u4", "s8", "u4", True, 2, 64, 32, 4),
    StripConv("u4", "s8", None, True, 2, 64, 32, 9, rows=256),
    DeepConv("u4", "s8", None, True, 2, 128, 64, 4),
    BlockConv(**vars(block_tile("u4", 56, 64, False))),
    PairConv(**vars(pair_tile(PairLayout("u4", 512, 2048, 0), 0, 4))),
    StemPool("u4", True, 4, False, False),
    MmaConv(MmaProduct("u4", 4), None, "s8", None, True),
    WgmmaGemm(Dequantizer("int4", "fp16", 128, "none", "fp16"), 64, 2, 4, 1, 1, 8, Epilogue(False, False), True),
    ScaledGemm(torch.int8, torch.int8, HALF, True, 2, 128, 4, 1, 8, False, "token", False, False, False, "none", False, True),
    NarrowGemm("int4", torch.int8, HALF, 128, 2, 4, 1, 8, True, True, "token", False, False, "none", False, True),
    PlainGemm("int4", torch.int8, torch.int8, HALF, 16, 6, True, False, "token", False, False, "none"),
    MmaGemm(Dequantizer("int4", "fp16", 128, "none", "fp16"), 128, 4, 4, 2, 1, 4, 1, 2, False, Epilogue(False, False), True),
    RingGemm(Ring(KBlock("int4", "fp16", 8, 128, "none", "fp16"), 1, 2, False), 4, 2, 1, Epilogue(False, False), True),
    RingGemm(RowRing(KBlock("dense", "fp16", 8, 0, "none", "fp16"), 2, 1, False), 4, 2, 1, Epilogue(False, False), True),
    ExpertRingGemm(
        TaskRing(KBlock("int4", "fp16", 8, 128, "none", "fp16"), 1, 2, False), 4, 2, Epilogue(False, False), False, True, False
    ),
    ExpertMmaGemm(Dequantizer("int4", "fp16", 128, "none", "fp16"), 128, 4, 4, 2, 1, 4, Epilogue(False, False), True, False),
    ExpertWgmmaGemm(Dequantizer("int4", "fp16", 128, "none", "fp16"), 64, 2, 4, Epilogue(False, False), True, False),
    ExpertScaledGemm("int4", torch.int8, torch.int8, HALF, 16, 2, 4, True, False, "token", False, False, False),
    DecodeStep(
        StepTable(StepShape(32, 4096, 14336, HEADS, 1, ((UnitForm(4, 32),),)), 132),
        "fp16",
        ((ProductForm(UnitForm(4, 32), KBlock("int4", "fp16", 8, 128, "none", "fp16"), "bf16"),),),
        Epilogue(False, False),
        (),
        False,
    ),
    Lora((64, 64), True, 2, 16, 128, 1, True),
    LoraSums("fp16", 2, 16, 3, 128, 8, 1, True),
    PagedAttention(HEADS, DecodeTile(8, 128, 64, 4), True),
    PackedAttention(HEADS, "int4", "fp8", True, False, True),
    Append(HEADS, KVRows(128, "int4", "fp8", True, False), True),
    ChooseConfig(RouterRule(8), 128, False, 4, 8, True),
    SortConfig(128, 8, 8, 512, True),
    GatherKv(8, 128, KVRows(128, "int4", "fp8", True, False), True),
]


def others(value):
    """Copies of `value`, each with one field changed, at any depth."""
    if isinstance(value, RouterRule):  # RouterRule refuses most other values of its fields
        return [RouterRule(4), RouterRule(8, "sigmoid", normalize=True), RouterRule(8, scale=2.0)]
    if dataclasses.is_dataclass(value):
        fields = [(f.name, other) for f in dataclasses.fields(value) for other in others(getattr(value, f.name))]
        return [dataclasses.replace(value, **{name: other}) for name, other in fields]
    if isinstance(value, torch.dtype):
        return [torch.float8_e5m2]
    return [not value if isinstance(value, bool) else 2 * value or 1 if isinstance(value, int) else "other"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_field_is_told(config):
    made = [config, *others(config)]
    assert len({str(one) for one in made}) == len(made)


def test_every_class_of_configurations_is_here():
    found = set()
    for module in pkgutil.walk_packages(kernels.__path__, "lowbit.kernels."):
        for made in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(made) and dataclasses.is_dataclass(made):
                found |= {made} if "digest" in {field.name for field in dataclasses.fields(made)} else set()
    assert found == {type(config) for config in CONFIGS}


@pytest.mark.parametrize(
    "name", ["sm80/conv", "sm90/conv", "sm90/conv_strip", "sm90/conv_deep", "sm90/conv_block", "sm90/stem_pool"]
)
def test_kernels_are_siblings(name):
    """A kernel imports parts and descriptors, but no other kernel, and does not pack weights."""
    text = (Path(kernels.__file__).parent / f"{name}.py").read_text()
    imported = set(re.findall(r"^from (lowbit\.\S+) import", text, re.MULTILINE))
    assert not {m for m in imported if ".sm" in m} - {"lowbit.kernels.sm90.tensor_map"}
    assert ".pack(" not in text and "pack_layer" not in text
