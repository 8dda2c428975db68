"""Acceptance of the tokens of a verified step. Results equal the reference; without a GPU the kernel runs in Triton's
interpreter. Also tests its machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.reference.sampling import AcceptInputs, accept_reference, accepted
from lowbit.ops.accept import accept
from lowbit.ops.sample import Sampling, SamplingState
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan, loops_to_loaded_bounds

pytest.importorskip("triton", reason="the kernel is written in Triton")

from lowbit.kernels.elementwise.accept import AcceptPlan

gpu = pytest.mark.gpu
VOCAB = 11


def case(generator, slots, longest, device="cpu"):
    """Returns random rows of most slots, in random order and with up to `longest` tokens each, then padding rows. Slots and
    counters are poisoned. Half of the given tokens are those that were sampled before."""
    pick = lambda most, *size: torch.randint(0, most, size, generator=generator)  # noqa: E731
    state = SamplingState.make(slots + 1, VOCAB, (), "cpu")
    for slot in range(slots):
        state.set(slot, Sampling(presence_penalty=0.5) if slot % 2 else Sampling(temperature=1.0, seed=slot), [1, 2])
    state.settings[:, 11] = pick(100, slots + 1).int()
    rows, ahead, row_positions = [], [], []
    for slot in torch.randperm(slots, generator=generator)[: max(1, slots - 1)].tolist():
        count, first = 1 + int(pick(longest)), int(pick(1000))
        rows += [slot] * count
        ahead += range(count)
        row_positions += range(first, first + count)
    padding = int(pick(4))
    rows, ahead, row_positions = rows + [slots] * padding, ahead + [0] * padding, row_positions + [0] * padding
    sampled = pick(VOCAB, len(rows))
    given = torch.where(pick(2, len(rows)) == 0, pick(VOCAB, len(rows)), sampled.roll(1))
    of_rows = [torch.tensor(rows), given, torch.tensor(row_positions), torch.tensor(ahead), sampled]
    of_slots = [torch.full((slots + 1,), -7), torch.full((slots + 1,), -9)]
    tensors = [*(t.int() for t in of_rows), state.settings, state.counts, *(t.int() for t in of_slots)]
    return AcceptInputs(*(t.to(device) for t in tensors))


def check(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    for slots, longest in ((1, 8), (4, 4), (9, 8), (5, 1)) * 3:
        got = case(generator, slots, longest, device)
        wanted = AcceptInputs(*(t.cpu().clone() for t in got))
        accept_reference(wanted)
        AcceptPlan(len(got.rows), slots + 1, VOCAB)(got)
        for name, one, other in zip(AcceptInputs._fields, got, wanted, strict=True):
            assert torch.equal(one.cpu(), other), name


@loops_to_loaded_bounds
def test_equal_to_the_reference_in_tritons_interpreter():
    interpreted(check)


@gpu
def test_equal_to_the_reference_on_a_gpu():
    check("cuda")


def test_machine_code():
    """The kernel has one warp, spills nothing, and computes sums without loops."""
    whole = lambda *size: meta(size, torch.int32)  # noqa: E731
    plan = AcceptPlan(64, 65, 128256)
    given = AcceptInputs(*(whole(64) for _ in range(5)), whole(65, 16), whole(65, 128256), whole(65), whole(65))
    for sm in (80, 90):
        kernel = compile_plan(plan, (given,), sm)
        assert kernel.stack_bytes == 0 and kernel.registers <= 64 and kernel.count("ATOM") + kernel.count("RED") >= 1


def test_which_tokens_are_accepted():
    assert accepted([5], [6]) == 1, "the token after the first row is always accepted"
    assert accepted([5, 6, 7], [6, 7, 8]) == 3
    assert accepted([5, 6, 9], [6, 7, 8]) == 2, "the token that was sampled after the last right one"
    assert accepted([5, 1, 7], [6, 7, 8]) == 1, "a right token behind a wrong one"


def test_what_does_not_fit_together_is_refused():
    given = case(torch.Generator().manual_seed(1), 3, 2)
    state = SamplingState.make(4, VOCAB, (), "cpu")
    with pytest.raises(ValueError, match="accept: ahead is contiguous int32"):
        accept(*given[:3], given.ahead.long(), given.sampled, state, given.tokens, given.positions)
    with pytest.raises(ValueError, match="accept: tokens is contiguous int32"):
        accept(*given[:5], state, given.tokens[1:], given.positions)
