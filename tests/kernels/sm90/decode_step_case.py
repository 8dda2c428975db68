"""A decode step of a small random decoder: the arguments of its launch, and its results in plain torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats import parse_scheme
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.choose.decode_step import (
    BLOCK_K,
    LAYER_PRODUCTS,
    PRODUCT_NAMES,
    StepShape,
    StepTable,
    UnitForm,
)
from lowbit.kernels.reference.route import RouterRule, choose_reference
from lowbit.ops.decode_step import unit_form
from lowbit.pack import DenseWeight, ExpertWeight, FragmentWeight
from lowbit.pack.gated import alternate, pack_gated
from lowbit.quantize import rtn


@functools.cache
def unit_form_of(scheme: str) -> UnitForm:
    """The bytes of a unit of weights in a scheme; "16" are weights of 16 bits."""
    if scheme == "16":
        return UnitForm(16)
    return unit_form(FragmentWeight.pack(rtn(torch.ones(16, BLOCK_K), parse_scheme(scheme))))


VOCAB = 50
"""Rows of the embedding."""


@dataclass
class Case:
    """Tensors of a step. `contexts`: older tokens of each row. `schemes`: a scheme for each product, as `forms_of_schemes`.
    `windows`: of each layer, 0 for none. Weights have mean 0 and sizes that keep activations near 1. `ties`: every second
    expert has the router's row of the one before it. `normalize`: weights of experts add up to 1."""

    table: StepTable
    schemes: tuple[tuple[str, ...], ...] = ()
    dtype: torch.dtype = torch.float16
    contexts: tuple[int, ...] = (5,)
    biases: tuple[str, ...] = ()
    head_norms: bool = False
    sinks: bool = False
    windows: tuple[int, ...] = ()
    embedding_bits: int = 16
    embedding_scale: float = 1.0
    ties: bool = False
    normalize: bool = True
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
        for layer in range(shape.layers):
            packed, matrices, vectors = {}, {}, {}
            for name in LAYER_PRODUCTS:
                packed[name], matrices[name] = self._weight(name, layer, random)
                if name in self.biases:
                    vectors[f"{name} bias"] = random(shape.rows(name), scale=0.5)
            for name in ("mlp_gamma", "next_gamma"):
                vectors[name] = random(shape.hidden, scale=0.1, mean=1.0) * 0.5
            if self.head_norms:
                vectors |= {name: random(a.head_dim, scale=0.1, mean=1.0) for name in ("q_gamma", "k_gamma")}
            if self.sinks:
                vectors["sinks"] = random(a.heads, scale=1.0)
            if shape.experts:
                router = random(shape.experts, shape.hidden, scale=2 * shape.hidden**-0.5).to(self.dtype)
                if self.ties:
                    router[1::2] = router[: shape.experts // 2 * 2 : 2]
                vectors["router"] = router
            size = (count, a.kv_heads, PAGE, a.head_dim)
            vectors |= {"k": random(*size).to(self.dtype), "v": random(*size).to(self.dtype)}
            angles = torch.arange(self.positions)[:, None] * torch.rand(a.head_dim // 2, generator=generator)
            vectors["cos_sin"] = torch.cat([angles.cos(), angles.sin()], 1).float().to(self.device)
            self.weights.append(packed), self.matrices.append(matrices), self.vectors_of.append(vectors)
        self.h = torch.full((shape.tokens, shape.hidden), torch.nan, dtype=self.dtype, device=self.device)
        self.first_gamma = random(shape.hidden, scale=0.1, mean=1.0) * 0.5
        if self.embedding_bits == 8:
            self.embedding = torch.randint(0, 256, (VOCAB, shape.hidden), generator=generator).byte().to(self.device)
            self.row_scale = torch.rand(VOCAB, generator=generator).add(0.5).div(64).to(self.device)
        else:
            self.embedding, self.row_scale = random(VOCAB, shape.hidden).to(self.dtype), None
        self.head_vectors, self.head = {"next_gamma": self.first_gamma}, None
        if shape.has_head:
            self.head, self.head_matrix = self._weight("head", 0, random)
            if "head" in self.biases:
                self.head_vectors["head bias"] = random(shape.vocab, scale=0.5)
        self.logits = self.head and torch.full((shape.tokens, shape.vocab), torch.nan, dtype=self.dtype, device=self.device)
        order = torch.randperm(count - 1, generator=generator) + 1
        tables = torch.zeros(shape.tokens + 1, self.pages_of_slot, dtype=torch.int32)
        tables[: shape.tokens] = order.view(shape.tokens, -1)
        self.rows = torch.randperm(shape.tokens, generator=generator).int().to(self.device)
        self.tables, slots = tables.to(self.device), torch.zeros(shape.tokens + 1, dtype=torch.int32, device=self.device)
        slots[self.rows.long()] = torch.tensor(self.contexts, dtype=torch.int32, device=self.device)
        self.slot_positions = slots
        self.tokens = torch.randint(0, VOCAB, (shape.tokens + 1,), generator=generator).int().to(self.device)
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def positions(self) -> int:
        return max(self.contexts) + 1

    @property
    def pages_of_slot(self) -> int:
        return -(-self.positions // PAGE)

    def _weight(self, name, layer, random):
        """A product's weight, packed, and its matrix in float64."""
        n, k = self.table.shape.rows(name), self.table.shape.columns(name)
        of_product = self.schemes[PRODUCT_NAMES.index(name)] if self.schemes else ("w4a16_g128",)
        scheme = of_product[layer % len(of_product)]
        if self.table.shape.is_routed(name):
            return self._experts(name, parse_scheme(scheme), random)
        rows = random(n, k, scale=k**-0.5)
        if scheme == "16":
            rows = rows.to(self.dtype)
            return DenseWeight(rows), (alternate(*rows.chunk(2)) if name == "gate_up" else rows).double()
        if name == "gate_up":
            parts = [rtn(part.contiguous(), parse_scheme(scheme)) for part in rows.chunk(2)]
            return pack_gated(*parts), alternate(*(part.dequantize().double() for part in parts))
        q = rtn(rows, parse_scheme(scheme))
        return FragmentWeight.pack(q), q.dequantize().double()

    def _experts(self, name, scheme, random):
        """The weight of all experts, packed, and their matrices [experts, N, K] in float64."""
        shape = self.table.shape
        n, k = shape.rows(name), shape.columns(name)
        n, k = (n // shape.choices, k) if name == "gate_up" else (n, k // shape.choices)
        rows = [random(n, k, scale=k**-0.5 * (1 + e % 3)) for e in range(shape.experts)]
        if name == "gate_up":
            gates, ups = ([rtn(of.chunk(2)[i].contiguous(), scheme) for of in rows] for i in range(2))
            matrices = [alternate(*(q.dequantize().double() for q in pair)) for pair in zip(gates, ups, strict=True)]
            return ExpertWeight.pack_gated(gates, ups), torch.stack(matrices)
        packed = [rtn(of, scheme) for of in rows]
        return ExpertWeight.pack(packed), torch.stack([q.dequantize().double() for q in packed])

    @property
    def forms(self):
        """The forms of each product's weights, for the plan."""
        of_layers = [
            tuple(dict.fromkeys(layer[name].form for layer in self.weights)) for name in LAYER_PRODUCTS
        ]  # fmt: skip
        return (*of_layers, () if self.head is None else (self.head.form,))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the table of layers has addresses of."""
        packed = [t for layer in self.weights for w in layer.values() for t in w.tensors().values()]
        packed += [] if self.head is None else self.head.tensors().values()
        vectors = [t for layer in (*self.vectors_of, self.head_vectors) for t in layer.values()]
        return [t for t in (*packed, *vectors) if t is not None]

    @property
    def layers(self) -> Tensor:
        """The table of layers; factors of x are 2, as x is half of h * gamma."""
        rows = []
        weights = [*self.weights, {} if self.head is None else {"head": self.head}]
        for layer, (packed, vectors) in enumerate(zip(weights, (*self.vectors_of, self.head_vectors), strict=True)):
            row = {name: t.data_ptr() for name, t in vectors.items()}
            for name, w in packed.items():
                parts = {"codes" if part == "values" else part: t for part, t in w.tensors().items()}
                row |= {f"{name} {part}": t.data_ptr() for part, t in parts.items() if t is not None}
                row[f"{name} form"] = self.forms[PRODUCT_NAMES.index(name)].index(w.form)
            two = int(torch.tensor(2.0).view(torch.int32))
            row["factors"] = two | two << 32
            row["window"] = self._window(layer) or 1 << 30
            rows.append([row.get(name, 0) for name in self.table.shape.fields])
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _window(self, layer: int) -> int:
        return self.windows[layer] if layer < len(self.windows) else 0

    def embedded(self) -> Tensor:
        """The embeddings of the tokens, in float64."""
        tokens = self.tokens[self.rows.long()].long()
        if self.row_scale is None:
            h = self.embedding[tokens]
        else:
            h = ((self.embedding[tokens].float() - 128) * self.row_scale[tokens, None]).to(self.dtype)
        return (h.float() * self.embedding_scale).to(self.dtype).double()

    def reference(
        self, routed_by: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[dict[str, Tensor]]]:
        """(h, x, squares [M], logits, vectors of each layer) in float64, rounded where the kernel rounds; pages get the new
        token. `routed_by`: logits [M, experts] of each layer's router by which to choose experts, in place of its own. Those of
        the kernel differ by the rounding of earlier vectors, which may change the order of two experts."""
        shape, dtype = self.table.shape, self.dtype

        def rounded(t: Tensor) -> Tensor:
            return t.to(dtype).double()

        h = self.embedded()
        x, squares, found = rounded(h * self.first_gamma.double()), h.square().sum(1), []
        for layer, (w, vectors) in enumerate(zip(self.matrices, self.vectors_of, strict=True)):

            def product(name, x, w=w, vectors=vectors):
                return x @ w[name].T

            def bias(name, vectors=vectors):
                return vectors.get(f"{name} bias", torch.zeros((), device=self.device)).double()

            root = 2 / (squares / shape.hidden + self.eps).sqrt()
            qkv = rounded(product("qkv", x) * root[:, None] + bias("qkv"))
            attended = rounded(self._attention(qkv, vectors, self._window(layer)))
            h = rounded(h + product("o", attended) + bias("o"))
            mlp_x, squares = rounded(h * vectors["mlp_gamma"].double()), h.square().sum(1)
            root = 2 / (squares / shape.hidden + self.eps).sqrt()
            if shape.experts:
                router = mlp_x @ vectors["router"].double().T
                by = router if routed_by is None else routed_by[layer].double()
                gated, y = self._routed(w, by, mlp_x, root, rounded)
            else:
                gate, up = (product("gate_up", mlp_x) * root[:, None] + bias("gate_up")).unflatten(1, (-1, 2, 8)).unbind(2)
                gated = rounded((torch.nn.functional.silu(gate) * up).flatten(1))
                y = product("down", gated)
            h = rounded(h + y + bias("down"))
            x, squares = rounded(h * vectors["next_gamma"].double()), h.square().sum(1)
            found.append({"qkv": qkv, "attended": attended, "mlp_x": mlp_x, "gated": gated, "next_x": x})
            if shape.experts:
                found[-1]["logits"] = router
        logits = None
        if self.head is not None:
            logits = x @ self.head_matrix.T * (2 / (squares / shape.hidden + self.eps).sqrt())[:, None]
            logits = logits + self.head_vectors.get("head bias", torch.zeros((), device=self.device)).double()
        return h, x, squares, logits, found

    def _routed(self, w, logits, x, root, rounded):
        """(gated of the chosen experts of all tokens one after another, their weighted sums [M, H])."""
        rule = RouterRule(self.table.shape.top_k, normalize=self.normalize)
        experts, weights = choose_reference(logits * root[:, None], None, rule)
        gated, y = [], torch.zeros_like(x)
        for token in range(len(x)):
            for e, weight in zip(experts[token].tolist(), weights[token].double(), strict=True):
                gate, up = (x[token] @ w["gate_up"][e].T * root[token]).unflatten(0, (-1, 2, 8)).unbind(1)
                gated.append(rounded((torch.nn.functional.silu(gate) * up).flatten()))
                y[token] += weight * (gated[-1] @ w["down"][e].T)
        return torch.cat(gated)[None], y

    def _attention(self, qkv: Tensor, vectors: dict[str, Tensor], window: int) -> Tensor:
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
            tokens = torch.arange(max(0, position + 1 - window) if window else 0, position + 1, device=self.device)
            keys, values = (
                vectors[name][table[tokens // PAGE], :, tokens % PAGE].double().repeat_interleave(a.group, 1) for name in "kv"
            )
            scores = torch.einsum("hd,thd->ht", q, keys) * a.scale
            if self.sinks:
                scores = torch.cat([scores, vectors["sinks"].double()[:, None]], 1)
            p = scores.softmax(1)[:, : len(tokens)]
            outputs.append(torch.einsum("ht,thd->hd", p, values).flatten())
        return torch.stack(outputs)

    def vector(self, vectors: Tensor, layer: int, name: str, width: int) -> Tensor:
        """A 16-bit vector [M, width] of a layer in `vectors`; "gated" of experts is [1, width], and "logits" are float32."""
        if name == "logits":
            start = layer * self.table.start("end") + self.table.start(name)
            return vectors[start : start + self.table.shape.tokens * width].view(torch.float32).view(-1, width)
        start = layer * self.table.start("end") + self.table.start(name)
        count = (self.table.shape.x_rows("down") if name == "gated" else self.table.shape.tokens) * width
        return vectors[start : start + count // 2].view(self.dtype).view(-1, width)


def forms_of_schemes(schemes: tuple[tuple[str, ...], ...]) -> tuple[tuple[UnitForm, ...], ...]:
    """`StepShape.forms` of the schemes of each product, in the order of PRODUCT_NAMES; a head has one scheme or none. Layer i
    has scheme i, modulo their number."""
    return tuple(tuple(map(unit_form_of, of_product)) for of_product in schemes)


def alike(scheme: str, head: str | None = None) -> tuple[tuple[str, ...], ...]:
    """Schemes of layers of one scheme, and of a head."""
    return (((scheme,),) * 4) + (() if head is None else (head,),)


def small_table(tokens=1, layers=1, hidden=128, intermediate=128, heads=2, kv_heads=1, head_dim=64, blocks=2, warps=4,
                schemes=None, vocab=0, windows=False, experts=0, top_k=1) -> StepTable:  # fmt: skip
    """A table of a small decoder for a few blocks of a few warps."""
    a = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, head_dim, norm_eps=1e-6)
    forms = forms_of_schemes(schemes or alike("w4a16_g128"))
    columns = intermediate * (tokens * top_k if experts else 1)
    shape = StepShape(layers, hidden, columns, a, tokens, forms, vocab, windows, experts, top_k)
    return StepTable(shape, blocks, warps)
