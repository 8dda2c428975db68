"""Language models of known shapes with random weights: the time of a step does not depend on their values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from benchmarks.limits import weight_bytes as matrix_bytes
from lowbit.engine.shard import ShardPlan
from lowbit.engine.shard_loading import rank_model
from lowbit.formats import ExpertTensor, QuantTensor, pack_words, parse_scheme
from lowbit.kernels.choose.experts import experts_hit
from lowbit.models.experts import experts_per_token
from lowbit.models.head import quantize_head
from lowbit.nn import QuantExperts, QuantLinear
from lowbit.nn.convert import swap, swap_experts
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import ExpertWeights, expert_weights
from lowbit.quantize import rtn

POSITIONS, TABLE_POSITIONS = 1 << 18, 1 << 16
"""Maximum context lengths, longer than the models were trained for; the time of a step does not depend on them. RoPE's table of
2^18 positions takes 128 MiB with heads of 128; OPT's embedding of 2^16 positions takes 0.9 GB, and is a weight."""


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=POSITIONS, tie_word_embeddings=False, rms_norm_eps=1e-5, eos_token_id=None,
    )  # fmt: skip


def _opt(hidden: int, intermediate: int, layers: int, heads: int) -> OPTConfig:
    return OPTConfig(
        hidden_size=hidden, ffn_dim=intermediate, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=50272,
        max_position_embeddings=TABLE_POSITIONS, eos_token_id=None,
    )  # fmt: skip


def _mixture(kind: type[PreTrainedConfig], hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: object
) -> PreTrainedConfig:  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": more.pop("theta", 10000.0)}
    return kind(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab,
        max_position_embeddings=POSITIONS, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None,
        **{"rope_parameters": rope, **more},
    )  # fmt: skip


def _qwen3_30b() -> PreTrainedConfig:
    return _mixture(
        Qwen3MoeConfig, 2048, 48, 32, 4, 151936, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, theta=1e6, rms_norm_eps=1e-6,
    )  # fmt: skip


def _mixtral_8x7b() -> PreTrainedConfig:
    return _mixture(
        MixtralConfig, 4096, 32, 32, 8, 32000, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, theta=1e6,
        rms_norm_eps=1e-5,
    )  # fmt: skip


