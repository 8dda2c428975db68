"""The sampling kernels are bit-equal to the reference. Without a GPU they run in Triton's interpreter. Also tests their machine
code."""

from __future__ import annotations

import time

import pytest
import torch

from lowbit.hardware.machine import machine_of
from lowbit.kernels.reference import sampling
from lowbit.kernels.reference.sampling import SampleInputs
from lowbit.ops.sample import Sampling, SamplingState, sample
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan, loops_to_loaded_bounds

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")
import triton.language as tl  # noqa: E402

from lowbit.kernels.elementwise import sample as kernel_module  # noqa: E402
from lowbit.kernels.elementwise.masses import masses, share, target_of  # noqa: E402
from lowbit.kernels.elementwise.sample import SamplePlan  # noqa: E402

gpu = pytest.mark.gpu

SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_k=50, top_p=0.9, seed=2),
    Sampling(temperature=1.3, top_p=0.8, min_p=0.002, seed=-3, repetition_penalty=1.3, presence_penalty=0.5),
    Sampling(temperature=0.3, top_k=7, seed=1 << 63, frequency_penalty=0.25, min_new_tokens=9),
    Sampling(temperature=2.5, min_p=0.05, seed=5, logit_bias={3: 4.0, 17: -50.0}),
    Sampling(repetition_penalty=0.5, min_new_tokens=9, logit_bias={1: -2.5}),
    Sampling(temperature=1.0, top_k=1 << 30, top_p=1e-6, min_p=1.0, seed=7),
    Sampling(temperature=100.0, top_k=300, top_p=0.999, seed=8),
    Sampling(temperature=0.01, top_k=40, top_p=0.95, seed=9),
    Sampling(temperature=5.0, top_p=0.99, seed=10),
]


MASKED = {0: 0.5, 2: 0.9, 3: 0.02, 5: 0.3, 8: 0.7}
"""Slots with a mask, and the share of tokens that it allows."""


