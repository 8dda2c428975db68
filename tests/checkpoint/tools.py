"""Checks one tool's files in both directions, with the tool itself. Run by hand, since no environment can hold all tools:

    python -m tests.checkpoint.tools TOOL PYTHON [WORK]

TOOL is a name of data/make.py, PYTHON the interpreter of a virtual environment with that tool, WORK a folder for the files,
which are kept and reused by later runs. PYTHON makes a tiny model's checkpoints and hashes the weights that the tool computes.
This script reads the checkpoints and compares hashes, converts them to lowbit's format and compares again, and writes every
kind of file that the tool reads (`READS`). PYTHON reads these files and hashes the weights once more. Prints the versions and a
line for each folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lowbit.checkpoint import CheckpointError, CheckpointReader, ForeignReader, GgufReader
from lowbit.models.convert_checkpoint import convert_checkpoint
from tests.checkpoint.foreign import sha

MAKE = Path(__file__).parent / "data" / "make.py"
READS = {
    "auto-round": ("gptq", "awq"),
    "autoawq": ("awq",),
    "gptqmodel": ("gptq", "awq"),
    "llmcompressor": ("compressed-tensors",),
}
"""Kinds of written files that each tool can read back."""
PACKAGES = {
    "auto-round": "auto-round", "autoawq": "autoawq", "gptqmodel": "gptqmodel",
    "llmcompressor": "llmcompressor compressed-tensors",
    "bitsandbytes": "bitsandbytes", "torchao": "torchao", "transformers": "", "modelopt": "nvidia-modelopt", "gguf": "gguf",
}  # fmt: skip
VERSIONS = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"


def run(*command: object) -> str:
    """Standard output of a command; if it fails, prints its standard error and exits."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-3000:]}")
    return done.stdout


def weights(folder: Path) -> dict[str, str]:
    """Hash of each layer's weights as lowbit reads them, from any kind of folder."""
    blocks = folder / "blocks.gguf"
    if blocks.exists():
        reader = GgufReader(blocks)
        names = [name for name in reader.tensors if reader.entry(name) is not None]
        return {name.removesuffix(".weight"): sha(reader.layer(name).dequantize()) for name in names}
    with CheckpointReader(folder) as own:
        if own.manifest is not None:
            return {name: sha(own.layer(name).dequantize()) for name in own.manifest.layers}
    with ForeignReader(folder) as foreign:
        return {name: sha(foreign.dequantize(name, torch.float32)) for name in foreign.entries}


def written(folder: Path, made: Path, kinds: tuple[str, ...]) -> dict[str, str]:
    """Converts a folder to lowbit's files and to each of `kinds` under `made`; returns the result by kind: "same weights",
    "other weights", or the reason of the refusal.
    """
    became, expected = {}, json.loads((folder / "expected.json").read_text())
    for kind in ("lowbit", *kinds):
        target = made / f"{folder.name}-as-{kind}"
        try:
            convert_checkpoint(folder, target, kind, overwrite=target.exists())
            became[kind] = "same weights" if weights(target) == expected else "other weights"
        except CheckpointError as error:
            became[kind] = f"refused ({str(error).partition(': ')[2][:90]})"
    return became


def main(tool: str, python: str, work: Path) -> None:
    """Makes the tool's files, reads and converts them, lets the tool read the converted files, and prints the results."""
    source, made, back = work / "model", work / tool, work / f"{tool}-back"
    if not source.exists():
        run(sys.executable, MAKE, "model", source, "-")
    if not made.exists():
        run(python, MAKE, tool, Path(f"{source}-wide") if tool == "autoawq" else source, made)
    print(f"{tool}: {run(python, '-c', VERSIONS, *PACKAGES[tool].split(), 'torch', 'transformers').strip()}")
    became, kinds = {}, READS.get(tool, ())
    for folder in sorted(path.parent for path in made.glob("*/expected.json")):
        for tokenizer in source.glob("tokenizer*.json"):
            shutil.copy(tokenizer, folder)
        equal = weights(folder) == json.loads((folder / "expected.json").read_text())
        gguf = (folder / "blocks.gguf").exists()
        became[folder.name] = {"read": "same weights" if equal else "other weights"}
        became[folder.name] |= {} if gguf else written(folder, back, READS.get(tool, ()))
    pairs = [(name, kind) for name, row in became.items() for kind in kinds if row[kind] == "same weights"]
    ours = [back / f"{name}-as-{kind}" for name, kind in pairs]
    read = json.loads(run(python, MAKE, tool, "--read", *ours).splitlines()[-1]) if ours else {}
    for name, digests in read.items():
        folder, _, kind = name.rpartition("-as-")
        if isinstance(digests, str):
            became[folder][kind] += f", {tool} refuses it ({digests[:120]})"
        else:
            equal = digests == json.loads((made / folder / "expected.json").read_text())
            became[folder][kind] += f", {tool} reads {'the same' if equal else 'OTHERS'}"
    for name, row in became.items():
        print(f"  {name}: " + "; ".join(f"{kind}: {result}" for kind, result in row.items()))


if __name__ == "__main__":
    place = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(tempfile.mkdtemp(prefix="lowbit-tools-"))
    main(sys.argv[1], sys.argv[2], place)
