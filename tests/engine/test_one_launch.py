"""Small decode steps with all layers in one launch. Without a GPU the kernel runs warp by warp in an emulator of its PTX, for a
few blocks of 4 warps; on a GPU tokens are compared with those of the launches."""

from __future__ import annotations

import dataclasses
import threading
import types

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from lowbit.engine import Engine, Request
from lowbit.engine import program as program_module
from lowbit.engine.cache import Cache
from lowbit.engine.decode_runner import DecodeRunner
from lowbit.engine.failure import StuckStep
from lowbit.engine.model_runner import InFlightStep
from lowbit.engine.one_launch import OneLaunch, expert_steps_of, one_launch_of
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.engine.slots import Slots, on_device
from lowbit.formats import parse_scheme
from lowbit.formats.kv import KV16, parse_kv
from lowbit.hardware.machine import GPUS, typical_machine
from lowbit.kernels.choose import decode_step
from lowbit.kernels.choose.decode_step import FASTER, WAITS, Faster, StepTable, UnitForm
from lowbit.models.head import quantize_head
from lowbit.nn import convert
from lowbit.ops.decode_step import DecodeStepLaunch, decode_step_refusals
from lowbit.ops.simulated_gpu import simulated_gpu
from tests.engine.pages import fill_unwritten
from tests.engine.test_chain import dequantized, packed, program_of, random_ids, stepped
from tests.engine.test_experts import by_kernels
from tests.engine.test_gpu import check_greedy, prompt
from tests.engine.test_gpu import model_of as gpu_model_of
from tests.kernels.sass import compile_plan
from tests.kernels.warps import execute
from tests.tiny import eager_llama
from tests.tiny_experts import tiny_experts

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.launch import recording

SIZES = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip

MODELS = {
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})),
    "biases": lambda **options: LlamaForCausalLM(LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True, **options})),
    "quantized ends": lambda **options: LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})),
    "windows": lambda **options: MistralForCausalLM(MistralConfig(**{**SIZES, "sliding_window": 2, **options})),
    "biases of q, k and v": lambda **options: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **options})),
    "layers without positions": lambda **options: SmolLM3ForCausalLM(
        SmolLM3Config(**{**SIZES, "no_rope_layer_interval": 2, "pad_token_id": 0, **options})
    ),
    "joined weights": lambda **options: Phi3ForCausalLM(Phi3Config(**{**SIZES, "pad_token_id": 0, **options})),
    "norms of heads": lambda **options: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **options})),
}


EXPERTS = {
    "qwen3 moe": lambda **options: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**{**SIZES, "moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2, **options})
    ),
    "weights of all": lambda **options: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**{**SIZES, "moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 3,
                          "norm_topk_prob": False, **options})
    ),
    "mixtral": lambda **options: MixtralForCausalLM(
        MixtralConfig(**{**SIZES, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2, **options})
    ),
}  # fmt: skip


def model_of(name, dtype, **options):
    torch.manual_seed(0)
    model = {**MODELS, **EXPERTS}[name](**options)
    for key, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
        elif key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model.to(dtype).eval()


class EmulatedLauncher:
    """Takes the place of `Launcher`: compiles the kernel and executes it."""

    others: tuple[torch.Tensor, ...] = ()
    """Tensors whose addresses the kernel reads from its table."""

    def __init__(self, function, grid, warps, *, cooperative):
        assert cooperative
        self.plan = lambda *call: self.plan.launch(*call)
        self.plan.launch = types.SimpleNamespace(function=function, options={"num_warps": warps})
        self.grid, self.threads, self.kernel, self.launches = grid, 32 * (warps + 4), None, 0

    def __call__(self, *arguments):
        if self.kernel is None:
            self.kernel = compile_plan(self.plan, arguments, 90)
        self.launches += 1
        shared = self.kernel.shared_bytes
        execute(
            self.kernel.ptx, shared, arguments[:-1], self.grid[0], self.threads, self.launches, others=self.others
        )  # fmt: skip


