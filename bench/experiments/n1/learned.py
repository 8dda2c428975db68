"""Seconds of learned rounding for a decoder layer of Llama-3-8B's shape: two layers, 64 pieces of 512 tokens, 100 and 200 steps of 8."""
import os, sys, time
import torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from tests.tiny import tiny_tokenizer
small = "SMALL" in os.environ
dev = "cuda" if torch.cuda.is_available() else "cpu"
h, f = (256, 512) if small else (4096, 14336)
config = LlamaConfig(vocab_size=160, hidden_size=h, intermediate_size=f, num_hidden_layers=2, num_attention_heads=h // 128, num_key_value_heads=max(1, h // 512), head_dim=128,
    max_position_embeddings=8192, dtype=torch.bfloat16, tie_word_embeddings=False, rope_theta=500000.0)
torch.manual_seed(0)
with torch.device(dev):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
source = Path("/tmp/learned8b")
model.save_pretrained(source); tiny_tokenizer().save_pretrained(source)
del model
