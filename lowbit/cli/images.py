"""`lowbit eval-images`, `lowbit import-onnx` and `lowbit export-onnx`: measure the accuracy of image networks, and convert them
from and to ONNX."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lowbit.cli.terminal import Json, check_json, load_layers, out, say, write_result

if TYPE_CHECKING:
    from lowbit.vision import QuantizedNetwork
    from lowbit.vision.evaluate import Labelled, Preparation

SCHEMES = ("w8a8", "w8a4", "w4a8", "w4a4")
Size = Annotated[int, typer.Option(help="Height and width of the network's images, cut out of the centre.")]
Resized = Annotated[int, typer.Option(help="Pixels to which the shorter side of a photograph is scaled before.")]
Mean = Annotated[str, typer.Option(help="Means of red, green and blue that the network expects, of pixels from 0 to 1.")]
Deviation = Annotated[str, typer.Option(help="Standard deviations of red, green and blue.")]
Compensation = Annotated[
    bool, typer.Option("--compensation", help="Round 4-bit weights by GPTQ and correct means (docs/vision.md).")
]
MostDivergence = Annotated[
    float | None, typer.Option(help="Keep layers in int8 until results differ by at most this much, such as 0.01 nats.")
]
Calibration = Annotated[int, typer.Option(help="Number of images for calibration, evenly spaced.")]
MEAN, DEVIATION = "0.485,0.456,0.406", "0.229,0.224,0.225"


def eval_images(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with one folder of images per class, in order of names.")
    ],
    model: Annotated[
        Path,
        typer.Option(help="ResNet checkpoint of torchvision (.pth, .safetensors), a network saved by lowbit, or an ONNX file."),
    ],
    labels: Annotated[
        Path | None, typer.Option(help="File with lines FILE CLASS (classes from 0), instead of folders of classes.")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Also quantize to w8a8, w8a4, w4a8 or w4a4, and evaluate that beside it.")
    ] = None,
    calibration: Calibration = 256,
    compensation: Compensation = False,
    most_divergence: MostDivergence = None,
    limit: Annotated[int | None, typer.Option(help="Evaluate this many images, evenly spaced; all by default.")] = None,
    batch: Annotated[int, typer.Option(help="Images per batch.")] = 64,
    size: Size = 224,
    resized: Resized = 256,
    mean: Mean = MEAN,
    deviation: Deviation = DEVIATION,
    json_file: Json = None,
) -> None:
    """Measure top-1 and top-5 accuracy of an image network on a folder of labelled photographs, with standard errors.

    Photographs are prepared as by torchvision. With --scheme, some of them calibrate and are left out of the evaluation of all
    networks. Runs on a GPU if there is one.

    Example: lowbit eval-images imagenet/val --model resnet50.pth --scheme w8a4
    """
    _check_scheme(scheme)
    if not model.exists():
        raise ValueError(f"--model {model}: no such file or folder")
    for name, number in (("--batch", batch), ("--limit", limit), ("--calibration", calibration)):
        if number is not None and number < 1:
            raise ValueError(f"{name} {number}: at least 1")
    if scheme is None and (compensation or most_divergence is not None):
        raise ValueError("--compensation and --most-divergence quantize; add --scheme")
    check_json(json_file, "lowbit eval-images")
    load_layers("lowbit.vision")
    import torch

    from lowbit.vision.evaluate import Preparation, labelled
    from lowbit.vision.network import QuantizedNetwork, quantize

    preparation = Preparation(resized, size, _three("--mean", mean), _three("--deviation", deviation))
    images = labelled(folder, labels)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = _network(model)
    networks: dict[str, Any] = {}
    if scheme is not None:
        if isinstance(network, QuantizedNetwork):
            raise ValueError(f"{model} is quantized already; leave out --scheme, or give the original network")
        seen, images = images.split(min(calibration, len(images.paths) // 2 or 1))
        say(f"calibrating on {len(seen.paths)} images")
        batches = [preparation.batch(seen.paths[i : i + 64]) for i in range(0, len(seen.paths), 64)]
        networks[scheme] = quantize(
            network.to(device), batches, scheme, compensation=compensation, most_divergence=most_divergence, say=say
        )
    first = network.scheme if isinstance(network, QuantizedNetwork) else "fp32"
    networks = {first: network.to(device), **networks}
    rows = _evaluated(networks, images if limit is None else images.first(limit), preparation, batch, device)
    if str(json_file) != "-":
        table = Table("network", "top-1, %", "top-5, %", "as the first, %", "images", "seconds", box=None, padding=(0, 2, 0, 0))
        for row in rows:
            figures = (f"{row[key]['mean']:.2f} ± {row[key]['error']:.2f}" for key in ("top1", "top5", "same"))
            table.add_row(row["network"], *figures, f"{row['count']:,}", f"{row['seconds']:.1f}")
        out.print(table)
    write_result(
        json_file,
        "lowbit eval-images",
        {"model": str(model), "device": device, "preparation": asdict(preparation), "rows": rows},
    )


def _evaluated(
    networks: dict[str, Any], images: Labelled, preparation: Preparation, batch: int, device: str
) -> list[dict[str, Any]]:
    """Returns a row for each network. `same` is the percentage of images for which it gives the same answer as the first
    network."""
    import torch

    from lowbit.progress import Progress, periodic_lines
    from lowbit.vision.evaluate import answers, figure, right_answers

    rows: list[dict[str, Any]] = []
    expected = torch.zeros(0)
    total = len(images.paths) * len(networks)
    with Progress(desc="evaluating", unit="images", total=total) as bar, periodic_lines():
        for name, network in networks.items():
            start, first, fifth, said = time.perf_counter(), [], [], []
            for logits, labels in answers(network, images, preparation, batch=batch, device=device):
                one, five = right_answers(logits, labels)
                first.append(one)
                fifth.append(five)
                said.append(logits.argmax(1))
                bar.update(len(labels))
            said_all = torch.cat(said)
            expected = expected if rows else said_all
            row = {"top1": torch.cat(first), "top5": torch.cat(fifth), "same": 100.0 * (said_all == expected)}
            figures = {key: asdict(figure(values)) for key, values in row.items()}
            rows.append({"network": name, **figures, "count": len(said_all), "seconds": time.perf_counter() - start})
    return rows


def import_onnx(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="ONNX file of opset 17 or newer.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="New folder for the quantized network.")],
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of photographs for calibration. Without it, the file's QDQ nodes give the scales."),
    ] = None,
    scheme: Annotated[str | None, typer.Option(help="With --images: w8a8 (default), w8a4, w4a8 or w4a4.")] = None,
    calibration: Calibration = 256,
    compensation: Compensation = False,
    most_divergence: MostDivergence = None,
    size: Size = 224,
    resized: Resized = 256,
    mean: Mean = MEAN,
    deviation: Deviation = DEVIATION,
) -> None:
    """Convert an ONNX network to an integer network that lowbit runs: from its QDQ nodes, or quantized with images.

    Nodes that are not supported are refused by name. Load the result with lowbit.vision.load.

    Example: lowbit import-onnx model.onnx -o network --images photographs --scheme w8a8
    """
    _check_scheme(scheme)
    if images is None and (scheme is not None or compensation or most_divergence is not None):
        raise ValueError("--scheme, --compensation and --most-divergence quantize with images; add --images FOLDER")
    load_layers("lowbit.vision")
    from lowbit.vision import quantize, read_onnx, save
    from lowbit.vision.evaluate import Preparation, images_in

    network = read_onnx(file)
    if images is None:
        quantized = network.quantized(None if min(network.image_shape[1:]) > 0 else (size, size))
    else:
        preparation = Preparation(resized, size, _three("--mean", mean), _three("--deviation", deviation))
        paths = images_in(images)
        if not paths:
            raise ValueError(f"--images {images}: no images in it")
        count = min(calibration, len(paths))
        chosen = [paths[i * len(paths) // count] for i in range(count)]
        say(f"calibrating on {count} images")
        batches = [preparation.batch(chosen[i : i + 64]) for i in range(0, count, 64)]
        quantized = quantize(
            network, batches, scheme or "w8a8", compensation=compensation, most_divergence=most_divergence, say=say
        )
    save(quantized, output, say=say)
    say(f"wrote {output}: {_summary(quantized)}")


def export_onnx(
    network: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a network that lowbit.vision.save wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="ONNX file to write.")],
) -> None:
    """Write an integer network as an ONNX file with QDQ nodes (opset 21), for TensorRT, onnxruntime and other tools.

    Example: lowbit export-onnx network -o network.onnx
    """
    if not network.is_dir():
        raise ValueError(f"{network}: no such folder")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"{output}: no folder {output.parent}; create it first")
    load_layers("lowbit.vision")
    from lowbit.vision import load, write_onnx

    write_onnx(load(network), output)
    say(f"wrote {output}: {output.stat().st_size / 2**20:.1f} MiB")


def _network(model: Path) -> Any:
    """Returns the network at a path: a saved one, an ONNX file, or a ResNet's checkpoint."""
    from lowbit.vision import load, read_onnx
    from lowbit.vision.resnet import load_resnet

    if model.is_dir():
        return load(model)
    return read_onnx(model) if model.suffix == ".onnx" else load_resnet(model)


def _summary(network: QuantizedNetwork) -> str:
    kept = network.kept
    stays = f"; {len(kept)} operations stay in floating point, such as {next(iter(kept))}" if kept else ""
    return network.lines()[0] + stays


def _check_scheme(scheme: str | None) -> None:
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"--scheme {scheme}: image networks are quantized to {', '.join(SCHEMES)}")


def _three(option: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{option} {text}: three numbers with commas, such as {MEAN}")
    return numbers