@pytest.fixture
def emulated(monkeypatch):
    """Lets a step on a CPU use the launch, as on a GPU of two SMs."""
    monkeypatch.setattr("lowbit.kernels.sm90.decode_step.Launcher", EmulatedLauncher)
    monkeypatch.setattr("lowbit.engine.one_launch.decode_step_refusals", lambda *given: ())
    monkeypatch.setattr("lowbit.ops.decode_step.decode_step_refusals", lambda *given: ())
    monkeypatch.setattr("lowbit.ops.decode_step.step_refusals", lambda *given: ())
    monkeypatch.setattr("lowbit.ops.decode_step.step_table", lambda shape, machine: StepTable(shape, 2, 4))
    monkeypatch.setattr("lowbit.ops.decode_step.machine_of", lambda device: typical_machine(90))
    monkeypatch.setattr("lowbit.engine.one_launch.machine_of", lambda device: typical_machine(90))


def launch_of(program, **options):
    return one_launch_of(program.decoder, program.chain, program.table, KV16, **options)


def bind_emulated(launch):
    """Lets the emulator read the tensors of a launch whose addresses the kernel finds in its table."""
    bind = launch.bind

    def bound(pages):
        bind(pages)
        weights = [w for layer in launch.layers for w in layer.products] + [launch.ends.head]
        packed_ = [t for w in weights for t in w.tensors().values() if t is not None]
        routers = [layer.router.weight for layer in launch.layers if layer.router is not None]
        vectors = [t for layer in (*launch._values, launch._end_values) for t in layer.values()]
        EmulatedLauncher.others = (*packed_, *routers, *vectors, *(t for page in pages for t in (page.k, page.v)))

    launch.bind = bound


SKIPPED = {
    "head": lambda module: "lm_head" in module,
    "head and a product": lambda module: "lm_head" in module or module == "model.layers.0.mlp.down_proj",
    "all": lambda module: True,
    "none": None,
}
"""Modules with weights of 16 bits."""


@pytest.mark.parametrize(
    ("name", "scheme", "count", "tokens", "dtype", "skipped"),
    [
        ("llama", "w4a16_g128", 1, 3, torch.float16, "head"),
        ("biases", "w4a16_g128", 1, 2, torch.float16, "head"),
        ("norms of heads", "w4a16_g128", 2, 2, torch.bfloat16, "head"),
        ("llama", "w8a16", 1, 2, torch.float16, "head and a product"),
        ("biases", "w4a16_g128", 1, 2, torch.float16, "all"),
        ("quantized ends", "w4a16_g64", 1, 2, torch.float16, "none"),
        ("windows", "w4a16_g128", 1, 3, torch.float16, "head"),
        ("biases of q, k and v", "w4a16_g128", 1, 2, torch.float16, "head"),
        ("layers without positions", "w8a16", 1, 3, torch.float16, "head"),
        ("joined weights", "w4a16_g128", 1, 2, torch.float16, "head"),
    ],
)
def test_the_logits_of_the_launches(emulated, monkeypatch, name, scheme, count, tokens, dtype, skipped):
    """Steps in one launch have the logits of the chain and of the model."""
    model = packed(model_of(name, dtype), scheme, skip=SKIPPED[skipped])
    if skipped == "none":
        assert quantize_head(model) == ["model.embed_tokens", "lm_head"]
        model.lm_head._pack_for_gpu()
    reference = dequantized(model, torch.float32)
    ids = random_ids(count)[:, :tokens]
    if skipped in ("head", "none"):
        chain = stepped(program_of(model), ids).float()
    else:  # a chain with layers of 16 bits computes on GPUs only
        monkeypatch.setattr("lowbit.engine.chain._refusals", lambda *given: ())
        chain = None
    program = program_of(model)
    program.one_launch = launch_of(program)
    assert isinstance(program.one_launch, OneLaunch)
    assert program.one_launch.launch.ends.head is not None
    launch = program.one_launch.launch
    bind_emulated(launch)
    found = stepped(program, ids).float()
    (plan,) = [plan for plan in launch._plans.values() if plan.launch.launches]
    assert plan.table.shape.tokens == count and plan.launch.launches == tokens
    largest = 0.002 if dtype == torch.float16 else 0.02
    assert chain is None or (found - chain).norm() / chain.norm() < largest
    with torch.inference_mode():
        expected = reference(ids).logits.transpose(0, 1).float()
    assert (found - expected).norm() / expected.norm() < 5 * largest
    assert not program.status.any()
    assert program.report(0.0)[-1] == "steps of 1, 2, 4, 8 tokens: one launch"