def masks_of(shares, vocab, generator):
    """Returns random masks int32 [len(shares), ceil(vocab / 32)]. Each allows its share of the tokens. Bits beyond the
    vocabulary are set."""
    allowed = torch.rand(len(shares), -(-vocab // 32) * 32, generator=generator) < torch.tensor(shares)[:, None]
    allowed[:, vocab // 2] = allowed[:, vocab:] = True
    bits = allowed.view(len(shares), -1, 32).long() << torch.arange(32)
    return bits.sum(-1).to(torch.int32)


def state_of(settings, vocab, device="cpu", prompt=(1, 3, 17, 17), masked=()):
    """Returns a state with a slot for each of the settings, after 40 generated tokens, and a dummy slot. The slots `masked`
    have two masks. The first is used; the second allows nothing, since it is for the token after the next."""
    state = SamplingState.make(len(settings) + 1, vocab, (0, 5, vocab - 1), device, depth=2)
    for slot, one in enumerate(settings):
        state.set(slot, one, prompt, masked=slot in masked)
    generator = torch.Generator().manual_seed(vocab)
    shares = [MASKED.get(slot, 0.01) for slot in range(len(settings))]  # slots without the flag do not read their mask
    state.masks.zero_()
    state.masks[: 2 * len(settings) : 2] = masks_of(shares, vocab, generator).to(device)
    said = torch.randint(0, vocab, (len(settings), 40), generator=generator)
    for slot in range(len(settings)):
        state.counts[slot].index_add_(0, said[slot].to(device), torch.ones(40, dtype=torch.int32, device=device))
    state.generated[:-1] = torch.arange(len(settings), dtype=torch.int32, device=device) * 4
    return state


def call(state, rows, logits):
    """The arguments of `sample`; outputs are poisoned."""
    slots, device = len(state.settings), logits.device
    feed = torch.arange(2 * slots, dtype=torch.int32, device=device).view(2, slots)
    of_rows = torch.full((len(rows),), -7, dtype=torch.int32, device=device)
    return SampleInputs(
        logits, torch.tensor(rows, dtype=torch.int32, device=device), state.settings.clone(), state.counts.clone(), state.bias,
        state.masks, state.ends, feed[0].clone(), feed[1].clone(), of_rows,
        torch.full((len(rows),), float("nan"), device=device),
    )  # fmt: skip


def hard_logits(rows, vocab, dtype, gap=0, spread=3.0, device="cpu"):
    """Normal numbers with hard cases: ties for the maximum, infinities, NaN. There are `gap` elements between rows."""
    generator = torch.Generator().manual_seed(rows * vocab)
    wide = (torch.randn(rows, vocab + gap, generator=generator) * spread).to(dtype)
    wide[:, vocab:] = float("inf")
    if rows > 2:
        wide[1, vocab // 2] = wide[1, vocab // 3] = 30
        wide[1, 0], wide[2, vocab - 1] = float("-inf"), float("nan")
    if rows > 3:
        wide[3, vocab // 2] = float("inf")
    return wide.to(device)[:, :vocab]


def check(settings, rows, logits, filters=True):
    """Checks tokens, state and log-probabilities against the reference, and that every call leaves the counters at zero."""
    state = state_of(settings, logits.shape[1], logits.device, masked=MASKED if filters else ())
    wanted, got = call(state, rows, logits)._replace(logits=logits.cpu()), call(state, rows, logits)
    wanted = SampleInputs(*(t.cpu() for t in wanted[:-2]))
    sampling.sample_reference(*wanted[:-2])
    overlap = logits.is_cuda and machine_of(logits.device).arch.sm >= 90
    ends = len(state.ends)
    plan = SamplePlan(len(rows), logits.shape[1], logits.stride(0), len(state.settings), ends, filters, overlap)
    words, counters = plan.workspace
    space = torch.full((words,), float("nan"), device=logits.device)
    arrived = torch.zeros(counters, dtype=torch.int32, device=logits.device)
    plan(got, space, arrived)
    assert not arrived.any()
    for name, one, other in zip(SampleInputs._fields[1:-3], got[1:-3], wanted[1:-3], strict=True):
        assert torch.equal(one.cpu(), other), (name, rows, logits.shape, one, other)
    torch.testing.assert_close(got.out_logprobs.cpu(), wanted.out_logprobs, rtol=1e-5, atol=2e-5, equal_nan=True)
    if not logits.is_cuda and logits.numel() > 1 << 12:
        return  # the interpreter is slow
    again = call(state, rows, logits)
    plan(again, space.fill_(-1e30), arrived)
    both = ([t.view(torch.int32) for t in given[2:-2]] for given in (again, got))  # a NaN is not equal to itself
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True)), "the same bits every time"


def check_of_rows(settings, rows, ahead, logits):
    """Checks rows that have settings of their own. Several rows of a slot sample as if one came after the other. The slots do
    not change."""
    state = state_of(settings, logits.shape[1], logits.device)
    rows_ = torch.tensor(rows, dtype=torch.int32, device=logits.device)
    own = state.of_rows(rows_, torch.tensor(ahead, dtype=torch.int32, device=logits.device))
    given = call(state, rows, logits)._replace(settings=own, of_rows=True)
    before = SampleInputs(*(t.clone() for t in given[:-2]))
    overlap = logits.is_cuda and machine_of(logits.device).arch.sm >= 90
    sizes = len(rows), logits.shape[1], logits.stride(0), len(state.counts), len(state.ends)
    plan = SamplePlan(*sizes, True, overlap, of_rows=True)
    words, counters = plan.workspace
    plan(
        given,
        torch.full((words,), float("nan"), device=logits.device),
        torch.zeros(counters, dtype=torch.int32, device=logits.device),
    )
    for name in ("settings", "counts", "tokens", "positions"):
        assert torch.equal(getattr(given, name), getattr(before, name)), name
    for row, (slot, more) in enumerate(zip(rows, ahead, strict=True)):
        alone = state_of(settings, logits.shape[1])
        if slot < len(settings):
            alone.generated[slot] += more
        single = call(alone, [slot], logits[row : row + 1].cpu())
        sampling.sample_reference(*single[:-2])
        assert given.out_tokens[row] == single.out_tokens[0]
        torch.testing.assert_close(given.out_logprobs[row].cpu(), single.out_logprobs[0], rtol=1e-5, atol=2e-5, equal_nan=True)


@triton.jit
def arithmetic(made, keys, totals, ps, seeds, counters, N: tl.constexpr):
    """Stores the masses of keys. For each total, stores its share p, and the target in it that a random number selects."""
    i = tl.arange(0, N)
    total = tl.load(totals + i)
    tl.store(made + i, masses(tl.load(keys + i)))
    tl.store(made + N + i, share(total, tl.load(ps + i)))
    tl.store(made + 2 * N + i, target_of(tl.load(seeds + i), tl.load(counters + i), total))


def check_arithmetic(device="cpu"):
    n, generator = 4096, torch.Generator().manual_seed(0)
    keys = torch.randint(0, sampling.KEYS + 1, (n,), generator=generator)
    keys[:3] = torch.tensor([0, sampling.KEYS - 1, sampling.KEYS])
    totals = torch.randint(1 << 40, 1 << 57, (n,), generator=generator) >> torch.randint(0, 17, (n,), generator=generator)
    totals = totals.clamp(min=1 << 40)
    totals[::3] = totals[::3] >> 24 << 24  # makes many shares whole numbers
    ps = torch.rand(n, generator=generator)
    ps[::2] = (ps[::2] * 8).ceil() / 8
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator)
    counters = torch.randint(0, 1 << 30, (n,), generator=generator, dtype=torch.int32)
    made = torch.full((3, n), -1, device=device)
    arithmetic[(1,)](made, *(t.to(device) for t in (keys.int(), totals, ps, seeds, counters)), n)
    rows = zip(totals.tolist(), ps.tolist(), seeds.tolist(), counters.tolist(), strict=True)
    both = [(sampling.share(t, p), sampling.philox(seed, counter) * t >> 64) for t, p, seed, counter in rows]
    assert torch.equal(made.cpu(), torch.stack([sampling.masses(keys), *torch.tensor(both).T]))


LAST = len(SETTINGS)


def check_without_a_gpu():
    """Runs the checks with small search tiles first, so that lists have more than one entry."""
    check_arithmetic()
    whole, kernel_module.TILE = kernel_module.TILE, 128
    check(SETTINGS, [*range(LAST), LAST, LAST], hard_logits(LAST + 2, 1000, torch.float16, 3))
    check(SETTINGS, [2, 5, 4], hard_logits(3, 12288, torch.float32))
    check(SETTINGS, [2], hard_logits(1, 33003, torch.float16, 64))
    kernel_module.TILE = whole
    for batch in (1, 3, 8):
        check(SETTINGS, [2, 0, 4, 1, LAST, 9, LAST, 3][:batch], hard_logits(batch, 3000, torch.float32))
        check([Sampling()] * 4, [3, 0, 4, 4, 1, 4, 2, 4][:batch], hard_logits(batch, 5000, torch.float16, 8), filters=False)
    check_of_rows(SETTINGS, [1, 1, 1, 4, 4, 2, LAST, 6, 6], [0, 1, 2, 0, 1, 0, 0, 0, 1], hard_logits(9, 2100, torch.float16))
    for spread in (0.0, 1e-4, 40.0, 1e4):  # all logits equal; all within a few keys; one dominant logit
        check(SETTINGS, [1, 2, 3, 4, 6], hard_logits(5, 2100, torch.float32, spread=spread))
    for value in (float("-inf"), float("nan"), float("inf")):
        check(SETTINGS, [0, 1, 2], torch.full((3, 2100), value))


@loops_to_loaded_bounds
def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


def compiled(name, vocab=128256, dtype=torch.float16, filters=True, rows=16, ends=2, overlap=True):
    """The kernel `name` of a plan (survey, weigh, collect or settle), compiled for sm_90."""
    plan, slots = SamplePlan(rows, vocab, vocab, 65, ends, filters, overlap), 65
    noted = []
    launches = {launch: getattr(plan, launch) for launch in ("survey", "weigh", "collect", "settle")}
    for launch in launches:
        setattr(plan, launch, lambda *arguments, of=launch: noted.append((of, arguments)))
    words, counters = plan.workspace
    i32, f32 = torch.int32, torch.float32
    given = SampleInputs(
        meta((rows, vocab), dtype), meta((rows,), i32), meta((slots, 16), i32), meta((slots, vocab), i32),
        meta((slots, vocab), f32), meta((slots, -(-vocab // 32)), i32), meta((ends,), i32), meta((slots,), i32),
        meta((slots,), i32), meta((rows,), i32), meta((rows,), f32),
    )  # fmt: skip
    plan(given, meta((words,), f32), meta((counters,), i32))
    arguments = dict(noted)[name]

    class One:
        """A plan with this launch alone."""

        launch = launches[name]

        def __call__(self, *call):
            self.launch(*call)

    return compile_plan(One(), arguments, 90)


CODE = [
    ("survey", {"filters": False}, 32),
    ("survey", {}, 64),
    ("weigh", {}, 64),
    ("collect", {}, 64),
    ("settle", {}, 128),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_machine_code_of_sm_90(dtype):
    """Nothing spills, and logits are read in vectors of 16 bytes."""
    # bf16 differs from fp16 in one conversion instruction. All kernels share it where they read logits, so one kernel suffices.
    cases = CODE if dtype != torch.bfloat16 else CODE[1:2]
    made = [compiled(name, dtype=dtype, **options) for name, options, _ in cases]
    for case, kernel in zip(cases, made, strict=True):
        print(f"\n{case} {dtype}: {kernel.registers} registers, {kernel.shared_bytes} bytes shared")
        assert kernel.stack_bytes == 0 and not kernel.count("LDL") and not kernel.count("STL"), case
        # a thread has two vectors of logits; three blocks fit an SM
        wider = 8 if case[0] == "weigh" and dtype == torch.float32 else 0
        assert kernel.registers <= case[2] + wider, case
        assert kernel.count("LDG.E.U8") == (0 if "filters" in case[1] else 2 if case[0] == "weigh" else 1), "8 bits a thread"
        assert kernel.count("LDG.E.128"), case


def test_the_wait_for_the_kernel_before_comes_before_all_but_the_settings():
    """No store and no exit precedes the wait for the previous kernel. The next kernel takes the end of this one as the end of
    all earlier ones."""
    names = ("survey", "weigh", "collect", "settle")
    made = [(name, compiled(name), compiled(name, overlap=False)) for name in names]
    for name, kernel, before in made:
        lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
        wait = lines.index("ACQBULK")
        assert lines.index("PREEXIT") < wait and "EXIT" not in lines[:wait], name
        assert any(line.startswith("LDG") for line in lines[:wait]), name
        assert not any(line.startswith(("STG", "ATOM", "RED")) for line in lines[:wait]), name
        assert before.count("ACQBULK") == before.count("PREEXIT") == 0, name


def test_a_mask_alone_decides_what_is_sampled():
    """Without a mask a forbidden token is the most likely one. With the mask only the two allowed tokens are sampled."""
    vocab, allowed = 3001, [1999, 3000]
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4))
    seen = set()
    for seed in range(30):
        for settings in (Sampling(), Sampling(temperature=50.0, seed=seed), Sampling(temperature=50.0, top_k=3, seed=seed)):
            state = SamplingState.make(2, vocab, (), "cpu")
            state.set(0, settings, (1,), masked=True)
            state.masks[0] = 0
            for token in allowed:
                state.masks[0, token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)
            given = call(state, [0], logits)
            fed = given.tokens, given.positions, given.out_tokens, given.out_logprobs
            sample(given.logits, given.rows, state, *fed)
            token = int(given.out_tokens[0])
            seen.add(token)
            wanted = torch.log_softmax(logits[0], 0)[token]
            # the log-probabilities of the model, before the mask
            torch.testing.assert_close(given.out_logprobs[0], wanted, rtol=1e-5, atol=1e-5)
            if settings.greedy:
                assert token == max(allowed, key=lambda each: logits[0, each])
    assert seen == set(allowed)


def test_greedy_steps_are_one_launch():
    kernels = [getattr(SamplePlan(1, 128256, 128256, 65, 2, False, True), name) for name in ("survey", "weigh")]
    assert kernels[0].grid == (63, 1, 1)
    code = compiled("survey", filters=False)
    # A thread reads one vector of 8 logits. The last block reads the results of 63 chunks, then updates token and position.
    assert code.count("LDG.E.128") == 1 and code.shared_bytes <= 128


@gpu
@pytest.mark.parametrize(
    ("vocab", "dtype", "gap"),
    [
        (1000, torch.float16, 3),
        (32003, torch.float16, 0),
        (49152, torch.float32, 0),
        (128256, torch.float16, 0),
        (128256, torch.bfloat16, 8),
        (128256, torch.float32, 3),
        (151936, torch.bfloat16, 0),
        (262144, torch.float16, 0),
    ],
    ids=str,
)
def test_bit_equal_to_the_reference_on_a_gpu(vocab, dtype, gap):
    for batch in (1, 3, 16, 64):
        rows = [*range(LAST)][:batch] + [LAST] * (batch - LAST)
        for spread in (0.01, 3.0, 10.0):
            check(SETTINGS, rows, hard_logits(batch, vocab, dtype, gap, spread, "cuda"))
        slots = [*range(8)][:batch] + [8] * (batch - 8)
        check([Sampling()] * 8, slots, hard_logits(batch, vocab, dtype, gap, device="cuda"), filters=False)
    rows, ahead = [1, 1, 1, 4, 4, 2, LAST, 6, 6], [0, 1, 2, 0, 1, 0, 0, 0, 1]
    check_of_rows(SETTINGS, rows, ahead, hard_logits(9, vocab, dtype, gap, device="cuda"))


@gpu
def test_the_arithmetic_on_a_gpu():
    check_arithmetic("cuda")


@gpu
def test_in_a_graph_with_a_neighbour_before_and_after():
    """The previous kernel writes logits, the next one reads tokens. Ten steps with tokens fed back equal those of the CPU
    operator.
    """
    vocab, rows = 32000, list(range(LAST))
    base = hard_logits(LAST, vocab, torch.float32, device="cuda")
    state, on_cpu = state_of(SETTINGS, vocab, "cuda"), state_of(SETTINGS, vocab)
    got, wanted = call(state, rows, base), call(on_cpu, rows, base.cpu())
    table = torch.randn(64, vocab, generator=torch.Generator().manual_seed(1))
    tables = table.cuda()

    def step(given, table, state, logits):
        torch.add(given.logits, table[given.tokens[: len(rows)].long() % 64], out=logits)
        sample(logits, given.rows, state, given.tokens, given.positions, given.out_tokens, given.out_logprobs)

    logits = torch.empty_like(base)
    step(got, tables, state, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(got, tables, state, logits)
    step(wanted, table, on_cpu, torch.empty_like(base, device="cpu"))
    for _ in range(10):
        graph.replay()
        step(wanted, table, on_cpu, torch.empty_like(base, device="cpu"))
        for name in ("tokens", "positions", "out_tokens"):
            assert torch.equal(getattr(got, name).cpu(), getattr(wanted, name)), name
    assert torch.equal(state.settings.cpu(), on_cpu.settings) and torch.equal(state.counts.cpu(), on_cpu.counts)


@gpu
def test_how_long_it_takes():
    """Prints microseconds per call, from a graph of 20 calls. No limit is asserted; `python -m benchmarks e2e` has one."""
    vocab = 128256
    cases = {
        "greedy": (Sampling(), False), "temperature": (Sampling(temperature=0.8, seed=1), True),
        "top-k 50, top-p 0.9": (Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=1), True),
        "top-p 0.9": (Sampling(temperature=0.8, top_p=0.9, seed=1), True),
        "top-p 0.9, flat": (Sampling(temperature=50.0, top_p=0.9, seed=1), True),
        "all penalties": (Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1), True),
        "greedy, a mask": (Sampling(), True), "top-p 0.9, a mask": (Sampling(temperature=0.8, top_p=0.9, seed=1), True),
    }  # fmt: skip
    for name, (settings, filters) in cases.items():
        for batch in (1, 16, 64):
            state = state_of([settings] * batch, vocab, "cuda", masked=range(batch) if "mask" in name else ())
            given = call(state, list(range(batch)), hard_logits(batch, vocab, torch.float16, device="cuda"))

            def step(given=given, state=state, filters=filters):
                fed = given.tokens, given.positions, given.out_tokens, given.out_logprobs
                sample(given.logits, given.rows, state, *fed, any_filter=filters)

            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    step()
            graph.replay()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            print(f"{name:20s} B {batch:2d}: {(time.perf_counter() - begin) / 200 * 1e6:6.1f} us")
            assert (given.out_tokens >= 0).all()
