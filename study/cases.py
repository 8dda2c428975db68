"""What the study quantizes: the cases, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from torch import nn

from lowbit.methods import DATA_FREE, Awq, Gptq, Hqq, Learned, Method, Rtn, SmoothQuant

FORMATS = {
    "int4": "w4a16",
    "fp5_e2m2": "w5e2m2a16",
    "fp6_e3m2": "w6e3m2a16",
    "int6": "w6a16",
    "int8": "w8a16",
    "fp8_e4m3": "w8e4m3a16",
}
"""Number formats of the grid and the prefixes of their scheme names."""

DEFAULT_TEXT = "topics"
"""Default calibration text: Python's help, as in `lowbit quantize`."""

GROUPS = (128, 64, 32, 16)

DISTILL = 200
"""Steps of distillation of the cases that have it."""


@dataclass(frozen=True)
class Case:
    """One way to quantize the model. `text` names the calibration text (None for methods without data) and `seed` samples
    from it. Cases with `tasks` are also measured on questions, summaries and programs. `rotation` is the seed of a preceding
    rotation, or None. With `rotate_inputs`, the inputs of all linear layers are rotated at run time."""

    scheme: str
    method: Method
    text: str | None = None
    seed: int = 0
    tasks: bool = False
    rotation: int | None = None
    rotate_inputs: bool = False

    @property
    def key(self) -> str:
        """Unique key of the case in a result file."""
        parts = [self.scheme, *self.method_name.split(" ")]
        return " ".join(parts if self.text is None else [*parts, self.text, f"seed {self.seed}"])

    @property
    def method_name(self) -> str:
        """The method with its non-default options, rotations included: `gptq search=mse rotate=True`."""
        folded = " rotate=True" if self.rotation is not None else ""
        return method_name(self.method) + folded + (" rotate_inputs=*" if self.rotate_inputs else "")


def method_name(method: Method) -> str:
    """Returns the method with its non-default options: `gptq search=mse damping=0.01`."""
    options = {f.name: f.default for f in fields(method)}
    changed = [f"{name}={value}" for name, value in asdict(method).items() if value != options[name]]
    return " ".join([type(method).__name__.lower(), *changed])


def group_size(model: nn.Module) -> int:
    """Returns the largest of `GROUPS` that divides the inputs of every linear layer but the LM head. Raises ValueError if
    none does."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    sizes = {m.in_features for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    for size in GROUPS:
        if all(k % size == 0 for k in sizes):
            return size
    raise ValueError(f"linear layers with {sorted(sizes)} inputs: none of the groups {GROUPS} divides all of them")


def cases(group: int, texts: Sequence[str]) -> list[Case]:
    """Returns all cases, given the size of fine groups and the names of the calibration texts.

    First the methods without data, then GPTQ over the same grid, then the ablations: other calibration texts and seeds, GPTQ's
    defaults turned off one by one, and other methods for the plot of quality against bits; at the end 2 and 3 bits that are
    distilled, and 8-bit activations.
    """
    fine = f"_g{group}"
    coarse_int4, fine_int4 = _coarse("w4a16"), f"w4a16{fine}"
    grid = [scheme for start in FORMATS.values() for scheme in (_coarse(start), f"{start}{fine}")]
    found = [Case(scheme, Rtn(), tasks=True) for scheme in grid]
    found += [Case(s, Rtn()) for start in ("w3a16", "w5a16", "w6e2m3a16", "w8e3m4a16") for s in (start, f"{start}{fine}")]
    first = (fine_int4, coarse_int4)
    found += [Case(scheme, Rtn("mse")) for scheme in first]
    found += [Case(f"{fine_int4}_z", Rtn()), Case(f"{fine_int4}_fz", Rtn()), Case(f"{fine_int4}_fz", Hqq())]
    found += [Case(scheme, Gptq(), DEFAULT_TEXT, tasks=True) for scheme in (*first, *(s for s in grid if s not in first))]
    others = [name for name in texts if name != DEFAULT_TEXT]
    found += [Case(scheme, Gptq(), name) for scheme in first for name in others]
    found += [Case(fine_int4, Awq(), DEFAULT_TEXT, tasks=True), Case(fine_int4, Awq("loss"), DEFAULT_TEXT, tasks=True)]
    for method in (Gptq(search="mse", damping=0.01), Gptq(damping=0.01), Gptq(search="mse")):
        found += [Case(scheme, method, DEFAULT_TEXT) for scheme in first]
    found += [Case(scheme, Gptq(), DEFAULT_TEXT, seed) for seed in (1, 2) for scheme in first]
    found += [Case(_coarse("w6e3m2a16"), Gptq(), name) for name in others]
    found += [Case(f"{fine_int4}_z", Awq(), DEFAULT_TEXT), Case(fine_int4, Gptq(act_order=True), DEFAULT_TEXT)]
    found += [Case(f"{fine_int4}_z", Gptq(act_order=True), DEFAULT_TEXT), Case(f"w3a16{fine}", Gptq(), DEFAULT_TEXT)]
    few_bits = (fine_int4, coarse_int4, f"w3a16{fine}")
    found += [Case(scheme, Learned(), DEFAULT_TEXT) for scheme in few_bits]
    found += [Case("w2a16_g32", method, DEFAULT_TEXT) for method in (Gptq(), Learned())]
    found += [Case(scheme, Rtn(), rotation=0) for scheme in few_bits]
    found += [Case(scheme, method, DEFAULT_TEXT, rotation=0) for scheme in few_bits for method in (Gptq(), Learned())]
    distilled = Learned(distill=DISTILL)
    found += [Case(scheme, distilled, DEFAULT_TEXT) for scheme in ("w2a16_g32", f"w2a16{fine}", f"w3a16{fine}")]
    return found + _activation_cases(fine)


def _activation_cases(fine: str) -> list[Case]:
    """Returns the cases with 8-bit activations: rounded to nearest, smoothed, with rotated inputs, and by GPTQ."""
    integer = ("w8a8", f"w4a8{fine}")
    found = [Case(scheme, Rtn()) for scheme in (*integer, "w8a8_az", "fp8_dynamic")]
    found += [Case(scheme, Rtn(), rotate_inputs=True) for scheme in integer]
    found += [Case(scheme, SmoothQuant(), DEFAULT_TEXT) for scheme in ("w8a8", "w8a8_az")]
    found += [Case(scheme, Gptq(), DEFAULT_TEXT) for scheme in integer]
    return found + [Case(scheme, Gptq(), DEFAULT_TEXT, rotate_inputs=True) for scheme in integer]


def needs_text(case: Case) -> bool:
    """True if a case is calibrated."""
    return not isinstance(case.method, DATA_FREE)


def _coarse(start: str) -> str:
    """Returns the scheme with one scale per output channel; the bare `w4a16` is an alias for groups."""
    return f"{start}_pc" if start == "w4a16" else start