def experts_of(program):
    return expert_steps_of(program.decoder, program.layers, program.head, program.dtype)


@pytest.mark.parametrize(
    ("name", "scheme", "dtype", "count"),
    [
        ("qwen3 moe", "w4a16_g128", torch.float16, 1),
        ("weights of all", "w8a16", torch.bfloat16, 2),
        ("mixtral", "w4a16_g64", torch.float16, 1),
    ],
)
def test_the_logits_of_experts(emulated, monkeypatch, name, scheme, dtype, count):
    """Steps of a mixture of experts in one launch have the logits of the model."""
    monkeypatch.setattr(program_module, "expert_mlp_of", by_kernels)
    model = packed(model_of(name, dtype), scheme, skip=lambda module: "lm_head" in module)
    ids = random_ids(count)[:, :2]
    with torch.inference_mode():
        expected = dequantized(model, torch.float32)(ids).logits.transpose(0, 1).float()
    program = program_of(model)
    program.one_launch = one_launch_of(program.decoder, experts_of(program), program.table, KV16)
    launch = program.one_launch.launch
    bind_emulated(launch)
    found = stepped(program, ids).float()
    (plan,) = [plan for plan in launch._plans.values() if plan.launch.launches]
    assert plan.launch.launches == 2 and plan.table.shape.experts == launch.layers[0].router.rule[0]
    assert (found - expected).norm() / expected.norm() < (0.01 if dtype == torch.float16 else 0.06)
    assert not program.status.any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen2_moe", "shared expert"), ("olmoe", "norms of whole q and k"), ("gpt_oss", "gate of its experts is clamped_swiglu")],
)
def test_experts_that_stay_with_the_launches(monkeypatch, name, reason):
    monkeypatch.setattr(program_module, "expert_mlp_of", by_kernels)
    model = packed(tiny_experts(name, torch.float16), "w8a16", skip=lambda module: "lm_head" in module)
    reasons = experts_of(program_of(model))
    assert isinstance(reasons, tuple) and any(reason in each for each in reasons)


def test_refusals_of_experts(emulated, monkeypatch):
    """Experts without quantized weights, layers of several kinds, routers in another type."""
    program = program_of(model_of("qwen3 moe", torch.float16))
    assert "its experts are not quantized, or not on a GPU" in experts_of(program)
    monkeypatch.setattr(program_module, "expert_mlp_of", by_kernels)
    model = packed(model_of("qwen3 moe", torch.float16, mlp_only_layers=[0]), "w8a16", skip=lambda module: "lm_head" in module)
    assert "some of its MLPs are experts and some are not" in experts_of(program_of(model))
    model = packed(model_of("qwen3 moe", torch.float16), "w8a16", skip=lambda module: "lm_head" in module)
    program = program_of(model)
    launch = one_launch_of(program.decoder, experts_of(program), program.table, KV16).launch
    monkeypatch.undo()
    monkeypatch.setattr("lowbit.ops.decode_step.machine_of", lambda device: typical_machine(90))
    shape, device, layers = launch.attention, torch.device("cuda"), launch.layers
    assert decode_step_refusals(layers, launch.ends, shape, torch.float16, KV16, device) == ()
    router = dataclasses.replace(layers[0].router, weight=layers[0].router.weight.float())
    others = [dataclasses.replace(layers[0], router=router), layers[1]]
    assert "takes a router in torch.float16" in decode_step_refusals(others, launch.ends, shape, torch.float16, KV16, device)[0]
    others = [dataclasses.replace(layers[0], router=dataclasses.replace(layers[0].router, top_k=3)), layers[1]]
    assert (
        "the same biases, norms of heads, sinks and experts"
        in decode_step_refusals(others, launch.ends, shape, torch.float16, KV16, device)[0]
    )
    others = [dataclasses.replace(layer, router=None) for layer in layers]
    assert decode_step_refusals(others, launch.ends, shape, torch.float16, KV16, device) == (
        "one launch a step takes experts with their router",
    )


