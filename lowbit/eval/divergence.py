"""The divergence of a quantized model's next-token distributions from those of its 16-bit model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbit.eval.figure import Figure, mean_of_windows
from lowbit.eval.windows import evaluating, one_text, plan_windows
from lowbit.progress import Progress

# Number of logits that are converted to float64 at a time. Each of about six temporary tensors then takes 32 MB.
_LOGITS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Divergence:
    """KL divergence in nats per token, over `tokens` predicted tokens in `windows` windows; see `divergence`.

    top1: share of tokens for which both models have the same most likely token. nll_difference: mean difference of the
    negative log-likelihoods, model minus reference, in nats. It is the logarithm of the ratio of the perplexities, but its
    standard error is far smaller than theirs, because both models read the same tokens.
    Standard errors take windows as units (`lowbit.eval.figure.mean_of_windows`); None for a single window.
    """

    mean: float
    median: float
    percentile99: float
    top1: float
    nll_difference: float
    tokens: int
    windows: int
    mean_standard_error: float | None
    top1_standard_error: float | None
    nll_difference_standard_error: float | None

    def figures(self) -> list[Figure]:
        """Returns the figures for tables and plots."""
        return [
            Figure("KL mean", self.mean, self.mean_standard_error, self.tokens, "tokens", "lower"),
            Figure("KL median", self.median, None, self.tokens, "tokens", "lower"),
            Figure("KL 99 %", self.percentile99, None, self.tokens, "tokens", "lower"),
            Figure("same top-1", self.top1, self.top1_standard_error, self.tokens, "tokens", "higher"),
            Figure("nll difference", self.nll_difference, self.nll_difference_standard_error, self.tokens, "tokens", "lower"),
        ]  # fmt: skip


@torch.inference_mode()
def divergence(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    input_ids: Tensor,
    *,
    window: int = 1024,
    stride: int | None = None,
    progress: bool = False,
) -> Divergence:
    """Returns KL(reference || model) of the next-token distributions at every token that `perplexity` scores.

    Per token it is the sum over the vocabulary of p (log p - log q), with p of the reference and q of the model, in float64.
    Both models run window by window, with the logits [T, V] of one window in memory. p = 0 adds 0; q = 0 where p > 0 makes the
    divergence infinite. The 99th percentile is interpolated linearly.

    Raises ValueError for vocabularies of different sizes, for NaN logits, and where `perplexity` does.
    """
    ids = one_text(input_ids, "divergence")
    batches = plan_windows(len(ids), window, stride)
    kl: list[Tensor] = []
    same: list[float] = []
    worse: list[float] = []
    with evaluating(model, reference), Progress(batches, desc="divergence", unit="windows", shown=progress) as bar:
        for (start,), length, count in bar:
            piece = ids[start : start + length]
            p, q = (_logits(m, piece, count).to(model.device) for m in (reference, model))
            if p.shape != q.shape:
                raise ValueError(
                    f"the reference has a vocabulary of {p.shape[-1]:,} tokens, the model one of {q.shape[-1]:,}; the "
                    "divergence compares a model with the one it was quantized from"
                )
            each, agree, difference = compare(p, q, piece[-count:].to(q.device))
            kl.append(each)
            same.append(float(agree.sum()))
            worse.append(float(difference.sum()))
    counts = [len(k) for k in kl]
    whole = torch.cat(kl)
    mean, mean_error = mean_of_windows([float(k.sum()) for k in kl], counts)
    top1, top1_error = mean_of_windows(same, counts)
    nll, nll_error = mean_of_windows(worse, counts)
    median, percentile99 = _quantile(whole, 0.5), _quantile(whole, 0.99)
    return Divergence(
        mean, median, percentile99, top1, nll, len(whole), len(kl), mean_error, top1_error, nll_error
    )  # fmt: skip


def compare(reference: Tensor, model: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compares logits [T, V] of two models, given the true next tokens [T]; results are on the CPU.

    Returns three tensors: KL(reference || model), float64 [T]; True where both have the same most likely token, bool [T]; and
    the negative log-likelihood of the model minus that of the reference, float64 [T].
    """
    rows = max(1, _LOGITS_AT_ONCE // reference.shape[-1])
    kl, same, difference = [], [], []
    for p_logits, q_logits, target in zip(reference.split(rows), model.split(rows), targets.split(rows), strict=True):
        log_p, log_q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
        p = log_p.exp()
        # Rounding can make the sum slightly negative (1e-16).
        kl.append(torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1).clamp(min=0).cpu())
        same.append((p_logits.argmax(-1) == q_logits.argmax(-1)).cpu())
        difference.append((log_p - log_q).gather(-1, target[:, None])[:, 0].cpu())
    whole = torch.cat(kl)
    if bool(whole.isnan().any()):
        raise ValueError("a model's logits are NaN or infinite, so there is no divergence; run it in bfloat16 or float32")
    return whole, torch.cat(same), torch.cat(difference)


def _logits(model: PreTrainedModel, ids: Tensor, count: int) -> Tensor:
    """Returns the logits [count, V] that predict the last `count` of the tokens [T]."""
    logits: Tensor = model(ids[None].to(model.device), use_cache=False, logits_to_keep=count + 1).logits
    return logits[0, -count - 1 : -1]


def _quantile(values: Tensor, rank: float) -> float:
    """Returns the linearly interpolated quantile; torch.quantile supports at most 2^24 values."""
    ordered = values.sort().values
    low = int(rank * (len(ordered) - 1))
    below, above = float(ordered[low]), float(ordered[min(low + 1, len(ordered) - 1)])
    # Equal values are returned as they are: they may be infinite, and infinity minus infinity is NaN.
    return below if below == above else below + (rank * (len(ordered) - 1) - low) * (above - below)