def _gpt_oss_20b() -> PreTrainedConfig:
    yarn = {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    return _mixture(
        GptOssConfig, 2880, 24, 64, 8, 201088, head_dim=64, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, rope_parameters=yarn,
    )  # fmt: skip


def _olmoe_7b() -> PreTrainedConfig:
    return _mixture(
        OlmoeConfig, 2048, 16, 16, 16, 50304, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False, rms_norm_eps=1e-5,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Llama-3-8B": lambda: _llama(4096, 14336, 32, 32, 8, 128256, 500000.0),
    "Llama-2-13B": lambda: _llama(5120, 13824, 40, 40, 40, 32000, 10000.0),
    "Llama-2-70B": lambda: _llama(8192, 28672, 80, 64, 8, 32000, 10000.0),
    "SmolLM2-135M": lambda: _llama(576, 1536, 30, 9, 3, 49152, 100000.0),
    "OPT-30B": lambda: _opt(7168, 28672, 48, 56),
    "Qwen3-30B-A3B": _qwen3_30b,
    "Mixtral-8x7B": _mixtral_8x7b,
    "gpt-oss-20b": _gpt_oss_20b,
    "OLMoE-1B-7B": _olmoe_7b,
}
"""Configurations from the models' config.json, except for the positions."""

OWN_SCHEMES = {"gpt-oss-20b": ("w4e2m1a16_g32",)}
"""Schemes in which models were published, here MXFP4. They are measured in addition to the requested schemes."""

ROLL = 16
"""Each expert's matrix is that of the expert before, rolled by this many rows."""


def meta_model(shape: str, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
    """Returns the model of a shape on the meta device, without weights. `layers` limits its number of layers. Raises ValueError
    for a shape that is not in `SHAPES`.
    """
    if shape not in SHAPES:
        raise ValueError(f"models are {', '.join(SHAPES)}, got {shape!r}")
    config = SHAPES[shape]()
    config.dtype = dtype
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    return model


def random_part(
    rank: int, device: torch.device, *, ranks: int, shape: str, scheme: str | None, head: str | None, dtype: torch.dtype,
    layers: int | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Returns the part that one of `ranks` ranks has of a `random_model`. All parts have the same weights."""
    model = rank_model(ShardPlan.of(meta_model(shape, dtype, layers), ranks), shape).eval()
    return _filled(model, scheme, head, dtype, device)


def random_model(
    shape: str, scheme: str | None, head: str | None, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> PreTrainedModel:
    """Returns a model of a shape with Gaussian weights. Linear layers and experts are in `scheme`, LM head and embedding in
    `head`; None means `dtype`. `layers` limits the number of layers. Layers share no memory, and only one at a time is in 16
    bits while the model is built. The quantized experts of a layer share one rounded matrix, whose rows are rolled differently
    for each expert.

    Raises ValueError for a shape that is not in `SHAPES`.
    """
    return _filled(meta_model(shape, dtype, layers), scheme, head, dtype, device)


def _filled(
    model: PreTrainedModel, scheme: str | None, head: str | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Returns the meta model with Gaussian weights, as `random_model` describes them."""
    for name, module in list(model.named_modules()):
        if name.endswith("rotary_emb"):  # has buffers only, no parameters
            model.set_submodule(name, type(module)(config=model.config).to(device))
    generator = torch.Generator(device).manual_seed(0)
    ends = {model.get_output_embeddings(), model.get_input_embeddings()}
    own = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    for name in own:  # names only: a list of modules would keep replaced ones alive
        module = model.get_submodule(name)
        experts = expert_weights(module)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if experts is not None and key in experts.shapes:
                if scheme is None:
                    made = torch.empty(parameter.shape, dtype=dtype, device=device)
                    made.normal_(0, _expert_scale(experts, key, model), generator=generator)
                    setattr(module, key, nn.Parameter(made, requires_grad=False))
                continue
            made = torch.full(parameter.shape, float(key != "bias"), dtype=dtype, device=device)
            if parameter.dim() == 2:
                scale = 1.0 if isinstance(module, nn.Embedding) else parameter.shape[1] ** -0.5
                made.normal_(0, scale, generator=generator)
            setattr(module, key, nn.Parameter(made, requires_grad=False))
        if isinstance(module, nn.Linear) and scheme is not None and module not in ends:
            packed = swap(model, name, rtn(module.weight, parse_scheme(scheme)))
            packed.prepare(dtype)
        if experts is not None and scheme is not None:
            for key, (n, k) in experts.shapes.items():
                one = torch.randn(n, k, device=device, generator=generator) * _expert_scale(experts, key, model)
                part = swap_experts(model, f"{name}.{key}", _rolled(rtn(one, parse_scheme(scheme)), experts.experts))
                part.forms_for(dtype)
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    if head is not None:
        quantize_head(model, head)
    return model


def _expert_scale(experts: ExpertWeights, key: str, model: PreTrainedModel) -> float:
    """Returns the standard deviation of an expert's weights. It is smaller for the second matrix, whose results are added to
    the residual stream, so that the layers together do not amplify the stream. Otherwise rounding that changes a router's
    choice in one layer would change the choices in all later layers."""
    scale: float = experts.shapes[key][1] ** -0.5
    return scale * (2 * model.config.num_hidden_layers) ** -0.5 if key == experts.second else scale


def _rolled(q: QuantTensor, count: int) -> ExpertTensor:
    """Returns `count` experts with the rows of q, rolled differently for each expert."""
    tensors = (pack_words(q.codes, q.scheme.weight.bits), q.scale, q.zero)
    packed, scale, zero = (
        None if t is None else torch.stack([t.roll(ROLL * e, 0) if len(t) == len(q.codes) else t for e in range(count)])
        for t in tensors
    )
    assert packed is not None and scale is not None
    return ExpertTensor(packed, scale, zero, q.scheme, tuple(q.codes.shape))  # type: ignore[arg-type]


def weight_bytes(model: PreTrainedModel, tokens: int | None = None) -> float:
    """Returns the bytes of all weights that a step reads, as they are stored. Embeddings do not count, since a step reads only
    single rows of them.

    With `tokens`, only the experts count that a step of so many tokens is expected to hit, if each token chooses its experts
    independently and uniformly. Otherwise all experts count.
    """
    held = 0.0
    inside = set[nn.Module]()
    for module in model.modules():
        if module in inside or isinstance(module, (nn.Embedding, QuantEmbedding)):
            continue
        experts = module.weights if isinstance(module, QuantExperts) else expert_weights(module)
        if experts is not None:
            inside.update(module.modules())
            top_k = experts_per_token(model.config)
            hit = experts.experts if tokens is None else experts_hit(tokens, top_k, experts.experts)
            held += hit * _expert_bytes(module, experts)
        elif isinstance(module, QuantLinear):
            held += module.weight_nbytes + (0 if module.bias is None else module.bias.nbytes)
        else:
            held += sum(p.nbytes for p in module.parameters(recurse=False))
    return held


def _expert_bytes(module: nn.Module, experts: ExpertWeights) -> float:
    """Bytes of codes, scales and biases of one expert."""
    schemes = {name: part.scheme for name, part in module.packed().items()} if isinstance(module, QuantExperts) else {}
    biases = [getattr(module, f"{name}_bias", None) for name in experts.shapes]
    of_biases = sum(t.nbytes for t in biases if isinstance(t, Tensor)) / experts.experts
    return of_biases + sum(matrix_bytes(schemes.get(name), n, k) for name, (n, k) in experts.shapes.items())