def test_where_it_is_faster(emulated, monkeypatch):
    """Without a choice of the caller, steps are one launch where that was measured to be faster."""
    model = packed(model_of("llama", torch.float16), "w4a16_g128", skip=lambda module: "lm_head" in module)
    model.lm_head = packed(nn.Sequential(model.lm_head), "w8a16")[0]
    program = program_of(model)
    kind = "int4", UnitForm(4, 32), model.config.num_attention_heads // model.config.num_key_value_heads
    rows = (Faster("H200", 1, *kind, 0, 10**6, 512), Faster("H200", 2, *kind, 10**6, 10**9, 512))
    monkeypatch.setattr(decode_step, "FASTER", rows)
    one = launch_of(program, measured=True)
    assert str(one) == "steps of 1 (contexts up to 2,048) tokens: one launch"
    slots = Slots(2, 256, 160, (), torch.device("cpu"))
    assert one.computes(1, slots, 2048) and one.computes(1, slots, 0)
    assert not one.computes(1, slots, 2049) and not one.computes(2, slots, 100)
    others = (Faster("H100", 1, *kind, 0, 10**6, 512), Faster("H200", 1, "fp4_e2m1", *kind[1:], 0, 10**6, 512))
    for row in others:
        monkeypatch.setattr(decode_step, "FASTER", (row,))
        (reason,) = launch_of(program, measured=True)
        assert reason.startswith("it was not measured to be faster for layers of 0 MB on H200")
    monkeypatch.setattr(decode_step, "FASTER", rows)
    wide_head = packed(model_of("llama", torch.float16), "w4a16_g128", skip=lambda module: "lm_head" in module)
    assert isinstance(launch_of(program_of(wide_head), measured=True), tuple), "measured with heads in 8 bits"


@pytest.mark.parametrize("row", FASTER, ids=lambda row: f"{row.tokens} tokens, {row.form.bits} bits, {row.context}")
def test_engines_use_what_was_measured(emulated, monkeypatch, row):
    """A step at a measured context is one launch, in the captured step that a runner with long page tables chooses for it; one
    of longer contexts is not."""
    model = packed(model_of("llama", torch.float16), "w4a16_g128", skip=lambda module: "lm_head" in module)
    program, device = program_of(model), torch.device("cpu")
    monkeypatch.setattr("lowbit.engine.one_launch.faster_contexts", lambda *given: {row.tokens: row.context})
    program.one_launch = launch_of(program, measured=True)
    runner = DecodeRunner(program, Slots(8, 1 << 17, 160, (), device), 8)
    computed = []
    monkeypatch.setattr(
        OneLaunch, "step", lambda self, cache, slots, rows: computed.append(len(rows)) or torch.zeros(len(rows), 160)
    )
    monkeypatch.setattr(program, "_step", lambda tokens, rows, *others: torch.zeros(len(rows), 160))
    program.cache = Cache(program.cache_spec, 2, device)
    for longest in (1, row.context, min(reach for reach in runner.reaches if reach >= row.context)):
        runner.launch(range(row.tokens), None, longest)
    assert computed == 3 * [row.tokens]
    runner.launch(range(row.tokens), None, min(reach for reach in runner.reaches if reach >= row.context) + 1)
    assert len(computed) == 3


def test_reasons():
    """What a launch does not compute stays with the chain, and the report says why."""
    model = packed(eager_llama(torch.float16), "w4a16_g32")
    decoder = recognise(model)
    program = DecodeProgram(decoder, model.dtype, torch.device("cpu"), batch_invariant=False, persistent_step=True)
    assert program.report(0.0)[-1] == "no step is one launch: one launch a step runs on a GPU, not on a CPU"
    assert program.status is None
    program.use_adapters(object())
    assert "no step is one launch: one launch a step computes no LoRA adapters" in program.report(0.0)
    invariant = DecodeProgram(decoder, model.dtype, torch.device("cpu"), batch_invariant=True, persistent_step=True)
    assert "batch_invariant" in invariant.report(0.0)[-1]
    assert len(program_of(model).report(0.0)) == 3


