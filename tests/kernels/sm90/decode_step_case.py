"""A decode step of a small random decoder: the arguments of its launch, and its results in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats import parse_scheme
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.choose.decode_step import FIELDS, PRODUCT_NAMES, StepShape, StepTable
from lowbit.pack import FragmentWeight
from lowbit.pack.gated import alternate, pack_gated
from lowbit.quantize import rtn


@dataclass
class Case:
    """Tensors of a step. `contexts`: older tokens of each row. Weights have mean 0 and sizes that keep activations near 1."""

    table: StepTable
    scheme: str = "w4a16_g128"
    dtype: torch.dtype = torch.float16
    contexts: tuple[int, ...] = (5,)
    biases: tuple[str, ...] = ()
    head_norms: bool = False
    device: str = "cpu"
    seed: int = 0
    eps: float = 1e-5
    weights: list[dict[str, FragmentWeight]] = field(default_factory=list)
    vectors_of: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape, a = self.table.shape, self.table.shape.attention

        def random(*size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
            return (torch.randn(size, generator=generator) * scale + mean).to(self.device)

        self.pages, self.matrices = [], []
        count = shape.tokens * self.pages_of_slot + 1
        for _ in range(shape.layers):
            packed, matrices, vectors = {}, {}, {}
            for name in PRODUCT_NAMES:
                n, k = shape.rows(name), shape.columns(name)
                if name == "gate_up":
                    parts = [rtn(random(n // 2, k, scale=k**-0.5), parse_scheme(self.scheme)) for _ in range(2)]
                    packed[name] = pack_gated(*parts)
                    matrices[name] = alternate(*(part.dequantize().double() for part in parts))
                else:
                    q = rtn(random(n, k, scale=k**-0.5), parse_scheme(self.scheme))
                    packed[name], matrices[name] = FragmentWeight.pack(q), q.dequantize().double()
                if name in self.biases:
                    vectors[f"{name} bias"] = random(n, scale=0.5)
            for name in ("mlp_gamma", "next_gamma"):
                vectors[name] = random(shape.hidden, scale=0.1, mean=1.0) * 0.5
            if self.head_norms:
                vectors |= {name: random(a.head_dim, scale=0.1, mean=1.0) for name in ("q_gamma", "k_gamma")}
            size = (count, a.kv_heads, PAGE, a.head_dim)
            vectors |= {"k": random(*size).to(self.dtype), "v": random(*size).to(self.dtype)}
            angles = torch.arange(self.positions)[:, None] * torch.rand(a.head_dim // 2, generator=generator)
            vectors["cos_sin"] = torch.cat([angles.cos(), angles.sin()], 1).float().to(self.device)
            self.weights.append(packed), self.matrices.append(matrices), self.vectors_of.append(vectors)
        self.h = random(shape.tokens, shape.hidden).to(self.dtype)
        self.first_gamma = random(shape.hidden, scale=0.1, mean=1.0)
        self.x = (self.h.float() * self.first_gamma * 0.5).to(self.dtype)
        squares = self.h.double().square().view(shape.tokens, 2, -1).sum(-1).T
        self.squares = squares.float().contiguous()
        order = torch.randperm(count - 1, generator=generator) + 1
        tables = torch.zeros(shape.tokens + 1, self.pages_of_slot, dtype=torch.int32)
        tables[: shape.tokens] = order.view(shape.tokens, -1)
        self.rows = torch.randperm(shape.tokens, generator=generator).int().to(self.device)
        self.tables, slots = tables.to(self.device), torch.zeros(shape.tokens + 1, dtype=torch.int32, device=self.device)
        slots[self.rows.long()] = torch.tensor(self.contexts, dtype=torch.int32, device=self.device)
        self.slot_positions = slots
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def positions(self) -> int:
        return max(self.contexts) + 1

    @property
    def pages_of_slot(self) -> int:
        return -(-self.positions // PAGE)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the table of layers has addresses of."""
        packed = [t for layer in self.weights for w in layer.values() for t in (w.codes, w.scale, w.channel_scale)]
        return [t for t in (*packed, *(t for layer in self.vectors_of for t in layer.values())) if t is not None]

    @property
    def layers(self) -> Tensor:
        """The table of layers; factors of x are 2, as x is half of h * gamma."""
        rows = []
        for packed, vectors in zip(self.weights, self.vectors_of, strict=True):
            row = {name: t.data_ptr() for name, t in vectors.items()}
            for name, w in packed.items():
                parts = {"codes": w.codes, "scale": w.scale, "channel_scale": w.channel_scale}
                row |= {f"{name} {part}": t.data_ptr() for part, t in parts.items() if t is not None}
            two = int(torch.tensor(2.0).view(torch.int32))
            row["factors"] = two | two << 32
            rows.append([row.get(name, 0) for name in FIELDS])
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def reference(self) -> tuple[Tensor, Tensor, Tensor, list[dict[str, Tensor]]]:
        """(h, x, squares [M], vectors of each layer) in float64, rounded where the kernel rounds; pages get the new token."""
        shape, dtype = self.table.shape, self.dtype

        def rounded(t: Tensor) -> Tensor:
            return t.to(dtype).double()

        h, x = self.h.double(), self.x.double()
        squares, found = self.squares.double().sum(0), []
        for w, vectors in zip(self.matrices, self.vectors_of, strict=True):

            def product(name, x, w=w, vectors=vectors):
                return x @ w[name].T

            def bias(name, vectors=vectors):
                return vectors.get(f"{name} bias", torch.zeros((), device=self.device)).double()

            root = 2 / (squares / shape.hidden + self.eps).sqrt()
            qkv = rounded(product("qkv", x) * root[:, None] + bias("qkv"))
            attended = rounded(self._attention(qkv, vectors))
            h = rounded(h + product("o", attended) + bias("o"))
            mlp_x, squares = rounded(h * vectors["mlp_gamma"].double()), h.square().sum(1)
            root = 2 / (squares / shape.hidden + self.eps).sqrt()
            gate, up = (product("gate_up", mlp_x) * root[:, None] + bias("gate_up")).unflatten(1, (-1, 2, 8)).unbind(2)
            gated = rounded((torch.nn.functional.silu(gate) * up).flatten(1))
            h = rounded(h + product("down", gated) + bias("down"))
            x, squares = rounded(h * vectors["next_gamma"].double()), h.square().sum(1)
            found.append({"qkv": qkv, "attended": attended, "mlp_x": mlp_x, "gated": gated, "next_x": x})
        return h, x, squares, found

    def _attention(self, qkv: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        a = self.table.shape.attention
        outputs = []
        for row, position in enumerate(self.contexts):
            heads = qkv[row].view(-1, a.head_dim)
            q, k, v = heads.split([a.heads, a.kv_heads, a.kv_heads])
            if self.head_norms:
                q, k = (
                    t / (t.square().mean(1, keepdim=True) + a.norm_eps).sqrt() * (vectors[name].double() + a.norm_offset)
                    for t, name in ((q, "q_gamma"), (k, "k_gamma"))
                )
            cos, sin = vectors["cos_sin"][position].double().chunk(2)
            q, k = (
                torch.cat([t[:, : a.head_dim // 2] * cos - t[:, a.head_dim // 2 :] * sin,
                           t[:, a.head_dim // 2 :] * cos + t[:, : a.head_dim // 2] * sin], 1)
                for t in (q, k)
            )  # fmt: skip
            q, k = q.to(self.dtype).double(), k.to(self.dtype).double()
            table = self.tables[int(self.rows[row])].long()
            vectors["k"][table[position // PAGE], :, position % PAGE] = k.to(self.dtype)
            vectors["v"][table[position // PAGE], :, position % PAGE] = v.to(self.dtype)
            tokens = torch.arange(position + 1, device=self.device)
            keys, values = (
                vectors[name][table[tokens // PAGE], :, tokens % PAGE].double().repeat_interleave(a.group, 1) for name in "kv"
            )
            p = (torch.einsum("hd,thd->ht", q, keys) * a.scale).softmax(1)
            outputs.append(torch.einsum("ht,thd->hd", p, values).flatten())
        return torch.stack(outputs)

    def vector(self, vectors: Tensor, layer: int, name: str, width: int) -> Tensor:
        """A 16-bit vector [M, width] of a layer in `vectors`."""
        start = layer * self.table.start("end") + self.table.start(name)
        count = self.table.shape.tokens * width
        return vectors[start : start + count // 2].view(self.dtype).view(-1, width)


def small_table(tokens=1, layers=1, hidden=128, intermediate=128, heads=2, kv_heads=1, head_dim=64, blocks=2, warps=4, bits=4,
                scale_bytes=32) -> StepTable:  # fmt: skip
    """A table of a small decoder for a few blocks of a few warps."""
    a = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, head_dim, norm_eps=1e-6)
    return StepTable(StepShape(layers, hidden, intermediate, a, tokens, bits, scale_bytes), blocks, warps)
