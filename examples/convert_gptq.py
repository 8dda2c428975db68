"""Converts a checkpoint quantized by GPTQ or another tool to lowbit's format, without rounding, and compares the logits of
both.

python examples/convert_gptq.py Llama-3-8B-GPTQ Llama-3-8B-lowbit
"""

import argparse

import torch

import lowbit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder of GPTQ, AWQ, auto-round, compressed-tensors, .. or a GGUF file")
    parser.add_argument("target", help="folder to write; it must not exist")
    parser.add_argument("--to", default="lowbit", help="or gptq, awq, compressed-tensors, tensorrt-llm, dequantized")
    arguments = parser.parse_args()
    report = lowbit.convert_checkpoint(arguments.source, arguments.target, arguments.to)
    print("\n".join(report.lines()))
    before, after = (lowbit.load(folder, device="cpu") for folder in (arguments.source, arguments.target))
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(before(input_ids=ids).logits, after(input_ids=ids).logits)
    print("both compute the same logits, bit by bit")


if __name__ == "__main__":
    main()