def test_refusals(emulated, monkeypatch):
    """Layers of different biases, packed keys and values, too many forms of weights."""
    model = packed(model_of("llama", torch.float16), "w4a16_g128", skip=lambda module: "lm_head" in module)
    program = program_of(model)
    launch = launch_of(program).launch
    monkeypatch.undo()
    device, (shape,) = torch.device("cuda"), {program.decoder.attention_shape(spec) for spec in program.decoder.layers}
    monkeypatch.setattr("lowbit.ops.decode_step.machine_of", lambda device: typical_machine(90))
    layers, ends = launch.layers, launch.ends
    assert decode_step_refusals(layers, ends, shape, torch.float16, KV16, device) == ()
    (reason,) = decode_step_refusals(layers, ends, shape, torch.float16, parse_kv("fp8"), device)
    assert reason == "one launch a step takes keys and values in 16 bits, not in fp8"
    assert "fp16 and bf16" in decode_step_refusals(layers, ends, shape, torch.float32, KV16, device)[0]
    biased = dataclasses.replace(layers[1], biases=(torch.zeros(256), None, None, None))
    (reason,) = decode_step_refusals([layers[0], biased], ends, shape, torch.float16, KV16, device)
    assert "the same biases" in reason
    forms = [dataclasses.replace(layers[0], products=(_named(w, i), *layers[0].products[1:])) for i, w in
             enumerate(5 * [layers[0].products[0]])]  # fmt: skip
    (reason,) = decode_step_refusals(forms, ends, shape, torch.float16, KV16, device)
    assert "takes 4 forms of a product's weights, qkv has 5" in reason
    with pytest.raises(ValueError, match="1, 2, 4, 8"):
        launch(torch.zeros(3), *[torch.zeros(1)] * 2, torch.zeros(3))


def _named(w, number):
    """The weight in a form of its own."""
    scheme = parse_scheme(f"w{number + 2}a16_g128")
    return dataclasses.replace(w, scheme=scheme)


