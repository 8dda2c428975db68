"""Continues prompts greedily: several in one batch, then one as a stream.

python examples/generate.py SmolLM2-int4 "Seattle is" "The capital of France is"
"""

import argparse

import lowbit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a GGUF file, or a name on the hub")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--scheme", help="quantize 16-bit weights while loading")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    pipe = lowbit.pipeline(arguments.model, scheme=arguments.scheme)
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    for prompt, response in zip(arguments.prompts, pipe(arguments.prompts, **options), strict=True):
        print(f"{prompt}{response.generated_text}  [{response.generated_length} tokens, {response.finish_reason.value}]")
    print(arguments.prompts[0], end="")
    for text in pipe.stream(arguments.prompts[0], **options):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
