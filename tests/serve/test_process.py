"""`lowbit serve` and `lowbit chat` as commands: output, signals, exit codes, and errors of one line."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import httpx
import openai
import pytest
from typer.testing import CliRunner

from lowbit.cli.commands import app
from lowbit.cli.terminal import err, out
from lowbit.serve.client import LocalChat, RemoteChat
from lowbit.serve.errors import encoded
from lowbit.serve.server import bound
from tests.serve.running import NAME, TEMPLATE, command, greedy, running, tiny_pipeline
from tests.tiny import eager_llama, tiny_tokenizer

ASKED = {"model": "tiny", "prompt": "ab", "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "tiny"
    eager_llama().save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def test_signals(folder):
    """SIGKILL drops running requests and frees the port. After SIGTERM running requests finish, others are refused, and
    requests that still run after the grace time are cancelled."""
    with command(folder, "--port", 0) as killed:
        with killed.client() as client:
            whole = client.completions.create(**ASKED).choices[0].text
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                for i, _ in enumerate(client.completions.create(**ASKED, stream=True)):
                    if not i:
                        killed.process.kill()
        assert killed.ended() == -signal.SIGKILL
    with command(folder, "--port", killed.port) as told:
        with told.client() as client:
            pieces = []
            for i, part in enumerate(client.completions.create(**ASKED, stream=True)):
                pieces.append(part.choices[0].text)
                if i == 2:
                    told.process.send_signal(signal.SIGTERM)
                    told.wait_until(lambda: any("SIGTERM" in line for line in told.lines))
                    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
                        told.client().completions.create(**ASKED)
            assert "".join(pieces) == whole
        assert told.ended() == 0
        assert told.lines[-1] == "stopped" and any("SIGTERM" in line for line in told.lines)
    with command(folder, "--port", killed.port, "--grace", 0) as hurried:
        with hurried.client() as client, pytest.raises(openai.APIError, match="shutting down"):
            for i, _ in enumerate(client.completions.create(**ASKED, stream=True)):
                if i == 2:
                    hurried.process.send_signal(signal.SIGINT)
        assert hurried.ended() == 130


def ranks_of(pid):
    """The processes of other ranks that a process has started."""
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return [int(child) for child in children if b"rank_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_server_ends_with_one_of_its_ranks(folder):
    """The server ends when a rank ends, also while no request runs, and prints the reason."""
    with command(folder, "--port", 0, "--tensor-parallel", 2, "--device", "cpu") as server:
        with server.client() as client:
            assert client.completions.create(**ASKED).choices[0].text
        (rank,) = ranks_of(server.process.pid)
        os.kill(rank, signal.SIGKILL)
        assert server.ended(10) == 1
        assert any("the server ends: rank 1: ended with signal SIGKILL" in line for line in server.lines)


def run(*arguments, **options):
    out.width = err.width = 200
    result = CliRunner().invoke(app, [str(a) for a in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_port_belongs_to_the_first_server_while_it_loads():
    """The port is bound before the model is loaded; otherwise two servers would load models, and one would fail."""
    with bound("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            bound("127.0.0.1", port)


def test_errors_are_one_line(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = (
            (("serve", folder, "--port", port), f"cannot listen on 127.0.0.1 port {port}: Address already in use"),
            (("serve", folder, "--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid port 8000"),
            (("serve", tmp_path / "none"), "none"),
            (("serve", folder, "--api-key", ""), "must be one or more printable ASCII characters"),
            (("serve", folder, "--scheme", "w99"), "w99"),
            (("chat", f"http://127.0.0.1:{port + 1 if port < 65535 else 1}"), "is a server running there?"),
            (("chat", "http://127.0.0.1:99999999"), "99999999"),
            (("chat", tmp_path / "none"), "none"),
        )
        for arguments, message in cases:
            result = run(*arguments)
            lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            assert result.exit_code == 1 and len(lines) == 1 and message in lines[0], (arguments, result.stderr)
    for option, number in (("--port", 70000), ("--grace", "inf"), ("--cache-gib", "inf")):
        result = run("serve", folder, option, number)
        assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.stderr, result.stderr


def test_without_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lowbit.serve.server", None)
    result = run("serve", folder)
    assert result.exit_code == 1 and "pip install '.[serve]'" in result.stderr


def test_chat_with_a_server_and_with_a_model(folder):
    """The greedy answers of a server and of a model are the same in every turn. After a refusal the conversation continues."""
    asked = ["Hello", "And?", "/new", "Hello", "x" * 300, "/exit", "never"]
    with running(key="sesame") as server:
        first, _, _ = greedy(server, server.pipe.tokenizer("user: Hello\nassistant: ", add_special_tokens=False).input_ids, 20)
        told = []
        for where in ((server.url, "--api-key", "sesame"), (folder,)):
            result = run("chat", *where, "--temperature", 0, "--max-tokens", 20, input="\n".join(asked))
            assert result.exit_code == 0
            told.append(result.stdout)
            assert result.stderr.count("error: ") == 1 and "tokens" in result.stderr
        assert told[0] == told[1] and told[0].startswith(f"{first}\n") and told[0].count(f"{first}\n") == 2
        assert told[0].count("\n") == 3  # input after /exit is not sent
        assert run("chat", server.url).stderr.startswith("error: the server says 401: this server asks for its API key")
        assert (
            "there is no model other here; it has tiny"
            in run("chat", server.url, "--api-key", "sesame", "--name", "other").stderr
        )


def test_an_abandoned_answer():
    """If a client stops reading an answer, the rest of it is not computed."""
    with running() as server:
        answer = RemoteChat(server.url).answer([{"role": "user", "content": "Hello"}], 0, 150)
        assert next(answer)
        answer.close()
        server.wait_until_free()
        local = LocalChat(server.pipe, NAME)
        assert "".join(local.answer([{"role": "user", "content": "Hello"}], 0, 10)) == "".join(
            RemoteChat(f"{server.url}/v1/").answer([{"role": "user", "content": "Hello"}], 0, 10)
        )
        with pytest.raises(ValueError, match="the conversation has 318 tokens, a sequence here at most 256"):
            next(local.answer([{"role": "user", "content": "a" * 300}], 0, 10))


def test_errors_of_a_local_model(monkeypatch):
    """Errors of a local model have the same words as a server's errors."""
    pipe = tiny_pipeline()
    local = LocalChat(pipe, NAME)
    with pytest.raises(ValueError, match="the model's chat template does not take them .no tools here."):
        next(local.answer([{"role": "tool", "content": "a"}], 0, 10))
    monkeypatch.setattr(pipe.engine.program, "prompt", lambda *_: [][0])
    with pytest.raises(ValueError, match="computing the answer failed"):
        next(local.answer([{"role": "user", "content": "a"}], 0, 10))


def test_line_ends_of_events(monkeypatch):
    """A line of an event ends at a line feed, with or without a carriage return before it, and at no other character."""
    odd = "a\u2028b\x85c\x0bd"
    assert encoded(odd).isascii()
    sent = f'data: {{"choices": [{{"delta": {{"content": "{odd}"}}}}]}}\r\n\r\ndata: [DONE]\n\n'.replace("\x0b", "").encode()
    handler = httpx.MockTransport(lambda request: httpx.Response(200, stream=httpx.ByteStream(sent)))
    with running() as server:
        remote = RemoteChat(server.url)
        remote._client = httpx.Client(transport=handler)
        assert [*remote.answer([{"role": "user", "content": "a"}], 0, 10)] == [odd.replace("\x0b", "")]


def test_the_page_is_self_contained():
    """The page loads nothing from elsewhere. Its policy allows only its own script and style."""
    from lowbit.serve.page import page

    content, headers = page()
    text = content.decode()
    assert (
        "//" not in re.sub(r"<!--.*?-->", "", text).replace("//www.w3.org", "") and "src=" not in text and "href=" not in text
    )
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "innerHTML" not in text and " style=" not in text and not re.search(r" on\w+=", text)
