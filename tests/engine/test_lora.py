"""LoRA adapters on a CPU: tokens and logits of the model with the adapter merged, in any batch; the prefix cache; refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from lowbit.engine import Engine, Request, Sampling
from lowbit.engine.chain import Chain
from lowbit.engine.lora import Adapters
from lowbit.nn import convert
from tests.adapters import ALL, ATTENTION, merged, write_adapter
from tests.engine.test_chain import dequantized, packed, program_of, random_ids, stepped
from tests.engine.test_engine import engine_of, expected, prompt, tokens
from tests.engine.test_mixed import arriving
from tests.engine.test_speculation import oracle  # noqa: F401 - a fixture
from tests.tiny import eager_llama, eager_opt
from tests.tiny_experts import tiny_experts


@pytest.fixture(scope="module")
def model():
    return eager_llama()


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(root / "all", model, ALL, rank=4, seed=1),
        "some": write_adapter(root / "some", model, ("q_proj", "v_proj", "up_proj"), rank=20, seed=2, lora_alpha=30),
    }


@pytest.fixture(scope="module")
def of_adapter(model, folders):
    return {None: model, **{name: merged(model, folder) for name, folder in folders.items()}}


def some_requests(limit=12, **options):
    names = [None, "all", "some", "all", None, "some", "all"]
    return [Request(prompt(9 + 61 * i % 200, i), limit, adapter=name, **options) for i, name in enumerate(names)]


def check(sequences, of_adapter, limit=12):
    texts = set()
    for sequence in sequences:
        request = sequence.request
        assert tokens(sequence) == expected(of_adapter[request.adapter], request.prompt, limit), request.adapter
        texts.add(tuple(tokens(sequence)))
    assert len(texts) > 3


def test_one_batch_of_several_adapters_and_none(model, folders, of_adapter):
    check(engine_of(model, lora=folders).generate(some_requests()), of_adapter)


def test_arriving_requests(model, folders, of_adapter):
    """Prompts with adapters beside decoding sequences with others, in one forward."""
    sequences, mixed = arriving(engine_of(model, lora=folders), some_requests())
    assert mixed
    check(sequences, of_adapter)


def test_speculation(model, folders, oracle):  # noqa: F811 - the fixture of another file
    """Rows with guesses, some of them wrong, have the adapter of their slot."""
    plain = engine_of(model, lora=folders).generate(some_requests())
    oracle(plain, 0.3)
    engine = engine_of(model, lora=folders, speculate=4)
    assert [tokens(s) for s in engine.generate(some_requests())] == [tokens(s) for s in plain]
    assert engine.speculation.steps and engine.speculation.accepted


def test_a_draft_model_guesses_without_adapters(model, folders, of_adapter):
    engine = engine_of(model, lora=folders, speculate=3, draft=eager_llama())
    engine.speculation.draft_cost = 0.0
    check(engine.generate(some_requests()), of_adapter)
    assert engine.speculation.drafted


def test_a_slot_that_is_used_again(model, folders, of_adapter):
    engine = engine_of(model, lora=folders, max_concurrent=1)
    check([engine.generate([request])[0] for request in some_requests()], of_adapter)


def test_cached_pages_belong_to_one_adapter(model, folders, of_adapter):
    engine, same = engine_of(model, lora=folders), prompt(200)
    found = []
    for name in (None, "all", "some", "all", None):
        (sequence,) = engine.generate([Request(same, 8, adapter=name)])
        assert tokens(sequence) == expected(of_adapter[name], same, 8)
        found.append(sequence.cached_tokens)
    assert found == [0, 0, 0, 128, 128]


def test_as_peft_computes_it(model, folders):
    """PEFT's own model with the same files, on plain weights and on those of quantized layers."""
    peft = pytest.importorskip("peft", reason="PEFT computes the expected tokens")
    for scheme in (None, "w8a16"):
        base = eager_llama()
        if scheme is not None:
            convert(base, scheme)
        plain = dequantized(base, torch.float32)
        adapted = peft.PeftModel.from_pretrained(plain, str(folders["all"]))
        (sequence,) = engine_of(base, lora=folders).generate([Request(prompt(30), 12, adapter="all")])
        assert tokens(sequence) == expected(adapted, prompt(30), 12), scheme


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_chain(family, dtype, tmp_path):
    """Packed weights, gate and up alternating: the bias of tokens stands before norm, gate and residual. Rows of two adapters
    and of none."""
    base = packed(eager_llama(dtype) if family == "llama" else small_phi3().to(dtype), "w8a16")
    plain, targets = dequantized(base, torch.float32), ALL if family == "llama" else JOINED
    folders = {str(i): write_adapter(tmp_path / str(i), plain, targets, rank=8, seed=i, size=0.5) for i in range(2)}
    program = program_of(base)
    assert isinstance(program.chain, Chain) and program.layers[0].alternates
    program.adapters = Adapters.load(folders, base, program.layers, dtype, torch.device("cpu"))
    assert "q_proj" not in str(program.adapters) and "adapters 0, 1" in str(program.adapters)
    ids, which = random_ids(3), [1, -1, 0]
    program.adapters = _always(program.adapters, which)
    found = stepped(program, ids).float()
    with torch.inference_mode():
        for row, adapter in enumerate(which):
            reference = plain if adapter < 0 else merged(plain, folders[str(adapter)])
            wanted = reference(ids[row : row + 1]).logits[0].float()
            error = float((found[:, row] - wanted).norm() / wanted.norm())
            assert error < (0.01 if dtype == torch.float16 else 0.06), (adapter, error)


