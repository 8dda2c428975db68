"""Quantizes a small ResNet to 4 bits, saves it, loads it and compares its outputs with the float32 model's.

    python examples/cnn.py resnet-w4a4 --scheme w4a4

The model and the images are random here. Use a trained model and a few hundred of your own images.
"""

import argparse

import torch
from transformers import ResNetConfig, ResNetForImageClassification

from lowbit import vision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--scheme", default="w8a8", help="w8a8, w8a4, w4a4 or w4a8")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128], depths=[1, 1], layer_type="basic", num_labels=10)
    model, images = ResNetForImageClassification(config).eval(), torch.randn(32, 3, 32, 32)
    network = vision.quantize(model, images, scheme=arguments.scheme)
    print("\n".join(network.lines()))
    vision.save(network, arguments.out)
    network = vision.load(arguments.out)
    with torch.no_grad():
        same = network(images).argmax(1) == model(images).logits.argmax(1)
    print(f"{int(same.sum())} of {len(same)} answers are those of float32")


if __name__ == "__main__":
    main()
