"""Families of decoders of Transformers that have a decode program. A family is a declaration: a row of FAMILIES.

It states properties that cannot be read from a model's modules. Heads, scales, windows and norms are read from the modules
(family_model.py, recognise.py). Written against transformers 5.17 to 5.23, models/<family>/modeling_<family>.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DenseMLPPaths:
    """Paths of a dense MLP and its products: `module` in a decoder layer, the others in that module."""

    module: str = "mlp"
    """"" if the products are modules of the layer itself."""
    up: str = ""
    """The product before the activation of an MLP without a gate; "" for gate_up_proj, or gate_proj and up_proj."""
    down: str = "down_proj"

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate."""
        return not self.up


@dataclass(frozen=True)
class ModulePaths:
    """Paths of a family's modules in the model, its decoder and its layers."""

    decoder: str = "model"
    final_norm: str = "norm"
    positions: str = ""
    """The position embedding; "" for rotary embeddings."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    o: str = "self_attn.o_proj"
    mlp: DenseMLPPaths = DenseMLPPaths()


@dataclass(frozen=True)
class Family:
    """Properties of a family's models that cannot be read from their modules.

    name: prefix of its class names, such as "Llama" of LlamaForCausalLM and LlamaDecoderLayer. norm_offset: added to the
    weights of norms. scales_embedding: embeddings are multiplied by sqrt(hidden). normalises_deltas: norms follow attention and
    MLP. window_of_model: all layers have the config's window. softcaps_scores: attention scores have the soft cap of the
    attention module. ropes_by_type: rotary angles depend on the type of the layer. layer_norms: norms are torch's LayerNorm,
    else the family's RMSNorm. experts: end of the class name of the block of experts that is the MLP of some or all layers; ""
    without experts. router: path of the router in that block. norms_whole_heads: the norms of q and k are over all heads
    together. single_angles: the rotary embedding returns each angle once, not once for each element of a pair. fixed: rows
    (option of the config, its only supported value, meaning of any other value).
    """

    name: str
    paths: ModulePaths = ModulePaths()
    norm_offset: float = 0.0
    scales_embedding: bool = False
    normalises_deltas: bool = False
    window_of_model: bool = False
    softcaps_scores: bool = False
    ropes_by_type: bool = False
    layer_norms: bool = False
    experts: str = ""
    router: str = "gate"
    norms_whole_heads: bool = False
    single_angles: bool = False
    fixed: tuple[tuple[str, object, str], ...] = ()


FAMILIES = {
    family.name: family
    for family in (
        Family("Llama"),
        Family("Mistral", window_of_model=True),
        Family("Qwen2"),
        Family("Qwen3"),
        Family("SmolLM3"),
        Family("Mixtral", window_of_model=True, experts="SparseMoeBlock"),
        Family("Qwen2Moe", experts="SparseMoeBlock"),
        Family("Qwen3Moe", experts="SparseMoeBlock"),
        Family(
            "Olmoe",
            experts="SparseMoeBlock",
            norms_whole_heads=True,
            fixed=(("clip_qkv", None, "q, k and v are clamped"),),
        ),
        Family("GptOss", experts="MLP", router="router", single_angles=True),
        Family("Phi3", window_of_model=True),
        Family("Gemma", norm_offset=1.0, scales_embedding=True),
        Family("Gemma2", norm_offset=1.0, scales_embedding=True, normalises_deltas=True, softcaps_scores=True),
        Family("Gemma3", norm_offset=1.0, scales_embedding=True, normalises_deltas=True, ropes_by_type=True),
        Family(
            "OPT",
            ModulePaths(
                decoder="model.decoder",
                final_norm="final_layer_norm",
                positions="embed_positions",
                norms=("self_attn_layer_norm", "final_layer_norm"),
                o="self_attn.out_proj",
                mlp=DenseMLPPaths(module="", up="fc1", down="fc2"),
            ),
            layer_norms=True,
            fixed=(
                ("do_layer_norm_before", True, "norms stand after attention and MLP, not before"),
                ("_remove_final_layer_norm", False, "no norm stands before the head"),
            ),
        ),
    )
}
"""Families by name."""
