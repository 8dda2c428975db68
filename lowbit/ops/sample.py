"""The torch operator `lowbit::sample`: samples the next token of each row of a decode step, with the settings of its request.

NVIDIA GPUs use one launch if all requests are greedy, else four (kernels/elementwise/sample.py); a CUDA graph may capture them.
A CPU uses plain torch (kernels/reference/sampling.py). Both sample the same tokens.
"""

from __future__ import annotations

import functools
import numbers
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.hardware.machine import machine_of
from lowbit.kernels.reference import sampling
from lowbit.kernels.reference.sampling import SampleInputs
from lowbit.ops.operands import check_one_device
from lowbit.ops.register import register
from lowbit.ops.workspace import workspace

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.sample import SamplePlan

LEAST_TEMPERATURE = 1e-3
"""Smallest temperature other than 0. Below it float32 could not represent the scaled logits."""


_LARGEST = torch.finfo(torch.float32).max


def is_whole(value: object) -> bool:
    """Returns True for an integer of Python or NumPy, except a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Returns True for a number of Python or NumPy, except a bool, that is finite in float32."""
    if isinstance(value, bool) or not issubclass(type(value), numbers.Real):
        return False
    return bool(-_LARGEST <= value <= _LARGEST)  # False for NaN


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of one request. The defaults are greedy sampling without penalties.

    `temperature` 0 takes the token with the largest logit, the first one of equals; otherwise it must be 0.001 or more. `top_k`
    0, `top_p` 1 and `min_p` 0 keep all tokens; tokens that equal a threshold are all kept. `repetition_penalty` (1: none)
    divides positive logits and multiplies negative logits of tokens in the prompt or the answer. `presence_penalty` is
    subtracted once from the logits of tokens in the answer, `frequency_penalty` once per occurrence. `seed` is any 64-bit
    number; it determines the tokens, together with the logits. `logit_bias` is added to the logits of tokens: a mapping of
    token to number, or pairs. No end-of-text token is sampled before `min_new_tokens` tokens. Raises ValueError for values out
    of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        def real(name: str, least: float, most: float) -> bool:
            return is_real(value := getattr(self, name)) and least <= value <= most

        def whole(name: str, least: int, most: int) -> bool:
            return is_whole(value := getattr(self, name)) and least <= value < most

        ranges = (
            ("temperature", "0 or 0.001 to 1000", real("temperature", 0, 0) or real("temperature", LEAST_TEMPERATURE, 1000)),
            ("top_k", "0 (off) to 2^31 - 1", whole("top_k", 0, 1 << 31)),
            ("top_p", "more than 0 and at most 1 (off)", real("top_p", 0, 1) and self.top_p > 0),
            ("min_p", "0 (off) to 1", real("min_p", 0, 1)),
            ("repetition_penalty", "0.001 to 1000, 1 being none", real("repetition_penalty", LEAST_TEMPERATURE, 1000)),
            ("presence_penalty", "finite", is_real(self.presence_penalty)),
            ("frequency_penalty", "finite", is_real(self.frequency_penalty)),
            ("seed", "a 64-bit number", whole("seed", -(1 << 63), 1 << 64)),
            ("logit_bias", "token numbers from 0 on with finite numbers", _are_biases(self.logit_bias)),
            ("min_new_tokens", "0 to 2^31 - 1", whole("min_new_tokens", 0, 1 << 31)),
        )
        for name, wanted, right in ranges:
            if not right:
                raise ValueError(f"sampling: {name} is {wanted}, got {getattr(self, name)!r}")

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` in pairs."""
        given = self.logit_bias
        return tuple(given.items()) if isinstance(given, Mapping) else tuple(given)

    @functools.cached_property
    def greedy(self) -> bool:
        """True if `sample` with `any_filter=False` supports these settings."""
        return self.temperature == 0 and not self.flags & ~sampling.CUT

    @property
    def flags(self) -> int:
        """The settings in use that need extra work, as bits of `SamplingState.flags`."""
        penalized = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        cut = self.top_k > 0 or self.top_p < 1
        used = (
            (sampling.PENALIZED, penalized),
            (sampling.BIASED, bool(self.bias)),
            (sampling.CUT, cut),
            (sampling.HELD, self.min_new_tokens > 0),
        )
        return sum(bit for bit, yes in used if yes)


def _are_biases(given: object) -> bool:
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return False
    return all(is_whole(token) and token >= 0 and is_real(bias) for token, bias in pairs)


def _word(name: int, dtype: torch.dtype) -> property:
    """Returns a property for one setting of all slots. It is a view of the setting's word in each slot's row."""
    each = dtype.itemsize // 4
    return property(lambda state: state.settings.view(dtype)[:, name // each], doc=f"{dtype} [slots]")


@dataclass(frozen=True)
class SamplingState:
    """The settings and counters of all slots, on their device. The addresses of its tensors never change.

    `settings` int32 [slots, 16] has one row of scalars for each slot. The properties below are views [slots] of single
    settings, as float32, int32 or, for `seed`, int64. `counts` int32 [slots, V] is the number of times each token was
    generated, plus bit 30 if the prompt contains it. `bias` is float32 [slots, V]. `masks` int32 [slots * depth, ceil(V / 32)]
    has a bit for each token, bit t % 32 of word t // 32, which is set if the slot's grammar allows the token. A slot has
    `depth` rows of masks: the first for its next token, the others for the tokens after it (`of_rows`). `counts`, `bias` and
    `masks` are only read for slots whose `flags` require them. `ends` int32 [E] are the end-of-text tokens. The last slot is a
    dummy slot: padding rows of a step use it, and `sample` does not change it.
    """

    settings: Tensor
    counts: Tensor
    bias: Tensor
    masks: Tensor
    ends: Tensor

    temperature = _word(sampling.TEMPERATURE, torch.float32)
    top_k = _word(sampling.TOP_K, torch.int32)
    top_p = _word(sampling.TOP_P, torch.float32)
    min_p = _word(sampling.MIN_P, torch.float32)
    repetition = _word(sampling.REPETITION, torch.float32)
    presence = _word(sampling.PRESENCE, torch.float32)
    frequency = _word(sampling.FREQUENCY, torch.float32)
    minimum = _word(sampling.MINIMUM, torch.int32)
    seed = _word(sampling.SEED, torch.int64)
    flags = _word(sampling.FLAGS, torch.int32)
    generated = _word(sampling.GENERATED, torch.int32)

    @classmethod
    def make(
        cls, slots: int, vocab: int, ends: Iterable[int], device: torch.device | str, depth: int = 1
    ) -> SamplingState:  # fmt: skip
        """Returns the state of `slots` greedy slots, including the dummy slot, for logits [.., vocab], with `depth` masks each.
        It takes 8 bytes for each slot and token.

        Raises ValueError for ends outside the vocabulary and for fewer than two slots.
        """
        found = sorted(set(ends))
        if slots < 2 or vocab < 1 or not all(0 <= end < vocab for end in found):
            raise ValueError(
                f"sampling: {slots} slots (2 or more, the last a dummy) with ends {found} below {vocab} are needed"
            )
        of_slots = b"".join(_row(Sampling(), mask=slot * depth) for slot in range(slots))
        settings = torch.frombuffer(bytearray(of_slots), dtype=torch.int32).view(slots, -1)
        counts = torch.zeros((slots, vocab), dtype=torch.int32, device=device)
        bias = torch.zeros((slots, vocab), dtype=torch.float32, device=device)
        masks = torch.full((slots * depth, mask_words(vocab)), -1, dtype=torch.int32, device=device)
        return cls(settings.to(device), counts, bias, masks, torch.tensor(found, dtype=torch.int32, device=device))

    def set(
        self, slot: int, settings: Sampling, prompt_ids: Sequence[int], generated_ids: Sequence[int] = (), masked: bool = False
    ) -> None:
        """Writes the settings of a request to a slot. The request may have generated tokens already, in another slot. `masked`:
        True if `sample` is to read the slot's rows of `masks`; the caller must then write them before each call.

        On a GPU this enqueues copies and kernels on the current stream without synchronising the host.

        Token ids are only read if the settings have penalties. Raises ValueError for a slot, token or bias that does not exist.
        """
        slots, vocab = self.counts.shape
        if not 0 <= slot < slots - 1:
            raise ValueError(f"sampling: slots are 0 to {slots - 2} (the last one is a dummy), got {slot}")
        penalized = bool(settings.flags & sampling.PENALIZED)  # without penalties the prompt is not read
        tokens, biased = sorted(set(prompt_ids)) if penalized else [], dict(settings.bias)
        for what, ids in (("the prompt has", tokens), ("the answer has", generated_ids), ("logit_bias has", list(biased))):
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                raise ValueError(f"sampling: tokens are 0 to {vocab - 1}, {what} {min(ids)} to {max(ids)}")
        row = _row(settings, len(generated_ids), masked, slot * self.depth)
        self.settings[slot].copy_(self._sent(torch.frombuffer(bytearray(row), dtype=torch.int32)))
        if penalized:
            self.counts[slot].zero_()
            counted = Counter(generated_ids)
            counted.update(dict.fromkeys(tokens, sampling.PROMPT))
            if counted:
                values = self._sent(torch.tensor(list(counted.values()), dtype=torch.int32))
                self.counts[slot].index_copy_(0, self._sent(torch.tensor(list(counted))), values)
        if settings.flags & sampling.BIASED:
            self.bias[slot].zero_()
            values = self._sent(torch.tensor(list(biased.values()), dtype=torch.float32))
            self.bias[slot].index_copy_(0, self._sent(torch.tensor(list(biased))), values)

    @property
    def depth(self) -> int:
        """Number of masks of a slot."""
        return self.masks.shape[0] // self.counts.shape[0]

    def set_masks(self, slots: Sequence[int], masks: Tensor, ahead: Sequence[int] | None = None) -> None:
        """Writes masks int32 [len(slots), ceil(V / 32)], which are in host memory. Mask i is for the next token of slots[i], or
        with `ahead` for the token that follows ahead[i] < depth more tokens. On a GPU this enqueues copies on the current
        stream without synchronising the host. The caller may overwrite `masks` at once, unless they are in pinned memory.
        """
        rows = [slot * self.depth + more for slot, more in zip(slots, ahead or [0] * len(slots), strict=True)]
        self.masks.index_copy_(0, self._sent(torch.tensor(rows)), self._sent(masks))

    def of_rows(self, rows: Tensor, ahead: Tensor) -> Tensor:
        """Returns the settings int32 [B, 16] of rows. Row i has the settings of slot rows[i] after ahead[i] more tokens, and
        the slot's mask for that place. rows and ahead are int32 [B]. If the slot has masks, ahead[i] must be below depth."""
        own = self.settings.index_select(0, rows)
        own[:, sampling.GENERATED : sampling.MASK + 1] += ahead[:, None]
        return own

    def _sent(self, made: Tensor) -> Tensor:
        """Copies a host tensor to the device, from pinned memory that torch keeps until the copy has finished."""
        return made.pin_memory().to(self.counts.device, non_blocking=True) if self.counts.is_cuda else made


def mask_words(vocab: int) -> int:
    """Returns the number of 32-bit words of a mask with a bit for each token."""
    return -(-vocab // 32)


def _row(s: Sampling, generated: int = 0, masked: bool = False, mask: int = 0) -> bytes:
    """Returns the 16 words of a slot as bytes; kernels/reference/sampling.py names them."""
    seed = s.seed - (1 << 64) if s.seed >= 1 << 63 else s.seed
    penalties = s.repetition_penalty, s.presence_penalty, s.frequency_penalty
    flags = s.flags | (sampling.MASKED if masked else 0)
    return struct.pack(
        "<fi5fiq6i",
        s.temperature,
        s.top_k,
        s.top_p,
        s.min_p,
        *penalties,
        s.min_new_tokens,
        seed,
        flags,
        generated,
        mask,
        *[0] * 3,
    )


def sample(
    logits: Tensor, rows: Tensor, state: SamplingState, tokens: Tensor, positions: Tensor, out_tokens: Tensor,
    out_logprobs: Tensor, *, any_filter: bool = True, settings_of_rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Samples the next token of each row of logits [B, V] (fp16, bf16 or fp32, any row stride) with the settings of its slot.

    If row i of slot s = rows[i] samples token t, then out_tokens[i] and tokens[s] become t, positions[s] and state.generated[s]
    grow by 1, and so does state.counts[s, t] if the slot has penalties. out_logprobs[i] becomes the log softmax, at t, of the
    given logits, before penalties and temperature. rows and out_tokens are int32 [B], tokens and positions int32 [slots],
    out_logprobs is float32 [B]. The last slot does not change. Several rows may use it; any other slot may be used by one row
    only. A NaN among the logits counts as -inf; if all logits are -inf or banned, all tokens are equally likely. The
    log-probability of a row with a NaN or +inf, or with only -inf, is NaN. `any_filter=False` promises that all settings are
    `greedy` and that no slot has a mask.
    kernels/reference/sampling.py documents each setting and the order of operations. On sm_90 the kernels read `rows` and the
    settings while the preceding kernel in the stream may still run, so that kernel must not write them.

    With `settings_of_rows` (int32 [B, 16], `SamplingState.of_rows`) each row has settings of its own, several rows may use a
    slot, and nothing but out_tokens and out_logprobs is written: `ops.accept` then advances the slots. Raises ValueError for
    tensors that do not fit together.
    """
    settings = state.settings if settings_of_rows is None else settings_of_rows
    torch.ops.lowbit.sample(
        logits, rows, settings, state.counts, state.bias, state.masks, state.ends, tokens, positions, out_tokens,
        out_logprobs, any_filter, settings_of_rows is not None,
    )  # fmt: skip


def top_logprobs(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Returns the n largest log-probabilities (log softmax of logits [B, V]), float32 [B, n] in falling order, and their
    tokens, int32 [B, n].

    Computed by torch, before penalties and temperature as in `sample`. The order of equal logits is undefined.
    """
    values, ids = logits.topk(n, dim=-1)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), ids.int()


def _check(a: SampleInputs) -> None:
    """Raises ValueError unless the tensors fit together."""
    logits = a.logits
    if logits.dim() != 2 or logits.dtype not in (torch.float16, torch.bfloat16, torch.float32) or logits.stride(1) != 1:
        raise ValueError(
            f"sample: logits are fp16, bf16 or fp32 [B, V] without gaps in a row, got {logits.dtype} {tuple(logits.shape)}"
        )
    (b, vocab), slots = logits.shape, a.counts.shape[0]
    settings = (b if a.of_rows else slots, sampling.WORDS)
    wanted = (
        ("rows", a.rows, (b,), torch.int32), ("settings", a.settings, settings, torch.int32),
        ("counts", a.counts, (slots, vocab), torch.int32), ("bias", a.bias, (slots, vocab), torch.float32),
        ("masks", a.masks, (max(1, len(a.masks) // slots) * slots, mask_words(vocab)), torch.int32),
        ("ends", a.ends, (a.ends.numel(),), torch.int32), ("tokens", a.tokens, (slots,), torch.int32),
        ("positions", a.positions, (slots,), torch.int32), ("out_tokens", a.out_tokens, (b,), torch.int32),
        ("out_logprobs", a.out_logprobs, (b,), torch.float32),
    )  # fmt: skip
    for name, t, shape, dtype in wanted:
        if tuple(t.shape) != shape or t.dtype != dtype or not t.is_contiguous():
            raise ValueError(
                f"sample: {name} is contiguous {str(dtype)[6:]} {shape} for logits {tuple(logits.shape)} and {slots} slots, "
                f"got {str(t.dtype)[6:]} {tuple(t.shape)}"
            )
    check_one_device("sample", logits, *(t for _, t, _, _ in wanted))


def _on_cpu(a: SampleInputs) -> None:
    _check(a)
    sampling.sample_reference(*a[:-2], of_rows=a.of_rows)


def _on_gpu(a: SampleInputs) -> None:
    _check(a)
    if not len(a.rows):
        return
    logits, aligned = a.logits, a.logits.data_ptr() % 16 == 0
    sizes = len(a.counts), len(a.ends)
    plan = _plan(logits.shape, logits.stride(0), logits.dtype, aligned, *sizes, a.any_filter, a.of_rows, logits.device)
    plan(a, *workspace(logits.device, *plan.workspace))


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size, stride: int, dtype: torch.dtype, aligned: bool, slots: int, ends: int, filters: bool, of_rows: bool,
    on: torch.device,
) -> SamplePlan:  # fmt: skip
    from lowbit.kernels.elementwise.sample import SamplePlan

    return SamplePlan(shape[0], shape[1], stride, slots, ends, filters, machine_of(on).arch.sm >= 90, of_rows=of_rows)


register(
    "sample(Tensor logits, Tensor rows, Tensor(a!) settings, Tensor(b!) counts, Tensor bias, Tensor masks, Tensor ends,"
    " Tensor(c!) tokens, Tensor(d!) positions, Tensor(e!) out_tokens, Tensor(f!) out_logprobs, bool any_filter=True,"
    " bool of_rows=False) -> ()",
    cuda=_on_gpu,
    cpu=_on_cpu,
    fake=_check,
    arguments=SampleInputs,
)
