"""Compares a quantized model with its 16-bit original on a built-in text: both perplexities and the KL divergence.

python examples/evaluate.py SmolLM2-int4 SmolLM2-135M-Instruct --tokens 2048
"""

import argparse

from transformers import AutoTokenizer

import lowbit
from lowbit.eval import divergence, perplexity, sample_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the quantized model: a folder, a GGUF file, or a name on the hub")
    parser.add_argument("reference", help="the 16-bit model, with the same tokenizer")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=1024, help="tokens that a model sees at once")
    arguments = parser.parse_args()
    text = sample_text()[: 8 * arguments.tokens]  # enough characters for the tokens
    ids = AutoTokenizer.from_pretrained(arguments.reference)(text, return_tensors="pt").input_ids[0, : arguments.tokens]
    model, reference = lowbit.load(arguments.model), lowbit.load(arguments.reference)
    for name, each in (("16 bits", reference), ("quantized", model)):
        print(f"{name:10} perplexity {perplexity(each, ids, window=arguments.window).perplexity:.3f}")
    found = divergence(model, reference, ids, window=arguments.window)
    print(f"divergence {found.mean:.5f} nats per token, {100 * found.top1:.1f} % of the top tokens agree")


if __name__ == "__main__":
    main()
