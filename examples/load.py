"""Loads a model in any supported format, and prints its size and a predicted token.

python examples/load.py SmolLM2-int4            # a lowbit, GPTQ or AWQ folder, a GGUF file, or a hub name
python examples/load.py SmolLM2-135M-Instruct --scheme w8a16     # quantizes 16-bit weights while loading
"""

import argparse

import torch
from transformers import AutoTokenizer

import lowbit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--scheme", help="for 16-bit models")
    parser.add_argument("--prompt", default="The light of the sun")
    arguments = parser.parse_args()
    model = lowbit.load(arguments.model, scheme=arguments.scheme)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}  # tied weights count once
    quantized = [name for name, layer in model.named_modules() if isinstance(layer, lowbit.QuantLinear)]
    print(f"{len(quantized)} quantized layers, {sum(t.nbytes for t in tensors.values()):,} bytes on {model.device}")
    ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids.to(model.device)
    with torch.no_grad():
        token = model(input_ids=ids).logits[0, -1].argmax()
    print(repr(tokenizer.decode(token)))


if __name__ == "__main__":
    main()