def _always(adapters, which):
    """Adapters of which the rows 0, 1, ... have `which`."""

    class Fixed(Adapters):
        def step(self, of_slots, rows):
            return super().step(torch.tensor(which, dtype=torch.int32), rows)

    return Fixed(adapters.names, adapters.layers)


JOINED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""The linear layers of Phi-3."""


def small_phi3():
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


@pytest.mark.parametrize("family", ["opt", "phi3", "olmoe"])
def test_other_families(family, tmp_path):
    """Biases and other names; q, k, v and gate, up fused in the checkpoint; norms of whole q and k, beside experts."""
    if family == "opt":
        base, targets = eager_opt(), ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    elif family == "phi3":
        base, targets = small_phi3(), JOINED
    else:
        base, targets = tiny_experts("olmoe", torch.float32).eval(), ATTENTION
    folder = write_adapter(tmp_path, base, targets, rank=4, size=2.0)
    own = [tokens(s) for s in engine_of(base).generate([Request(prompt(20), 10)])]
    reference = merged(base, folder)
    (sequence,) = engine_of(base, lora={"x": folder}).generate([Request(prompt(20), 10, adapter="x")])
    assert tokens(sequence) == expected(reference, prompt(20), 10) and [tokens(sequence)] != own


def test_refusals(model, folders, tmp_path):
    with pytest.raises(ValueError, match="has no adapters"):
        engine_of(model).submit(Request(prompt(5), 3, adapter="all"))
    engine = engine_of(model, lora=folders)
    with pytest.raises(ValueError, match="no adapter 'other' here, there are 'all', 'some'"):
        engine.submit(Request(prompt(5), 3, adapter="other"))
    with pytest.raises(ValueError, match="name of an adapter"):
        Request(prompt(5), 3, adapter=1)
    with pytest.raises(ValueError, match="merge the adapter"):
        engine_of(model, lora=folders, forward=True)
    head = write_adapter(tmp_path / "head", model, ("lm_head",))
    with pytest.raises(ValueError, match="lm_head is no linear layer in attention or a dense MLP"):
        engine_of(model, lora={"x": head})
    wide = write_adapter(tmp_path / "wide", eager_opt(hidden_size=128), ("q_proj",))
    with pytest.raises(ValueError, match="is no layer of this model"):
        engine_of(model, lora={"x": wide})
    other = eager_llama()
    other.model.layers[0].self_attn.q_proj = torch.nn.Linear(64, 80, bias=False)
    with pytest.raises(ValueError, match="belongs to another model"):
        engine_of(model, lora={"x": write_adapter(tmp_path / "other", other, ("q_proj",))})
    coarse = eager_llama()
    convert(coarse, "w8a8")
    with pytest.raises(ValueError, match="16-bit activations"):
        engine_of(coarse, lora=folders)


def test_sampling_and_log_probabilities(model, folders):
    """Alone and in a batch, a request with an adapter has the same tokens."""
    settings = dict(sampling=Sampling(temperature=0.8, seed=3), top_logprobs=2)
    together = engine_of(model, lora=folders).generate(some_requests(**settings))
    alone = engine_of(model, lora=folders, max_concurrent=1)
    for sequence, request in zip(together, some_requests(**settings), strict=True):
        assert tokens(alone.generate([request])[0]) == tokens(sequence)


def test_the_report_names_adapters(model, folders):
    assert any(
        "adapters all, some" in line for line in Engine(model, max_concurrent=1, lora=folders, cache_bytes=1 << 22).report()
    )
