"""Runs as each of the two processes that load a model split over both. Writes the logits, or the message of the refusal, to a
file. test_parallel.py starts it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lowbit

if __name__ == "__main__":
    jobs = json.loads(sys.argv[1])
    rank = os.environ["RANK"]
    for job in jobs:
        options = {} if job["scheme"] is None else {"quantization_config": lowbit.LowbitConfig(job["scheme"])}
        options["distributed_config"] = DistributedConfig(tp_size=2, tp_plan="auto")
        try:
            model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32, **options).eval()
            with torch.inference_mode():
                found = {"logits": model(torch.arange(40, device=model.device)[None]).logits.tolist()}
        except ValueError as error:
            found = {"refused": str(error)}
        report = Path(f"{job['report']}.{rank}")
        part = Path(f"{report}.part")
        part.write_text(json.dumps(found))
        os.replace(part, report)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # gloo sometimes aborts while the interpreter ends
