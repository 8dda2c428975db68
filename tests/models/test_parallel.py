"""Tensor parallelism over two processes. Both have the logits of one process, or both give the same refusal."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lowbit import quantize_checkpoint
from lowbit.checkpoint import CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import InputParts, parse_scheme
from lowbit.models.parallel import parallel_refusals
from tests.tiny import tiny_llama, with_channels

SECONDS = 600

JOBS = {  # values: scheme on disk, scheme while loading, and the message of the refusal or None
    "plain": (None, None, None),
    "groups": ("w4a16_g8", None, None),
    "zero points": ("w8a16_g8_z", None, None),
    "float zeros": ("w4a16_g8_fz", None, None),
    "six bits": ("w6e3m2a16_g8", None, None),
    "while loading": (None, "w8a16_g8", "quantizing while loading works on one GPU"),
    "channels": ("w8a16", None, r"o_proj and 3 more: .* one scale for all input channels"),
    "activations": ("w8a8_g8", None, r"quantizes activations by all input channels"),
    "groups across ranks": ("w4a16_g64", None, r"its 64 input channels are no multiple of 2 GPUs times groups of 64"),
    "blocks": ("fp8_block", None, r"scales of blocks or of the whole tensor"),
    "order": ("order", None, r"an order, factors of the input"),
    "factors": ("factors", None, r"an order, factors of the input"),
    "low rank": ("low rank", None, r"a low-rank correction are not split"),
    "tied": ("tied", None, r"lm_head shares the quantized weights of model\.embed_tokens"),
}


def with_inputs(folder, target, order):
    """Writes the checkpoint with an order of channels or factors in every layer."""
    with CheckpointReader(folder) as reader, CheckpointWriter(target) as writer:
        layers = reader.manifest.layers
        changed = {n: with_channels(reader.layer(n), order, None if order else torch.float32) for n in layers}
        for name, q in changed.items():
            for suffix, tensor in layer_tensors(q).items():
                writer.add(f"{name}.{suffix}", tensor)
        for name in reader.names():
            if name.rpartition(".")[0] not in layers:
                writer.add(name, reader.get(name))
        config = {k: v for k, v in reader.config.items() if k != "quantization_config"}
        writer.finish(config, Manifest(reader.manifest.scheme, {n: LayerEntry.of(q) for n, q in changed.items()}))


def made(kind, root):
    """The folder of a checkpoint."""
    tied = kind == "tied"
    plain = root / ("plain-tied" if tied else "plain")
    if not plain.exists():
        tiny_llama(tied=tied, bias=True).save_pretrained(plain)
    if kind is None:
        return plain
    target = root / kind.replace(" ", "-")
    if kind in ("order", "factors"):
        quantize_checkpoint(plain, root / f"base-{kind}", "w4a16_g16")
        with_inputs(root / f"base-{kind}", target, kind == "order")
    else:
        scheme = {"low rank": "w4a16_g16", "tied": "w8a16_g16"}.get(kind, kind)
        quantize_checkpoint(plain, target, scheme, low_rank=8 if kind == "low rank" else 0, embeddings=tied)
    return target


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Results of both ranks by name of the job. One pair of processes runs all jobs, since starting takes longest."""
    root = tmp_path_factory.mktemp("parallel")
    jobs = [
        {"folder": str(made(disk, root)), "scheme": scheme, "report": str(root / f"job{number}")}
        for number, (disk, scheme, _) in enumerate(JOBS.values())
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-m", "tests.models.tensor_parallel", json.dumps(jobs)]
    where = Path(__file__).parents[2]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < 2:  # without two GPUs, the processes use CPUs and gloo
        common["CUDA_VISIBLE_DEVICES"] = ""
    logs = [root / f"stderr{r}" for r in range(2)]
    ranks = []
    for r, log in enumerate(logs):
        with log.open("w") as stderr:
            ranks.append(
                subprocess.Popen(program, cwd=where, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=stderr)
            )
    end = time.monotonic() + SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
        rank.wait()
    found = {}
    for name, job in zip(JOBS, jobs, strict=True):
        paths = [Path(f"{job['report']}.{r}") for r in range(2)]
        said = [log.read_text()[-1500:] for log in logs]
        assert all(path.exists() for path in paths), f"{name}: a rank raised, or waited {SECONDS} seconds for the other: {said}"
        found[name] = job["folder"], [json.loads(path.read_text()) for path in paths]
    return found


@pytest.mark.parametrize("name", JOBS)
def test_both_ranks_agree(reports, name):
    *_, message = JOBS[name]
    folder, ranks = reports[name]
    if message is not None:
        assert all(re.search(message, rank.get("refused", "")) for rank in ranks), ranks
        assert ranks[0] == ranks[1]
        return
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.arange(40)[None]).logits
    for rank in ranks:
        logits = torch.tensor(rank["logits"])
        assert float((logits - expected).norm() / expected.norm()) < 1e-5


def test_reasons_that_need_no_second_process():
    """Reasons for refusing tensor parallelism, computed in one process."""
    model, layer = tiny_llama(tied=False), "model.layers.*.self_attn.o_proj"

    def reasons(scheme, shape=(64, 64), hadamard=0, experts=0, **options):
        model.config.distributed_config = DistributedConfig(**{"tp_size": 2, **options})
        scheme = parse_scheme(scheme)
        entry = LayerEntry(shape, scheme, InputParts(hadamard=hadamard), experts=experts)
        return parallel_refusals(model, Manifest(scheme, {"model.layers.0.self_attn.o_proj": entry}))

    assert reasons("w4a16_g16") == ()
    assert reasons("w4a16_g64", tp_size=1) == ()
    assert "its rotation" in reasons("w4a16_g16", hadamard=16)[0]
    assert "the weights of quantized experts are not split over GPUs" in reasons("w4a16_g16", experts=4)[0]
    assert reasons("w8a16_g2", (64, 124)) == () and "do not end with a byte" in reasons("w3a16_g2", (64, 124))[0]
    assert "not by embedding_rowwise" in reasons("w8a16_g16", tp_plan={layer: "embedding_rowwise"})[0]
    assert "its 63 output channels" in reasons("w8a16_g16", (63, 64), tp_plan={layer: "colwise"})[0]
    assert "fsdp_size is 2" in reasons("w8a16_g16", tp_size=1, fsdp_size=2)[0]
