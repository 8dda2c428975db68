# Serves a model on a GPU over OpenAI's API. The host needs NVIDIA's driver and container toolkit.
#
#   docker build -t lowbit .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v lowbit-cache:/cache -e LOWBIT_API_KEY=secret \
#       lowbit HuggingFaceTB/SmolLM2-135M-Instruct --scheme w4a16_g64
#
# A folder of the host: add -v /path/to/model:/model:ro and give /model. The volume keeps downloads and compiled kernels.
# This file has not been built by the tests, which have no Docker.
FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime

# Triton compiles a small launcher for each kernel at its first use: that needs a C compiler and Python's headers.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
COPY lowbit lowbit
# The image's own torch and Triton fit its CUDA, so pip must not replace them.
RUN python -m pip freeze | grep -E '^(torch|triton)==' > /tmp/keep.txt \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir --constraint /tmp/keep.txt '.[serve]'

RUN useradd --create-home lowbit && mkdir /cache && chown lowbit /cache
USER lowbit
WORKDIR /home/lowbit
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton XDG_CACHE_HOME=/cache
VOLUME /cache
EXPOSE 8000

ENTRYPOINT ["lowbit", "serve", "--host", "0.0.0.0", "--port", "8000"]
