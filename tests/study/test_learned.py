"""`python -m study learned` on a tiny model: rows equal separate measurements, runs resume, failures stop no other row."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lowbit.checkpoint.target import check_file
from lowbit.eval import divergence
from lowbit.methods import Learned
from lowbit.models.calibrate import Calibration
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from study import learned as study
from study.__main__ import COMMANDS
from study.learned import RESULT, ROW_KEYS, SCHEMES, WAYS, Job, Settings, jobs, measure, table
from study.results import UNQUANTIZED, figure_of, load
from study.run import halves
from tests.study.auto_round_stand_in import install
from tests.tiny import eager_llama, tiny_tokenizer

TEXTS = ("handbook", "opticks")
SMALL = Settings(iterations=3, batch=2, samples=4, length=24, distill=2, window=32, windows=2)
SCHEME = "w3a16_g32"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    eager_llama(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts, and a file of questions that would need another package: it is not read."""
    folder = tmp_path_factory.mktemp("data")
    for name in (*TEXTS, "topics"):
        (folder / f"{name}.txt").write_text("\n\n".join(f"the {i}th quick {name} is bent" for i in range(40)))
    (folder / "broken.jsonl").write_text("{")
    return folder


@pytest.fixture
def output(tmp_path):
    return tmp_path / "learned.json"


def kl(quantized, model, data, text):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor(tiny_tokenizer()(halves((data / f"{text}.txt").read_text())[1]).input_ids[: 2 * 32])
    return divergence(quantized, reference, ids, window=32).mean


def rows_of(document):
    return {row["key"]: row for row in document["rows"]}


def test_the_rows_are_those_of_the_comparison():
    every = jobs(SCHEMES, tuple(WAYS), "auto-round", (0, 1))
    assert [job.key for job in every[:4]] == [
        "16 bits", "w2a16_g32 plain seed 0", "w2a16_g32 auto-round seed 0", "w2a16_g32 rotated seed 0",
    ]  # fmt: skip
    assert len(every) == 1 + 2 * 4 * 5 and len({job.key for job in every}) == len(every)
    assert [job.way for job in jobs(("w2a16_g32",), (), "auto-round", (3,))] == [UNQUANTIZED, "auto-round"]
    with pytest.raises(ValueError, match="no row to measure"):
        jobs(("w2a16_g32",), (), None, (0,))
    with pytest.raises(ValueError, match="w2a16: compared are integers in groups"):
        jobs(("w2a16",), ("plain",), None, (0,))


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_what_quantizing_gives(way, model, data, output, tmp_path):
    left = output.parent / ".learned.work" / "left"  # by a killed run
    left.mkdir(parents=True)
    document = measure(model, data, TEXTS, output, SMALL, [Job(SCHEME, way, 1)])
    assert not left.parent.exists()
    rotated, distilled = WAYS[way]
    calibration = Calibration(4, 24, 1, data / "topics.txt")
    method = Learned(3, 2, 1, distill=2 if distilled else 0)
    quantize_checkpoint(
        model, tmp_path / "q", SCHEME, method=method, calibration=calibration, rotate_inputs=("*",) if rotated else ()
    )
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    (row,) = document["rows"]
    for text in TEXTS:
        assert figure_of(row, text, "KL mean")[0] == pytest.approx(kl(quantized, model, data, text), rel=1e-2)
    assert row["calibration"] == {"text": "topics", "seed": 1} and row["seconds"] > 0


def test_the_rival_gets_the_same_pieces(model, data, output, monkeypatch):
    calls = install(monkeypatch).calls
    wanted = jobs((SCHEME,), ("distilled",), "auto-round", (0, 2))
    document = measure(model, data, TEXTS, output, SMALL, wanted)
    assert document["complete"] and document["failed"] == {} and list(rows_of(document)) == [job.key for job in wanted]
    for call, seed in zip(calls, (0, 2), strict=True):
        tokens = Calibration(4, 24, seed, data / "topics.txt").tokens(model)
        assert torch.equal(torch.cat(call["dataset"]), tokens) and call["seed"] == seed
        assert (call["iters"], call["batch_size"]) == (3, 2)
    ours, theirs = (rows_of(document)[f"{SCHEME} {way} seed 2"] for way in ("distilled", "auto-round"))
    assert ours["bits_per_weight"] == pytest.approx(theirs["bits_per_weight"])
    assert theirs["options"]["enable_alg_ext"] and theirs["method"] == "auto-round"
    # nothing of the distilled row before is left in the model that is measured
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    call = {**calls[1], "model": rounded}
    from auto_round import AutoRound

    rounded = AutoRound(**call).quantize()[0].float()
    assert figure_of(theirs, "opticks", "KL mean")[0] == pytest.approx(kl(rounded, model, data, "opticks"), rel=1e-3)


