"""Two processes write one folder, and processes are killed while they write. Nothing is lost, and nothing is left behind."""

from __future__ import annotations

import os

import pytest

from lowbit.checkpoint import CheckpointReader
from tests.checkpoint.test_target import checkpoint
from tests.forks import forked

IMPORTED = ("lowbit.checkpoint",)

TWO = """
import os, sys, torch
from lowbit.checkpoint import CheckpointError, CheckpointWriter

folder, disguise = sys.argv[1:]
ready, go = os.pipe(), os.pipe()
first = os.fork()
if first == 0:
    if disguise:  # as in another PID namespace: a number that no process has here
        os.getpid = lambda: 2**22 + 1
    with CheckpointWriter(folder, overwrite=True, shard_bytes=1) as writer:
        writer.add("first", torch.ones(3))
        writer.add("more", torch.ones(3))  # the first shard is on disk
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        writer.finish({}, None)
    os._exit(0)
os.close(ready[1])
os.read(ready[0], 1)
try:
    with CheckpointWriter(folder, overwrite=True) as writer:
        writer.add("second", torch.ones(3))
        writer.finish({}, None)
except CheckpointError as error:
    print(error)
os.write(go[1], b"x")
print(first, os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
"""


@pytest.mark.parametrize("disguise", ["", "another PID namespace"])
def test_the_second_of_two_writers_is_refused_and_the_first_one_finishes(tmp_path, disguise):
    checkpoint(tmp_path / "c")
    *said, result = forked(TWO, tmp_path / "c", disguise, imported=IMPORTED).splitlines()
    first, status = result.split()
    with CheckpointReader(tmp_path / "c") as reader:
        assert reader.names() == ["first", "more"]
    assert status == "0" and os.listdir(tmp_path) == ["c"]
    (line,) = said
    owner = 2**22 + 1 if disguise else first
    assert f"{tmp_path / 'c'}: process {owner} on host " in line
    assert "is writing it" in line and line.endswith("; wait until it ends, or choose another folder")


KILLED = """
import os, resource, signal, sys, torch
from lowbit.checkpoint import CheckpointWriter

child = os.fork()
if child == 0:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process within a write, and no handler runs
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with CheckpointWriter(sys.argv[1]) as writer:
        writer.add("a", torch.ones(1 << 20))
        writer.finish({}, None)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGXFSZ
"""


def test_a_file_that_was_half_written_is_removed_by_the_next_writer(tmp_path):
    forked(KILLED, tmp_path / "c", imported=IMPORTED)
    assert any(path.name.startswith(".tmp") for path in tmp_path.rglob("*")), "safetensors' own name of an unfinished file"
    checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


KILLED_AT_RANDOM = """
import os, random, signal, sys, time, torch
from lowbit.checkpoint import CheckpointReader, CheckpointWriter

def write(value):
    with CheckpointWriter(sys.argv[1], overwrite=True, shard_bytes=1 << 20) as writer:
        for i in range(6):
            writer.add(f"{i}", torch.full((1 << 18,), value))
        writer.finish({}, None)

write(0.0)
start = time.monotonic()
write(0.0)
seconds = time.monotonic() - start
draw, killed = random.Random(0), 0
for value in range(1, 17):
    child = os.fork()
    if child == 0:
        write(float(value))
        os._exit(0)
    time.sleep(draw.uniform(0, 1.2 * seconds))
    os.kill(child, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0
    if value % 4 == 0:
        write(float(value))
    elif os.path.exists(sys.argv[1]):
        with CheckpointReader(sys.argv[1]) as reader:
            assert len({float(reader.get(f"{i}")[0]) for i in range(6)}) == 1
print(killed)
"""


def test_processes_killed_at_random_leave_a_whole_checkpoint_and_nothing_beside_it(tmp_path):
    assert int(forked(KILLED_AT_RANDOM, tmp_path / "c", imported=IMPORTED)) > 0
    assert os.listdir(tmp_path) == ["c"]
