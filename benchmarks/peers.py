"""One adapter per peer: converts this library's quantized weight to the peer's layout and runs the peer's GEMM.

Run as `python -m benchmarks.peers NAME --request FILE --out FILE`, it measures one peer with the protocol of this
folder and appends one JSON row per line. Peers are third-party packages; each is imported in its adapter only, so that
an absent or broken one costs its own rows and nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gemm_rivals, quantized_x
from benchmarks.protocol import Build, Contender, Product, measured_rows, reference_product
from benchmarks.request import GemmRequest, is_float
from lowbit.formats import FloatFormat, PerGroup, QuantTensor, Scheme, ZeroPoint
from lowbit.tune.timing import failures, reason, warm_up


@dataclass(frozen=True)
class Peer:
    """A peer: the package to install, the module whose presence shows that it is installed, and its adapter.

    `compiled`: the peer compiles kernels for each problem and caches them on disk.
    """

    package: str
    module: str
    build: Build
    compiled: bool = False


def group_size(scheme: Scheme) -> int | None:
    """Returns the number of weights per scale along K; None for one scale per channel."""
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else None


def stored_as(q: QuantTensor, dtype: torch.dtype) -> QuantTensor:
    """Returns the weight with its scales rounded to `dtype`, for peers that store scales in this dtype."""
    return replace(q, scale=q.scale.to(dtype))


def _cloned(weight: Any) -> Any:
    """Returns a copy of a weight, a list or dictionary of tensors, in new memory."""
    if isinstance(weight, dict):
        return {name: tensor.clone() for name, tensor in weight.items()}
    return [tensor.clone() for tensor in weight]


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def humming(q: QuantTensor, request: GemmRequest) -> Contender:
    """Humming: integers of 1 to 8 bits and floats of at most 8 bits, scales per channel or group, compiled per problem.

    Tries humming's choice for M. With `sweep`, also tries its choices for M / 2 and 2 M, and its choice for M with one more
    stage, with another number of blocks per SM, and with stream-K toggled.
    """
    scheme, dtype = q.scheme, request.torch_dtype
    if scheme.zero is not ZeroPoint.NONE:
        raise ValueError("this adapter hands humming symmetric weights only")
    ops = importlib.import_module("humming.ops")
    layers = importlib.import_module("humming.layer")
    forward = importlib.import_module("humming.forward").humming_forward
    fmt = scheme.weight
    name = f"float{fmt.bits}e{fmt.exponent}m{fmt.mantissa}" if isinstance(fmt, FloatFormat) else f"uint{fmt.bits}"
    n, k = q.shape
    q = stored_as(q, dtype)
    layer = layers.HummingLayer(
        shape_n=n, shape_k=k, weight_config={"dtype": name, "group_size": group_size(scheme) or 0}, torch_dtype=dtype,
        input_config={} if scheme.activation is None else {"dtype": _HUMMING_ACTIVATIONS[scheme.activation.name]},
    ).cuda()  # fmt: skip
    layer.load_from_tensors({"weight": ops.pack_weight(q.codes.int(), fmt.bits), "weight_scale": q.scale})
    layer.transform()
    names = ("weight", "weight_scale", "zero_point", "weight_scale_2")
    weight = {name: getattr(layer, name).data for name in names if getattr(layer, name, None) is not None}
    config, locks = layer.humming_config, layer.locks
    choices = _humming_choices(config, request)

    def products(m: int) -> list[tuple[str, Product]]:
        def product(tuning: str) -> Product:
            if scheme.activation is None:
                return lambda x, w: forward(config, inputs=x, locks=locks, tuning_config=tuning, **w)
            return lambda x, w: forward(config, inputs=x.codes, input_scale=x.scale, locks=locks, tuning_config=tuning, **w)

        return [(f"humming {_in_short(tuning)}", product(tuning)) for tuning in choices[m]]

    if scheme.activation is not None:
        contender = quantized_x.contender(q, request, weight, _nbytes([*weight.values()]), _cloned, products)
        return replace(contender, tuned=request.sweep)
    return Contender(
        weight, _nbytes([*weight.values()]), _cloned, products, lambda x: reference_product(x, q), dtype, tuned=request.sweep
    )


_HUMMING_ACTIVATIONS = {"int8": "int8", "fp8_e4m3": "float8e4m3"}


def _humming_choices(config: Any, request: GemmRequest) -> dict[int, list[str]]:
    """Returns the tuning configurations to try for each M, as JSON. Compiles them in parallel and keeps those that compile."""
    choose = importlib.import_module("humming.tune").get_heuristics_config
    kernels = importlib.import_module("humming.kernel.humming").HummingKernel
    wanted = {m: _humming_tunings(choose, config, m, request.sweep) for m in request.rows}

    def error_of(tuning: str) -> str | None:
        try:
            kernels.prepare_kernels(config.to_str(), None, tuning, torch.cuda.current_device())
        except failures() as error:
            return reason(error)
        return None

    every = list(dict.fromkeys(tuning for tunings in wanted.values() for tuning in tunings))
    with ThreadPoolExecutor(16) as pool:
        errors = dict(zip(every, pool.map(error_of, every), strict=True))
    # If no candidate compiles, humming's own choice is kept, so that the row states its error.
    return {m: [t for t in tunings if errors[t] is None] or tunings[:1] for m, tunings in wanted.items()}


def _humming_tunings(choose: Callable[..., Any], config: Any, m: int, sweep: bool) -> list[str]:
    own = dict(choose(config, shape_m=m))
    tried = [own]
    if sweep:
        stages, blocks = own.get("num_stages", 2), own.get("num_ctas_per_sm", 1)
        tried += [dict(choose(config, shape_m=other)) for other in (max(1, m // 2), 2 * m)]
        tried += [{**own, "num_stages": stages + 1}, {**own, "num_ctas_per_sm": 2 if blocks == 1 else 1}]
        tried += [{**own, "use_stream_k": not own.get("use_stream_k", True)}]
    return list(dict.fromkeys(json.dumps(one, default=int) for one in tried))


def _in_short(tuning: str) -> str:
    value = json.loads(tuning)
    block, warp = ("x".join(map(str, value.get(key, ()))) for key in ("block_shape", "warp_shape"))
    return (
        f"{value.get('mma_type', 'mma')} block {block} warp {warp} stages {value.get('num_stages', 2)} "
        f"per SM {value.get('num_ctas_per_sm', 1)} stream-k {int(value.get('use_stream_k', True))}"
    )


def gemlite(q: QuantTensor, request: GemmRequest) -> Contender:
    """gemlite: 4-bit integers per group or channel, int8 per channel; it tunes itself at the first call of each shape."""
    scheme, dtype = q.scheme, request.torch_dtype
    if scheme.activation is not None:
        raise ValueError("this adapter measures gemlite with 16-bit activations")
    if is_float(scheme) or scheme.weight.bits not in (4, 8) or scheme.zero is not ZeroPoint.NONE:
        raise ValueError(f"gemlite has no kernel for {scheme} (its integers have 8, 4, 2 or 1 bits)")
    if scheme.weight.bits == 8 and group_size(scheme) is not None:
        raise ValueError("this adapter measures gemlite's int8 with one scale per channel")
    package = importlib.import_module("gemlite")
    helper = importlib.import_module("gemlite.helper")
    if scheme.weight.bits == 8:
        signed = (q.codes.to(torch.int16) - 128).to(torch.int8)
        layer = helper.A16W8_INT8(device="cuda", dtype=dtype).from_weights(signed, scales=q.scale.float())
    else:
        q = stored_as(q, dtype)
        zeros = torch.full_like(q.scale, 8.0)
        layer = helper.A16W4_HQQ_INT(device="cuda", dtype=dtype).from_weights(q.codes, q.scale, zeros)
    meta = layer.get_meta_args()

    def product(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
        return package.forward_functional(x, None, w, meta, -1)

    weight = [tensor.data for tensor in layer.get_tensor_args()]
    return Contender(
        weight, _nbytes(weight), _cloned, lambda m: [("gemlite", product)], lambda x: reference_product(x, q), dtype, tuned=True
    )


def torch_products(q: QuantTensor, request: GemmRequest) -> Contender:
    """PyTorch's GEMMs: `_int_mm` and `_scaled_mm` for 8-bit activations, otherwise `_weight_int4pack_mm`."""
    return torch_int4(q, request) if q.scheme.activation is None else quantized_x.torch_bytes(q, request)


