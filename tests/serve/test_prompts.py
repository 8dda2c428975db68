"""Templates and tokenizers run in a separate process: a hostile one costs one request, within its deadline."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lowbit.serve.chat import rendered
from lowbit.serve.prompts import WORKERS
from tests.serve.running import NAME, TEMPLATE, running, tiny_pipeline

ASKED = {"model": NAME, "prompt": "ab", "max_tokens": 2, "temperature": 0}
FOR = "{% for i in range(100000) %}"
HOSTILE = (
    "{% set said = messages[-1].content %}"
    f"{{% if said == 'loop' %}}{FOR * 3}{'{% endfor %}' * 3}{{% endif %}}"
    "{% if said == 'list' %}{{ (range(100000) | list) * 100000 }}{% endif %}"
    "{% if said == 'text' %}{{ 'x' * 10 ** 10 }}{% endif %}"
    f"{{% if said == 'grow' %}}{{% set n = namespace(a='x') %}}{FOR}{{% set n.a = n.a + n.a %}}{{% endfor %}}{{% endif %}}"
)


def alive(group):
    """Returns the processes of a group, without those that have ended but were not reaped."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    return [stat for stat in stats if int(stat[2]) == group and stat[0] != "Z"]


def hostile(template=HOSTILE + TEMPLATE, **limits):
    pipe = tiny_pipeline()
    pipe.tokenizer.chat_template = template
    return running(pipe, **limits)


def chat(client, said, **more):
    body = {"model": NAME, "messages": [{"role": "user", "content": said}], "max_tokens": 2, **more}
    return client.post("/v1/chat/completions", json=body)


def test_a_template_that_loops_costs_one_request():
    """A template that loops costs one request. Its worker process is ended and replaced each time; other requests are answered
    meanwhile."""
    with hostile(prompt_seconds=0.5) as server, server.client() as client:
        for _ in range(WORKERS + 1):
            begin = time.monotonic()
            answer = chat(client, "loop")
            assert answer.status_code == 400 and time.monotonic() - begin < 5
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("messages", "prompt_timeout")
            assert error["message"] == (
                "messages: the model's chat template and tokenizer took more than 0.5 s over this request; send fewer or "
                "shorter ones, or start the server with a larger --prompt-seconds"
            )
        looping = [threading.Thread(target=lambda: chat(server.client(), "loop")) for _ in range(WORKERS)]
        for thread in looping:
            thread.start()
        assert client.post("/v1/completions", json=ASKED).status_code == chat(client, "hello").status_code == 200
        assert client.get("/health").status_code == 200
        for thread in looping:
            thread.join(10)


@pytest.mark.parametrize("said", ["list", "text", "grow"])
def test_a_template_that_allocates_without_end_costs_one_request(said):
    with hostile(max_body=1024) as server, server.client() as client:
        for _ in range(2):
            answer = chat(client, said)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["code"] == "prompt_memory" and "chat template and tokenizer need more than 0.5 GiB" in error["message"]
        assert chat(client, "hello").status_code == 200


def test_the_end_of_the_grace_time_ends_a_template_that_loops():
    """SIGTERM arrives while a template loops. At the end of the grace time its client gets an error, and no process is left."""
    found = []
    with hostile(prompt_seconds=60, grace_seconds=0.3) as server:
        process = server.service.prompts._workers._process
        asking = threading.Thread(target=lambda: found.append(chat(server.client(), "loop")))
        asking.start()
        server.wait_until(lambda: server.service.quota.taken)
        time.sleep(0.1)
        begin = time.monotonic()
        server.service.worker._loop.call_soon_threadsafe(server.server.drain)
        server.thread.join(10)
        assert not server.thread.is_alive() and time.monotonic() - begin < 8
        asking.join(10)
    assert found[0].status_code == 503 and "shutting down" in found[0].json()["error"]["message"]
    server.wait_until(lambda: not alive(process.pid), 10)


@pytest.mark.parametrize("part", ["process", "worker"])
def test_a_process_that_ended_is_replaced(part):
    """A process may end at any time, for example if the kernel kills it for lack of memory."""
    with running() as server, server.client() as client:
        workers = server.service.prompts._workers
        if part == "process":
            os.killpg(workers._process.pid, signal.SIGKILL)
            server.wait_until(lambda: workers._process.poll() is not None)
        else:
            pid = workers._process.pid
            for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(worker), signal.SIGKILL)
            server.wait_until(lambda: len(alive(pid)) == 1)
        for _ in range(WORKERS + 1):
            assert chat(client, "hello").status_code == client.post("/v1/completions", json=ASKED).status_code == 200


def test_the_process_is_small():
    """The process that runs templates has loaded the tokenizer, but not torch."""
    with running() as server, server.client() as client:
        assert chat(client, "hello").status_code == 200
        pid = server.service.prompts._workers._process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        (rss_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
        assert rss_kib < 120_000 and "torch" not in Path(f"/proc/{pid}/maps").read_text()


class Raises:
    """A tokenizer whose chat template raises an error."""

    def __init__(self, error):
        self.error = error

    def apply_chat_template(self, messages, **options):
        raise self.error


@pytest.mark.parametrize("error", [AssertionError("no\nroles"), OSError("no roles"), TypeError("no roles")], ids=repr)
def test_any_error_of_a_template_is_a_refusal(error):
    """A template is a program by the model's author, so any error that it raises refuses the request."""
    with pytest.raises(ValueError, match=r"the model's chat template does not take them \(no roles\)"):
        rendered(Raises(error), [{"role": "user", "content": "Hi"}], None)


def test_lack_of_memory_is_not_the_conversations_fault():
    with pytest.raises(MemoryError):
        rendered(Raises(MemoryError()), [{"role": "user", "content": "Hi"}], None)