def test_a_failed_row_stops_no_other_and_is_tried_again(model, data, output, monkeypatch):
    class Fails(install(monkeypatch)):
        def quantize(self):
            raise RuntimeError("out of luck")

    install(monkeypatch, Fails)
    wanted, said = jobs((SCHEME,), ("plain", "rotated"), "auto-round", (0,)), []
    document = measure(model, data, TEXTS, output, SMALL, wanted, say=said.append)
    assert document["failed"] == {f"{SCHEME} auto-round seed 0": "RuntimeError: out of luck"} and not document["complete"]
    assert [row["way"] for row in document["rows"]] == [UNQUANTIZED, "plain", "rotated"]
    assert "Traceback" in said[0] and said[0].endswith("failed: RuntimeError: out of luck; the other rows go on")
    install(monkeypatch)
    again = measure(model, data, TEXTS, output, SMALL, wanted)
    assert again["complete"] and again["failed"] == {} and [row["way"] for row in again["rows"]][-1] == "auto-round"
    assert again["rows"][:3] == json.loads(json.dumps(document["rows"]))
    with pytest.raises(ValueError, match=r"measured otherwise \(settings differ\)"):
        measure(model, data, TEXTS, output, Settings(), wanted)


def test_several_processes_measure_the_same(model, data, output, tmp_path):
    wanted = jobs((SCHEME,), ("plain",), None, (0, 1))
    one = rows_of(measure(model, data, TEXTS, output, SMALL, wanted))
    two = rows_of(measure(model, data, TEXTS, tmp_path / "two.json", SMALL, wanted, processes=2))
    assert set(one) == set(two) == {job.key for job in wanted}
    for key, row in one.items():
        assert two[key]["figures"] == row["figures"]
    assert {row["processes"] for row in two.values()} == {2} and {row["processes"] for row in one.values()} == {1}


def test_the_command(model, data, output, monkeypatch):
    install(monkeypatch)
    small = ["--iterations", "2", "--batch", "2", "--samples", "4", "--length", "24", "--window", "32", "--windows", "2"]
    where = ["--data", str(data), "--output", str(output), "--rows", SCHEME, *small]
    command = [str(model), *where, "--ways", "plain", "--rival", "auto-round", "--seeds", "0,1"]
    result = CliRunner().invoke(COMMANDS["learned"], command)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("tiny, perplexity in 16 bits: opticks ")
    check_file(output, RESULT)
    assert load(output, RESULT, ROW_KEYS)["complete"]
    refused = {
        "is none of plain, rotated": ["--ways", "bent"], "must be whole numbers": ["--seeds", "a"],
        "topics is the calibration text": ["--texts", "topics"], "--rival 'x'": ["--rival", "x"],
        "compared are integers in groups": ["--rows", "w8a8"], "has no absent.txt": ["--texts", "absent"],
    }  # fmt: skip
    for message, options in refused.items():
        result = CliRunner().invoke(study.app, [str(model), *where, *options])
        assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output


def test_the_table_has_means_over_seeds_and_their_spread():
    def row(way, seed, kl, processes=1):
        figures = {text: {"KL mean": [kl, None, 10]} for text in TEXTS}
        return {
            "scheme": SCHEME, "way": way, "seed": seed, "figures": figures, "seconds": 10.0 * (seed + 1),
            "bits_per_weight": 3.5, "processes": processes,
        }  # fmt: skip

    base = {"scheme": None, "figures": {text: {"perplexity": [20.0, 0.5, 10]} for text in TEXTS}}
    rows = [base, row("plain", 0, 0.2), row("plain", 1, 0.4), row("auto-round", 0, 0.5), row("rotated", 0, 0.1, processes=2)]
    text = table({"request": {"model": "m", "texts": list(TEXTS)}, "rows": rows})
    assert text.splitlines()[0] == "m, perplexity in 16 bits: handbook 20.00 ± 0.50, opticks 20.00 ± 0.50"
    spread = statistics.stdev([0.2, 0.4])
    assert f"| `{SCHEME}` | plain | 3.50 | 2 | 0.30 ± {spread:.2f} | 0.30 ± {spread:.2f} | 0.400 | 15 |" in text, (
        "the ratio is of seed 0"
    )
    assert f"| `{SCHEME}` | auto-round | 3.50 | 1 | 0.5 | 0.5 | 1.000 | 10 |" in text
    assert f"| `{SCHEME}` | rotated | 3.50 | 1 | 0.1 | 0.1 | 0.200 |  |" in text
