"""Starts a server for a model, sends one question with OpenAI's client, and stops the server.

pip install '.[serve]' openai
python examples/serve.py SmolLM2-int4 --question "Where does the sun rise?"
"""

import argparse
import subprocess
import sys
import time

import httpx
import openai


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Waits until the server has loaded its model and compiled its kernels."""
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.2)
    raise SystemExit("the server ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--question", default="Where does the sun rise?")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    url = f"http://127.0.0.1:{arguments.port}"
    server = subprocess.Popen([sys.executable, "-m", "lowbit", "serve", arguments.model, "--port", str(arguments.port)])
    try:
        wait_until_ready(url, server)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
        name = next(iter(client.models.list())).id
        answer = client.completions.create(model=name, prompt=arguments.question, max_tokens=16, temperature=0)
        print(answer.choices[0].text)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