@pytest.mark.parametrize(
    ("name", "dtype", "width"),
    [("llama", torch.float16, "intermediate_size"), ("qwen3 moe", torch.bfloat16, "moe_intermediate_size")],
)
def test_an_engine_on_a_simulated_gpu(name, dtype, width):
    """A whole engine, dense or of experts, reports one launch for small steps. Its kernels, recorded without a GPU, include the
    cooperative launch."""
    sizes = {"hidden_size": 512, width: 1024 if name == "llama" else 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = model_of(name, dtype, **sizes)
    convert(model, "w4a16_g128")
    with simulated_gpu(GPUS["h200"]) as device, recording() as kernels:
        engine = Engine(model.to(device), max_concurrent=4, max_length=512, persistent_step=True)
        assert engine.report()[-1] == "steps of 1, 2, 4, 8 tokens: one launch"
    options = [kernel.options for kernel in kernels if kernel.name == "decode_step"]
    assert [option["launch_cooperative_grid"] for option in options] == [True]


def test_phi3_mini_stays_with_the_launches():
    """Heads of 96 elements: the report says why."""
    sizes = {"hidden_size": 384, "head_dim": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
    model = model_of("joined weights", torch.float16, **sizes)
    convert(model, "w4a16_g128")
    with simulated_gpu(GPUS["h200"]) as device, recording():
        engine = Engine(model.to(device), max_concurrent=4, max_length=512, persistent_step=True)
    why = "heads have 64 or 128 elements, not 96: 8 lanes read values in vectors of 8"
    assert engine.report()[-2:] == ["steps of up to 64 tokens: 5 launches a layer", f"no step is one launch: {why}"]


def test_pages_that_move_between_steps(emulated):
    """A sequence that is preempted between steps goes on in other pages, with the same logits: a launch reads page tables and
    positions itself. The old pages are of others meanwhile."""
    model = packed(model_of("llama", torch.float16), "w4a16_g128", skip=SKIPPED["head"])
    program, ids = program_of(model), random_ids(1)[0, :3]
    program.one_launch = launch_of(program)
    bind_emulated(program.one_launch.launch)
    found = []
    for moved in (False, True):
        program.cache = Cache(program.cache_spec, 4, program.device)
        fill_unwritten(program.cache)
        slots, logits = Slots(1, 128, 160, (), program.device), []
        slots.update([(0, 0, 1)], [])
        for position, token in enumerate(ids.tolist()):
            if moved and position == 2:
                for pages in program.cache.layers:
                    for part in (pages.k, pages.v):
                        part[3], part[1] = part[1].clone(), torch.nan
                slots.update([(0, 0, 3)], [])
            slots.update([], [(0, position)])
            slots.tokens[0] = token
            logits.append(program.step(on_device([0], program.device), slots))
        found.append(torch.stack(logits))
    assert torch.equal(*found) and found[0].isfinite().all()


def test_a_stuck_step_is_named():
    """The status of a step that gave up becomes an error with its reason when the step is read."""
    nothing = torch.zeros(0)
    status = torch.tensor([1 + 3 * len(WAITS) + WAITS.index("x of o")], dtype=torch.int32)
    step = InFlightStep([], nothing, nothing, None, None, status=status)
    with pytest.raises(StuckStep, match="stopped in layer 3: a block waited too long for x of o"):
        step.wait()
    InFlightStep([], nothing, nothing, None, None, status=status * 0).wait()
    assert DecodeStepLaunch.failure(int(status)).endswith("please report this")


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_tokens_on_a_gpu(name):
    """An engine with one launch a step has logits near those of the launches, in graphs, with 1 and 3 sequences."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    if name == "joined weights":  # heads of Phi-3-medium
        sizes |= {"num_attention_heads": 4, "head_dim": 128}
    compare_tokens(name, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3 moe", "mixtral"])
def test_tokens_of_experts_on_a_gpu(name):
    compare_tokens(name, {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2})


def compare_tokens(name, sizes):
    found = []
    for persistent in (False, True):
        model = model_of(name, torch.float16, **sizes).cuda()
        convert(model, "w4a16_g128")
        engine = Engine(model, max_concurrent=4, max_length=512, persistent_step=persistent)
        if persistent:
            assert engine.report()[-1] == "steps of 1, 2, 4, 8 tokens: one launch"
        prompts = [[5, 6, 7], [8] * 140, [9, 10]]
        texts = [list(engine.stream(engine.submit(Request(prompts[0], 40))))]
        sequences = [engine.submit(Request(prompt, 40)) for prompt in prompts]
        texts += [list(engine.stream(sequence)) for sequence in sequences]
        found.append([[(sampled.token, sampled.logprob) for sampled in text] for text in texts])
    for one, other in zip(*found, strict=True):
        same = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0][0] != pair[1][0]), len(one))
        # Rounding may change a token where two are about as likely; all before it are the same.
        assert same >= 1 and all(abs(a[1] - b[1]) < 0.05 for a, b in zip(one[:same], other[:same], strict=True))


WIDER = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "max_position_embeddings": 1024,
}  # fmt: skip


def engine_of_wider(**options):
    model = model_of("llama", torch.float16, **WIDER).cuda()
    convert(model, "w4a16_g128")
    engine = Engine(model, persistent_step=True, prefix_caching=False, **options)
    assert engine.report()[-1] == "steps of 1, 2, 4, 8 tokens: one launch"
    return engine


@pytest.mark.gpu
def test_two_engines_at_once_on_a_gpu():
    """Two engines in threads and streams of their own have the tokens that each has alone: each launch takes all SMs, and none
    waits for blocks that cannot start."""
    engines = [engine_of_wider(max_concurrent=4, max_length=512) for _ in range(2)]
    requests = [[Request([5 + seed, 6, 7 + i], 300) for i in range(2 + seed)] for seed in range(2)]
    alone = [[tokens_of(s) for s in engine.generate(asked)] for engine, asked in zip(engines, requests, strict=True)]
    found = [None, None]

    def run(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            found[number] = [tokens_of(s) for s in engines[number].generate(requests[number])]

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "two engines at once have not ended within 60 s"
    assert found == alone


def tokens_of(sequence):
    return [sampled.token for sampled in sequence.sampled]


@pytest.mark.gpu
def test_preempted_sequences_on_a_gpu():
    """Sequences that are preempted between steps of one launch are completed; each token is the most likely one, up to
    rounding."""
    model = gpu_model_of()
    page = Engine(model, max_concurrent=1, max_length=128).program.cache_spec.page_bytes
    engine = Engine(
        model, max_concurrent=8, max_length=512, cache_bytes=12 * page, prefix_caching=False, persistent_step=True
    )  # fmt: skip
    assert engine.report()[-1] == "steps of 1, 2, 4, 8 tokens: one launch"
    preempted, preempt = [], engine.scheduler._preempt
    engine.scheduler._preempt = lambda scheduled: (preempted.append(1), preempt(scheduled))
    sequences = engine.generate([Request(prompt(100, seed), 200) for seed in range(8)])
    assert preempted and all(len(sequence.sampled) == 200 for sequence in sequences)
    check_greedy(model, sequences, engine.report())
