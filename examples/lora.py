"""Trains LoRA adapters of quantized layers on one sentence, and saves the adapters.

pip install peft
python examples/lora.py SmolLM2-int4 adapter
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowbit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder that lowbit quantized, with 16-bit activations")
    parser.add_argument("out", help="folder for the adapters")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    base = AutoModelForCausalLM.from_pretrained(arguments.model)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lowbit.support_lora(config, base))
    ids = tokenizer("One sentence of many that the model learns.", return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()
    for step in range(arguments.steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
