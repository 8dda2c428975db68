"""Quantizes a model folder to 4 bits and prints the result for each layer.

python examples/quantize.py SmolLM2-135M-Instruct SmolLM2-int4 --scheme w4a16_g32 --method rtn
"""

import argparse

import lowbit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a 16-bit model, or its name on the hub")
    parser.add_argument("out", help="folder to write; it must not exist")
    parser.add_argument("--scheme", default="w4a16_g32")
    parser.add_argument("--method", default="rtn", help="rtn and hqq need no text; gptq, awq and learned calibrate")
    arguments = parser.parse_args()
    plan = lowbit.quantize_checkpoint(arguments.model, arguments.out, arguments.scheme, method=arguments.method)
    print("\n".join(plan.lines()))


if __name__ == "__main__":
    main()