def torch_int4(q: QuantTensor, request: GemmRequest) -> Contender:
    """PyTorch's `_weight_int4pack_mm`: int4 in groups of 32, 64, 128 or 256, always with bf16 activations."""
    scheme, group = q.scheme, group_size(q.scheme)
    if is_float(scheme) or scheme.weight.bits != 4 or scheme.zero is not ZeroPoint.NONE or group not in (32, 64, 128, 256):
        raise ValueError(f"torch._weight_int4pack_mm takes int4 in groups of 32, 64, 128 or 256, not {scheme}")
    q = stored_as(q, torch.bfloat16)
    pairs = (q.codes[:, ::2] << 4) | q.codes[:, 1::2]
    packed = torch._convert_weight_to_int4pack(pairs.contiguous(), 8)
    scale = q.scale.T.contiguous()
    weight = [packed, torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()]

    def product(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
        return torch._weight_int4pack_mm(x, w[0], group, w[1])

    return Contender(
        weight, _nbytes(weight), _cloned, lambda m: [("torch._weight_int4pack_mm", product)],
        lambda x: reference_product(x, q), torch.bfloat16,
    )  # fmt: skip


PEERS = {
    "humming": Peer("humming-kernels", "humming", humming, compiled=True),
    "marlin": Peer("vllm", "vllm", gemm_rivals.marlin),
    "machete": Peer("vllm", "vllm", gemm_rivals.machete),
    "bitsandbytes": Peer("bitsandbytes", "bitsandbytes", gemm_rivals.bitsandbytes),
    "quack": Peer("quack-kernels", "quack", gemm_rivals.quack),
    "gemlite": Peer("gemlite", "gemlite", gemlite),
    "torch": Peer("torch", "torch", torch_products),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one peer. Returns the exit status, 1 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", choices=sorted(PEERS))
    parser.add_argument("--request", type=Path, required=True, help="JSON of a benchmarks.request.GemmRequest")
    parser.add_argument("--out", type=Path, required=True, help="file to which one JSON row per line is appended")
    given = parser.parse_args(arguments)
    request = GemmRequest.from_json(json.loads(given.request.read_text()))
    if not torch.cuda.is_available():
        print("torch sees no NVIDIA GPU", file=sys.stderr)
        return 1
    warm_up()
    with given.out.open("a") as sink, torch.no_grad():
        for row in measured_rows(given.name, PEERS[given.name].build, request):
            sink.write(json.dumps(row, allow_nan=False) + "\n")
            sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
