"""Tiny random models of real architectures, and weights with a permuted and scaled input."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from lowbit.formats import QuantTensor


def tiny_llama(tied=True, bias=False, dtype=torch.float16):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attention_bias=bias, max_position_embeddings=256, dtype=dtype,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def eager_llama(dtype=torch.float32):
    """A tiny Llama whose next token depends on all earlier tokens. Most random weights would repeat one token forever."""
    model = tiny_llama(tied=False, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
    return model.eval()


def eager_opt(dtype=torch.float32, **options):
    """A tiny OPT whose next token depends on all earlier tokens: LayerNorm, learned positions, biases, an MLP without a
    gate.
    """
    torch.manual_seed(0)
    sizes = dict(vocab_size=160, hidden_size=64, ffn_dim=192, num_hidden_layers=2, num_attention_heads=4)
    model = OPTForCausalLM(OPTConfig(**{**sizes, "max_position_embeddings": 512, "dropout": 0.0, **options}))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 0.5 if "embed" in name else 2 * parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=scale)
        else:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    return model.to(dtype).eval()


def tiny_tokenizer(vocab_size=160):
    """A tokenizer of single characters with BOS and EOS, without a padding token."""
    characters = [chr(c) for c in range(32, 127)]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *characters])}
    assert len(vocab) <= vocab_size
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_tiny(path, **options):
    """Saves the tiny Llama and its tokenizer; returns the folder."""
    tiny_llama(**options).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def with_channels(q: QuantTensor, order=True, pre_quant_scale: torch.dtype | None = torch.float32, seed=0) -> QuantTensor:
    """`q` with a random order and input scales between 1/2 and 2."""
    generator = torch.Generator().manual_seed(seed)
    k, device = q.shape[1], q.codes.device
    permutation = torch.randperm(k, generator=generator).to(device, torch.int32)
    factors = (0.5 + 1.5 * torch.rand(k, generator=generator)).to(device)
    return q.with_input(
        order=permutation if order else None,
        pre_quant_scale=None if pre_quant_scale is None else factors.to(pre_quant_scale),
    )


def json_tokenizer(vocab_size=160):
    """A tokenizer that grammars can read: characters, tokens of several characters, which only sampling uses, and tags."""
    several = ['{"', '":', '",', "true", "null", "\u2581the", "</", "\n\n"]
    special = ["<s>", "</s>", "<unk>", *["<think>", "</think>", "<tool_call>", "</tool_call>"]]
    tokens = [*special, "<0x0A>", "<0x09>", "\u2581", *[chr(c) for c in range(33, 127)], *several]
    assert len(tokens) <= vocab_size
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    # tags are tokens, but not special tokens, as in Qwen's tokenizer
    inner.add_tokens([AddedToken(tag, normalized=False) for tag in special[3:]])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
