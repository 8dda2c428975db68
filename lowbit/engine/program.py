"""The decode step of a language model as a list of operators: products with packed weights, and the operators between them.

    embed | norm  qkv  attention  o | norm  gate-up  gate  down | ... | norm  head

A layer takes eight launches on a GPU, five for up to 64 tokens (chain.py); a step of up to 8 tokens can be one launch
(one_launch.py). Prompts use the same products, with all their tokens at once; on a GPU they are padded to the sizes of
ragged.py. kernels/reference/ defines each operator and runs on a CPU.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.engine.cache import Cache, CacheSpec
from lowbit.engine.chain import Chain, chain_of
from lowbit.engine.decoder import PRODUCTS, Decoder, DecoderLayer, ExpertsMLP, ProductName
from lowbit.engine.experts import ExpertMLP, NormedQkv, ResidualRouter, SlotOutputs, expert_mlp_of
from lowbit.engine.graphs import Graphs
from lowbit.engine.lora import Adapters, LoraStep
from lowbit.engine.one_launch import ExpertSteps, OneLaunch, expert_steps_of, one_launch_of
from lowbit.engine.product import Packed, Product, Scaled, gated_product, product
from lowbit.engine.prompt_attention import PromptAttention, RaggedAttention
from lowbit.engine.ragged import Ragged, sizes
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots
from lowbit.formats.kv import KV16, KVScheme
from lowbit.hardware.machine import features_of
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.nn import QuantLinear
from lowbit.ops import add_norm_quantize, silu_mul_quantize
from lowbit.ops.attention import append_kv, decode_attention
from lowbit.ops.elementwise import activate, add_norm, embed_norm, gate
from lowbit.ops.peers import ROWS, Peers
from lowbit.ops.ranks import Ranks

Delta = Tensor | SlotOutputs
"""What a layer adds to the residual stream [M, H]."""


@dataclass(frozen=True)
class Layer:
    """A decoder layer as the program computes it: its products and its attention. spec: its modules, norms and rotary type.
    gate_up: only up in an MLP without a gate. experts: the whole MLP of a layer with experts; gate_up and down are then None.
    fused: computes o and the router of small steps in one product, if the layer supports that."""

    spec: DecoderLayer
    qkv: Product
    o: Product
    gate_up: Product | None
    down: Product | None
    shape: AttentionShape
    experts: ExpertMLP | None = None
    fused: ResidualRouter | None = None

    @property
    def alternates(self) -> bool:
        """True if columns of gate and up alternate."""
        return isinstance(self.gate_up, Packed) and self.gate_up.alternates

    def product(self, name: ProductName) -> Product | None:
        """Returns a product by its name; None for gate_up and down of a layer with experts."""
        product: Product | None = getattr(self, name)
        return product


class DecodeProgram:
    """The program of a decoder. `cache` has the keys and values of all sequences, in the format `kv`. With `ranks` the decoder
    is one rank's part (shard.py): the outputs of o and of down are summed over all ranks, and logits are gathered."""

    reasons: tuple[str, ...] = ()
    is_paged = True

    def __init__(
        self, decoder: Decoder, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool, kv: KVScheme = KV16,
        persistent_step: bool | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.dtype, self.device, self.batch_invariant = decoder, dtype, device, batch_invariant
        self.ranks = ranks
        if ranks is not None:
            ranks.use_peers(decoder.hidden, dtype)
        self.kv = kv
        self.layers = [self._layer(spec) for spec in decoder.layers]
        self.head = product([decoder.head], batch_invariant)
        self.table = decoder.table
        self.chain: Chain | tuple[str, ...] = ("its sums are not those of larger steps (batch_invariant)",)
        products = [(row.qkv, row.o, row.gate_up, row.down) for row in self.layers if row.gate_up and row.down]
        if len(products) < len(self.layers):
            self.chain = ("its MLPs are experts, which no product of a chain computes",)
        elif any(row.spec.qk_norms for row in self.layers):
            self.chain = ("norms of whole q and k stand before attention",)
        elif not batch_invariant:
            self.chain = chain_of(decoder, products, self.head, dtype, ranks)
        self.one_launch: OneLaunch | tuple[str, ...] | None = None
        """Computes small steps in one launch, or the reasons why it cannot. None if `persistent_step` is False, and on a CPU
        unless it is True."""
        if persistent_step or (persistent_step is None and device.type == "cuda"):
            measured = persistent_step is None
            several = ("one launch a step computes on one GPU, this model is on several",)
            steps: Chain | ExpertSteps | tuple[str, ...] = self.chain
            if len(products) < len(self.layers) and not batch_invariant:
                steps = expert_steps_of(decoder, self.layers, self.head, dtype)
            self.one_launch = several if ranks else one_launch_of(decoder, steps, self.table, kv, measured=measured)
        self.ropes = [table.to(device) for table in decoder.ropes]
        self.cache: Cache | None = None
        self.adapters: Adapters | None = None
        """LoRA adapters of requests; None without any (`use_adapters`)."""

    def _layer(self, spec: DecoderLayer) -> Layer:
        invariant = self.batch_invariant
        for name in PRODUCTS:
            for module in spec.modules(name):
                if isinstance(module, QuantLinear) and self.device.type == "cuda":
                    module.prepare(self.dtype)
        qkv, o = (product(modules, invariant) for modules in (spec.qkv, [spec.o]))
        if spec.qk_norms:
            widths: list[Any] = [module.out_features for module in spec.qkv]
            gammas = [norm.weight.detach() for norm in spec.qk_norms]  # type: ignore[union-attr, operator]
            qkv = NormedQkv(qkv, widths, gammas, self.decoder.eps)
        shape = self.decoder.attention_shape(spec)
        if isinstance(spec.mlp, ExpertsMLP):
            experts = expert_mlp_of(spec.mlp, self.dtype, self.decoder.activation, invariant)
            fused = self._fused(spec, o, experts)
            return Layer(spec, qkv, o, None, None, shape, experts, fused)
        down = product([spec.mlp.down], invariant)
        if self.decoder.gated:
            gate_up = gated_product(spec.mlp.gate_up, spec.module, spec.mlp.down, self.decoder.activation, invariant)
        else:
            gate_up = product(spec.mlp.gate_up, invariant)
        return Layer(spec, qkv, o, gate_up, down, shape)

    def _fused(self, spec: DecoderLayer, o: Product, experts: ExpertMLP) -> ResidualRouter | None:
        """Returns the product that computes o and the router together in small steps; None if they are computed separately."""
        d = self.decoder
        plain = d.norm_offset == 0 and spec.mlp_bias is None and spec.after_attention_gamma is None
        if not plain or self.device.type != "cuda":
            return None
        return ResidualRouter.of(o, experts, spec.mlp_gamma, d.eps, self.dtype, features_of(self.device))

    @property
    def cache_spec(self) -> CacheSpec:
        """Layout of the pages of this model's cache."""
        shape = self.layers[0].shape
        return CacheSpec(len(self.layers), shape.kv_heads, shape.head_dim, self.dtype, self.kv)

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values of a page of tokens, in all layers."""
        return self.cache_spec.page_bytes

    def keep(self, running: abc.Sequence[Sequence]) -> None:
        """Does nothing: keys and values are in the pages of `cache`."""

    def allocate_cache(self, pages: int) -> None:
        """Allocates `pages` pages for keys and values."""
        self.cache = Cache(self.cache_spec, pages, self.device)

    def graphs(self) -> Graphs | None:
        """Returns the object that captures steps and prompts; None on a CPU."""
        return Graphs(self.device) if self.device.type == "cuda" else None

    def report(self, difference: float) -> list[str]:
        """Returns lines about the decoder, the cache and the launches per layer."""
        if isinstance(self.chain, Chain):
            count = 5 if self.ranks is None else 7
            launches = f"steps of up to {self.chain.most} tokens: {count} launches a layer"
        elif fused := [row.fused for row in self.layers if row.fused is not None]:
            launches = f"steps of up to {fused[0].most} tokens: 7 launches a layer of experts"
        else:
            launches = f"small steps take as many launches a layer as larger ones: {'; '.join(self.chain)}"
        lines = [] if self.one_launch is None else [self._one_launch_report(self.one_launch)]
        lines += [] if self.adapters is None else [str(self.adapters)]
        if self.ranks is not None:
            sums = "NCCL" if self.device.type == "cuda" else "gloo"
            if isinstance(self.ranks.peers, Peers):
                sums = f"peer memory for up to {ROWS} tokens, by NCCL for more"
            elif self.device.type == "cuda":
                sums += f", not by peer memory ({'; '.join(self.ranks.peers)})"
            lines.append(f"{self.ranks.size} ranks, each with its part of the weights; sums by {sums}")
        return [
            f"decode program of {self.decoder.family}, {len(self.decoder.layers)} layers; logits differ from Transformers' "
            f"forward by {difference:.1e}, relatively",
            f"cache: {self.cache}",
            launches,
            *lines,
        ]

    @staticmethod
    def _one_launch_report(one_launch: OneLaunch | tuple[str, ...]) -> str:
        if isinstance(one_launch, OneLaunch):
            return str(one_launch)
        return f"no step is one launch: {'; '.join(one_launch)}"

    @property
    def status(self) -> Tensor | None:
        """int32 [1], see `ModelProgram.status`."""
        return self.one_launch.status if isinstance(self.one_launch, OneLaunch) else None

    @property
    def captures_prompts(self) -> bool:
        """True unless attention scores have a soft cap."""
        return not self.softcaps

    def ragged_logits(self, ragged: Ragged, slots: Slots) -> Tensor:
        """Returns logits [sequences, V] after the last tokens of a ragged batch."""
        h, delta = self.prefill(ragged, slots)
        return self.logits(h[ragged.last], delta[ragged.last])

    def blank_logits(self, count: int) -> Tensor:
        """Returns logits [count, V] of a residual stream of zeros."""
        h = torch.zeros(count, self.decoder.hidden, dtype=self.dtype, device=self.device)
        return self.logits(h, h)

    def step(self, rows: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Returns logits [B, V] after the next token of the slots `rows` int32 [B]. Kernels are chosen for contexts of up to
        `longest` tokens (0: a full page table).
        """
        if isinstance(self.one_launch, OneLaunch) and self.one_launch.computes(len(rows), slots, longest):
            return self._capped(self.one_launch.step(self._cache, slots, rows))
        attend = self._attending(rows, slots.positions, slots, longest)
        return self._step(slots.tokens, rows, slots.positions, attend, self._lora(slots, rows))

    def verify(self, rows: Tensor, tokens: Tensor, positions: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Returns logits [B, V] after each of the tokens int32 [B]. Token i is at positions[i] of the slot rows[i]. Several
        consecutive tokens may be of one slot. With `batch_invariant` the logits have the same bits as those of `step`."""
        attend = self._attending(rows, positions, slots, longest, verify=True)
        return self._step(tokens, None, positions, attend, self._lora(slots, rows))

    def use_adapters(self, adapters: Adapters) -> None:
        """Computes the LoRA adapters of requests from now on. Must be called before the first step."""
        self.adapters = adapters
        if self.one_launch is not None:
            self.one_launch = ("one launch a step computes no LoRA adapters",)

    def _lora(self, slots: Slots, rows: Tensor) -> LoraStep | None:
        """Returns the adapters of the rows of a step or prompt, given their slots `rows` int32 [M]; None if the program has no
        adapters."""
        return None if self.adapters is None else self.adapters.step(slots.adapters, rows)

    def _attending(
        self, rows: Tensor, positions: Tensor, slots: Slots, longest: int, verify: bool = False
    ) -> Callable[[int, Tensor], Tensor]:
        """Returns a function that computes the attention of layer i from its qkv."""

        def attend(i: int, qkv: Tensor) -> Tensor:
            layer = self.layers[i]
            return decode_attention(
                qkv, self._cache.layer(i), slots.tables, positions, rows, self.ropes[layer.spec.rope], layer.shape,
                layer.spec.q_gamma, layer.spec.k_gamma, sinks=layer.spec.sinks,
                batch_invariant=self.batch_invariant, longest=longest, verify=verify,
            )  # fmt: skip

        return attend

    def _step(
        self, tokens: Tensor, rows: Tensor | None, positions: Tensor, attend: Callable[[int, Tensor], Tensor],
        lora: LoraStep | None,
    ) -> Tensor:  # fmt: skip
        """Returns logits [B, V] of a step; tokens and positions as in `_layers`."""
        if isinstance(self.chain, Chain) and len(tokens if rows is None else rows) <= self.chain.most:
            return self._capped(self.chain.step(tokens, rows, self.table, attend, lora))
        return self.logits(*self._layers(tokens, rows, positions, attend, lora))

    def prompt(self, chunks: abc.Sequence[PrefillChunk], slots: Slots) -> Tensor | None:
        """Returns logits [B, V] after the chunks that are the last of their prompts; None if no chunk is."""
        ragged, by_chunks = self._ragged(chunks, slots)
        h, delta = self.prefill(ragged, slots, by_chunks)
        last = ragged.last[: sum(chunk.last for chunk in chunks)]
        return self.logits(h[last], delta[last]) if len(last) else None

    def _ragged(self, chunks: abc.Sequence[PrefillChunk], slots: Slots) -> tuple[Ragged, PromptAttention | None]:
        """Returns chunks as tensors, and a `PromptAttention` if `RaggedAttention` cannot compute them, else None."""
        count = sum(len(chunk.tokens) for chunk in chunks)
        on_gpu = self.device.type == "cuda"
        # Chunks are padded on a GPU, so that kernels are not compiled for each length.
        ragged = Ragged.of(chunks, slots, sizes(count)[-1] if on_gpu else count)
        return ragged, None if on_gpu and not self.softcaps else PromptAttention(chunks, slots, invariant=self.batch_invariant)

    @property
    def mixes(self) -> bool:
        """True unless attention scores have a soft cap: prompts with a soft cap are computed chunk by chunk on a GPU."""
        return not self.softcaps

    def mixed_logits(self, ragged: Ragged, rows: Tensor, slots: Slots, longest: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the logits [B, V] that `step` returns for `rows`, and the logits [sequences, V] that `ragged_logits`
        returns."""
        return self._mixed(ragged, rows, slots, longest, ragged.last, None)

    def mixed_prompt(
        self, chunks: abc.Sequence[PrefillChunk], rows: Tensor, slots: Slots, longest: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits [B, V] that `step` returns for `rows`, and the logits that `prompt` returns for `chunks`."""
        ragged, by_chunks = self._ragged(chunks, slots)
        last = ragged.last[: sum(chunk.last for chunk in chunks)]
        decoded, prompted = self._mixed(ragged, rows, slots, longest, last, by_chunks)
        return decoded, prompted if len(last) else None

    def _mixed(
        self, ragged: Ragged, rows: Tensor, slots: Slots, longest: int, last: Tensor, attention: PromptAttention | None
    ) -> tuple[Tensor, Tensor]:
        """Returns logits after the next tokens of the slots `rows`, and after the tokens `last` of a ragged batch. Products
        compute both together, with the decoding sequences as the first rows. Attention is computed separately for both."""
        count, slot_of = len(rows), rows.long()
        tokens = torch.cat([slots.tokens[slot_of], ragged.ids])
        positions = torch.cat([slots.positions[slot_of], ragged.position_of])
        decode = self._attending(rows, slots.positions, slots, longest)
        prompts = self._attending_prompts(ragged, slots, attention)

        def attend(i: int, qkv: Tensor) -> Tensor:
            return torch.cat([decode(i, qkv[:count]), prompts(i, qkv[count:])])

        lora = self._lora(slots, torch.cat([rows, ragged.slot_of]))
        h, delta = self._layers(tokens, None, positions, attend, lora)
        picked = torch.cat([torch.arange(count, device=rows.device), count + last])
        logits = self.logits(h[picked], delta[picked])
        return logits[:count], logits[count:]

    @property
    def softcaps(self) -> bool:
        """True if attention scores have a soft cap, which `RaggedAttention` does not support."""
        return any(layer.shape.softcap for layer in self.layers)

    def prefill(self, ragged: Ragged, slots: Slots, attention: PromptAttention | None = None) -> tuple[Tensor, Delta]:
        """Returns the residual stream of the tokens of prompts, and the last layer's output, which is not added to it yet.
        `attention` replaces `RaggedAttention`.
        """
        attend = self._attending_prompts(ragged, slots, attention)
        return self._layers(ragged.ids, None, ragged.position_of, attend, self._lora(slots, ragged.slot_of))

    def _attending_prompts(
        self, ragged: Ragged, slots: Slots, attention: PromptAttention | None
    ) -> Callable[[int, Tensor], Tensor]:
        """Returns a function that computes the attention of prompts in layer i from their qkv."""
        attention_of = attention or RaggedAttention(ragged, self.layers[0].shape.kv_heads)

        def attend(i: int, qkv: Tensor) -> Tensor:
            layer, pages = self.layers[i], self._cache.layer(i)
            q = append_kv(
                qkv, pages, slots.tables, ragged.slot_of, ragged.position_of, self.ropes[layer.spec.rope], layer.shape,
                layer.spec.q_gamma, layer.spec.k_gamma,
            )  # fmt: skip
            return attention_of(q, pages, layer.shape, layer.spec.sinks)

        return attend

    @property
    def _cache(self) -> Cache:
        assert self.cache is not None
        return self.cache

    def _layers(
        self, tokens: Tensor, rows: Tensor | None, positions: Tensor, attend: Callable[[int, Tensor], Tensor],
        lora: LoraStep | None = None,
    ) -> tuple[Tensor, Delta]:  # fmt: skip
        """Returns the residual stream after all layers, and the last layer's output, which is not added to it yet. Tokens and
        positions are indexed by `rows`; without `rows` they have one element per row. lora: adapters of the rows.
        """
        d = self.decoder
        spec = self.layers[0].spec
        h, x = embed_norm(
            tokens, rows, self.table, spec.input_gamma, d.eps, self.dtype, scale=d.embedding_scale, offset=d.norm_offset,
            bias=spec.input_bias, positions=None if d.position_table is None else positions, position_table=d.position_table,
        )  # fmt: skip
        delta: Delta = h
        for i, layer in enumerate(self.layers):
            if i:
                after, spec = spec.after_mlp_gamma, layer.spec
                x = self._norm(layer.qkv, h, delta, spec.input_gamma, spec.input_bias, after)
            attended = attend(i, self._times(i, "qkv", x, lora))
            if layer.fused is not None and layer.experts is not None and len(h) <= layer.fused.most:
                bias = layer.fused.o.bias if lora is None else lora.bias(i, "o", attended, layer.fused.o.bias)
                delta = layer.experts.routed(*layer.fused(attended, h, bias))
                continue
            delta = self._total(self._times(i, "o", attended, lora), 0)
            x = self._norm(layer.gate_up, h, delta, spec.mlp_gamma, spec.mlp_bias, spec.after_attention_gamma)
            delta = self._mlp(i, x, lora)
        return h, delta

    def _times(self, i: int, name: ProductName, x: Any, lora: LoraStep | None) -> Tensor:
        """Returns the output of a product of layer i, with the LoRA adapters of the rows added."""
        product = self.layers[i].product(name)
        assert product is not None
        if lora is None:
            return product(x)
        if isinstance(product, NormedQkv):
            return product.normed(lora.multiply(i, name, product.product, x))
        return lora.multiply(i, name, product, x)

    def _mlp(self, i: int, x: Any, lora: LoraStep | None) -> Delta:
        """Returns the output of the MLP of layer i."""
        experts = self.layers[i].experts
        return self._total(self._times(i, "down", self._gated(i, x, lora), lora), 1) if experts is None else experts(x)

    def _total(self, delta: Tensor, phase: int) -> Tensor:
        """Returns the sum of all ranks' outputs: those of o in phase 0, those of down in phase 1."""
        return delta if self.ranks is None else self.ranks.total(delta, phase)

    def _norm(
        self, reader: Product | None, h: Tensor, delta: Delta, gamma: Tensor, bias: Tensor | None, after: Tensor | None
    ) -> Any:
        """Computes h += delta and returns the norm of h, which is the input of the product `reader`. It is quantized if
        `reader` takes 8-bit activations and the norm is a plain RMSNorm."""
        d = self.decoder
        plain = bias is None and after is None and d.norm_offset == 0
        if isinstance(delta, SlotOutputs):
            if plain and not (isinstance(reader, Scaled) and reader.is_fused):
                return delta.add_norm(h, gamma, d.eps)
            delta = delta.total()
        if isinstance(reader, Scaled) and reader.is_fused and plain:
            return add_norm_quantize(h, delta, gamma, d.eps, **reader.quantization())
        return add_norm(h, delta, gamma, d.eps, offset=d.norm_offset, post_gamma=after, bias=bias)

    def _gated(self, i: int, x: Any, lora: LoraStep | None) -> Any:
        """Returns the input of the product `down` of layer i, quantized if `down` takes 8-bit activations and the gate is
        SiLU."""
        layer = self.layers[i]
        if layer.alternates:
            assert isinstance(layer.gate_up, Packed)
            if lora is not None:
                return lora.gated(i, layer.gate_up, x, self.decoder.activation)
            return layer.gate_up.gated(x, self.decoder.activation)
        gate_up = self._times(i, "gate_up", x, lora)
        if not self.decoder.gated:
            return activate(gate_up, self.decoder.activation)
        if isinstance(layer.down, Scaled) and layer.down.is_fused and self.decoder.activation == "silu":
            first, second = gate_up.chunk(2, dim=-1)
            return silu_mul_quantize(first, second, **layer.down.quantization())
        return gate(gate_up, self.decoder.activation)

    def logits(self, h: Tensor, delta: Delta) -> Tensor:
        """Returns logits [B, V] of h + delta, where h is the residual stream [B, hidden] and delta the last layer's output."""
        d = self.decoder
        after = self.layers[-1].spec.after_mlp_gamma
        x = self._norm(None, h, delta, d.final_gamma, d.final_bias, after)
        logits = self.head(x)
        return self._capped(logits if self.ranks is None else self.ranks.gathered(logits, d.vocab))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.decoder.final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits
