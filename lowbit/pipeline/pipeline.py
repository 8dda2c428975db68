"""Generation with a Transformers model. Calls use the engine on a GPU and Transformers' `generate` elsewhere; streams use the
engine.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lowbit.engine import Detokenizer, Engine, FinishReason, RequestFailed, SampledToken
from lowbit.engine.kernels import use_kernels
from lowbit.engine.rank_processes import LeadingRanks, load_ranks
from lowbit.engine.step_budget import STEP_MS
from lowbit.engine.warm_up import Stage
from lowbit.formats.kv import parse_kv
from lowbit.hardware.machine import torch_device
from lowbit.models import numerics
from lowbit.models.head import SCHEME
from lowbit.models.load import load_causal
from lowbit.models.skeleton import is_encoder_decoder, tokenizer_of
from lowbit.models.source import resolve
from lowbit.nn.linear import make_batch_invariant
from lowbit.pipeline.params import GenerateParams, Response, UnknownArgument
from lowbit.pipeline.requests import config_refusals, requests_of
from lowbit.pipeline.stream import Stream
from lowbit.progress import Progress

DRAFT_TOKENS = 4
"""Tokens that a draft model guesses in a step by default."""


class Pipeline:
    """A model and its tokenizer, called with one prompt or several.

    `stop_token_ids`: tokens after which a sequence ends, sorted. `is_encoder_decoder`: True for models whose output does not
    continue the prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        engine: bool | None = None,
        kv: str = "16",
        speculate: int = 0,
        lora: Mapping[str, str | Path] | None = None,
        ranks: LeadingRanks | None = None,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self._engine: Engine | None = None
        self._engine_lock = threading.Lock()
        narrow = parse_kv(kv).quantized
        needs_engine = narrow or speculate > 0 or bool(lora) or ranks is not None
        self._wants_engine = model.device.type == "cuda" or needs_engine if engine is None else engine
        self.adapters = tuple(lora or ())
        """Names of the LoRA adapters that calls may name."""
        self._options = {"kv": kv, "speculate": speculate, "lora": lora, "ranks": ranks, **options}
        self._defaults: dict[str, object] = {} if max_length is None else {"max_length": max_length}
        GenerateParams.from_arguments(self._defaults)  # raises for a bad default here, not at the first call
        # The generation config of chat models adds tokens that end a turn.
        self.stop_token_ids = sorted({*_ids(model.generation_config.eos_token_id), *_ids(tokenizer.eos_token_id)})
        self.is_encoder_decoder = is_encoder_decoder(model)
        reasons = (*(() if self._wants_engine else ("engine=False asks for it",)), *self.refusals)
        if narrow and reasons:
            raise ValueError(
                f"keys and values in {kv} are the engine's; here Transformers would generate, whose cache has 16 bits "
                f"({'; '.join(reasons)}): leave kv at '16', or use the engine"
            )
        if speculate and reasons:
            raise ValueError(
                f"speculation is the engine's; here Transformers would generate ({'; '.join(reasons)}): leave speculate at 0, "
                "or use the engine"
            )
        if lora and reasons:
            raise ValueError(
                f"adapters are computed by the engine; here Transformers would generate ({'; '.join(reasons)}): merge the "
                "adapter into the model with PEFT, or use the engine"
            )
        if ranks is not None and reasons:
            raise ValueError(f"tensor parallelism is the engine's, which cannot compute this model: {'; '.join(reasons)}")

    def __call__(self, prompts: str | list[str], **arguments: Any) -> list[Response]:
        """Returns the responses to `prompts`, in order. No response depends on other prompts. Arguments are the fields of
        `GenerateParams`.

        Raises UnknownArgument for other arguments, ValueError for values out of range and for no or empty prompts, and
        RequestFailed if a sequence fails.
        """
        params = self._params(arguments)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or not all(isinstance(t, str) and t for t in texts):
            raise ValueError(f"prompts are one or more non-empty strings, got {prompts!r}")
        if self.model is None:
            raise RuntimeError("this pipeline was destroyed")
        encoded = [self.tokenizer(t).input_ids for t in texts]
        vocab = self.model.config.get_text_config().vocab_size
        if (last := max(map(max, filter(None, encoded)), default=0)) >= vocab:
            raise ValueError(f"tokens are from 0 to {vocab - 1}, the prompts have {last}: the tokenizer is another model's")
        limits = [params.new_tokens(1 if self.is_encoder_decoder else len(ids)) for ids in encoded]
        if self._uses_engine:
            generated = self._generate_by_engine(encoded, params, limits)
        else:
            generated = self._generate(encoded, params, max(limits))
        rows = zip(texts, encoded, generated, limits, strict=True)
        return [self._response(text, ids, new[:limit], params) for text, ids, new, limit in rows]

    def stream(self, prompt: str, **arguments: Any) -> Stream:
        """Streams the response to one prompt; arguments as in a call. The stream raises RequestFailed if the request fails.

        On a CPU, sampled output differs from that of a call with the same seed, since calls use torch's random numbers.
        """
        params = self._params(arguments)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"a stream is for one non-empty prompt, got {prompt!r}")
        if self.model is None:
            raise RuntimeError("this pipeline was destroyed")
        ids = self.tokenizer(prompt).input_ids
        return Stream(self._pieces(prompt, ids, params, params.new_tokens(len(ids))))

    def _params(self, arguments: dict[str, Any]) -> GenerateParams:
        """Returns the arguments of a call, with defaults. Raises UnknownArgument or ValueError for wrong ones."""
        params = GenerateParams.from_arguments({**self._defaults, **arguments})
        if params.adapter is not None and params.adapter not in self.adapters:
            known = (
                f"known are {', '.join(map(repr, self.adapters))}" if self.adapters else "give lora={name: folder} to pipeline"
            )
            raise ValueError(f"this pipeline has no adapter {params.adapter!r}: {known}")
        return params

    def _pieces(self, prompt: str, ids: list[int], params: GenerateParams, limit: int) -> Generator[str, None, Response]:
        text = Detokenizer(self.tokenizer, ids, params.stop)
        shown: list[str] = [prompt] if params.return_full_text else []

        def on_token(sampled: SampledToken) -> bool:
            shown.append(text.push(sampled.token))
            return text.stopped

        (request,) = requests_of([ids], [limit], params, self.model.generation_config, self.stop_token_ids, [on_token])
        sequence = self.engine.submit(request)
        with contextlib.closing(self.engine.stream(sequence)) as tokens:
            for _ in tokens:
                piece = "".join(shown)
                shown.clear()
                if piece:
                    yield piece
        if rest := text.finish():
            yield rest
        return self._response(prompt, ids, [sampled.token for sampled in sequence.sampled], params)

    @property
    def engine(self) -> Engine:
        """The engine, created at the first use; its `report()` describes how sequences are computed."""
        if self.model is None:
            raise RuntimeError("this pipeline was destroyed")
        if self.refusals:
            raise ValueError(f"the engine cannot sample tokens as this model asks: {'; '.join(self.refusals)}")
        with self._engine_lock:  # one engine, also for concurrent first uses
            if self._engine is None:
                self._engine = Engine(
                    self.model, forward=not self._wants_engine, stop_token_ids=self.stop_token_ids, **self._options
                )
            return self._engine

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons why the engine does not support the model; empty if it does. Without the engine there are no streams, and
        calls use Transformers' `generate`."""
        encoder = ("it is an encoder-decoder",) if self.is_encoder_decoder else ()
        return (*encoder, *config_refusals(self.model.generation_config))

    @property
    def _uses_engine(self) -> bool:
        """True if calls use the engine. Models without a decode program use `generate`, which computes all prompts in one
        batch.
        """
        return self._wants_engine and not self.refusals and not self.engine.program.reasons

    @property
    def ends(self) -> list[int]:
        """Deprecated name of `stop_token_ids`."""
        warnings.warn("Pipeline.ends is now Pipeline.stop_token_ids", DeprecationWarning, stacklevel=2)
        return self.stop_token_ids

    @property
    def encodes(self) -> bool:
        """Deprecated name of `is_encoder_decoder`."""
        warnings.warn("Pipeline.encodes is now Pipeline.is_encoder_decoder", DeprecationWarning, stacklevel=2)
        return self.is_encoder_decoder

    def destroy(self) -> None:
        """Frees the model and its memory; the pipeline cannot be called afterwards."""
        ranks = self._options.get("ranks")
        if ranks is not None:
            ranks.end()
        self.model = None  # type: ignore[assignment]
        self._engine, self._options = None, {}  # with the draft model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _generate_by_engine(self, encoded: list[list[int]], params: GenerateParams, limits: list[int]) -> list[list[int]]:
        """Returns the new tokens of each prompt, generated by the engine."""
        texts = [Detokenizer(self.tokenizer, ids, params.stop) if params.stop else None for ids in encoded]
        callbacks = [None if text is None else functools.partial(_completes_stop_string, text) for text in texts]
        requests = requests_of(encoded, limits, params, self.model.generation_config, self.stop_token_ids, callbacks)
        return [[sampled.token for sampled in sequence.sampled] for sequence in self.engine.generate(requests)]

    @torch.inference_mode()
    def _generate(self, encoded: list[list[int]], params: GenerateParams, limit: int) -> list[list[int]]:
        longest = max(len(ids) for ids in encoded)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.stop_token_ids or [0])[0]
        device = self.model.device

        def padded(ids: list[int], value: int) -> list[int]:
            # A decoder is padded on the left, so that new tokens follow the prompt; an encoder on the right.
            padding = [value] * (longest - len(ids))
            return [*ids, *padding] if self.is_encoder_decoder else [*padding, *ids]

        tokens = torch.tensor([padded(ids, pad) for ids in encoded], device=device)
        mask = torch.tensor([padded([1] * len(ids), 0) for ids in encoded], device=device)
        # Each row of the output begins with the start token of an encoder-decoder, or with the padded prompt.
        before = 1 if self.is_encoder_decoder else longest
        options: dict[str, Any] = {"max_new_tokens": limit, "pad_token_id": pad}
        # A min_new_tokens of 0 is not passed on, since it would override the model's own min_length.
        options |= {"min_new_tokens": params.min_new_tokens} if params.min_new_tokens else {}
        if params.do_sample:
            options |= {"do_sample": True, "top_p": params.top_p, "top_k": params.top_k or 0}
            options |= {"temperature": params.temperature} if params.temperature is not None else {}
        else:
            options |= {"do_sample": False, "top_p": None, "top_k": None, "temperature": None}
        if params.stop:
            options["stopping_criteria"] = StoppingCriteriaList([_StopStrings(self, encoded, before, params.stop)])
        options["logits_processor"] = LogitsProcessorList([_FiniteLogits()])
        options["eos_token_id"] = None if params.ignore_eos else (self.stop_token_ids or None)
        # The caller's random state is not changed.
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=params.seed is not None):
            if params.seed is not None:
                torch.manual_seed(params.seed)
            out: Tensor = self.model.generate(tokens, attention_mask=mask, **options)
        return [row.tolist() for row in out[:, before:]]

    def _response(self, prompt: str, ids: list[int], new: list[int], params: GenerateParams) -> Response:
        """Returns the response of a row of the batch. Its tokens are cut after the first stop token, its text before the first
        stop string."""
        reason = FinishReason.LENGTH
        if not params.ignore_eos:
            for i, token in enumerate(new):
                if token in self.stop_token_ids:
                    new, reason = new[: i + 1], FinishReason.STOP
                    break
        text = self._text(ids, new)
        cut = min((text.find(s) for s in params.stop if s in text), default=-1)
        if cut >= 0:
            reason = FinishReason.STOP
            new = new[: self._tokens_until(ids, new, params.stop)]
            text = text[:cut]
        return Response(prompt + text if params.return_full_text else text, len(ids), len(new), reason)

    def _text(self, ids: list[int], new: list[int]) -> str:
        """Returns the text of `new`, which follows the prompt `ids`. Both are decoded together, since some tokenizers drop the
        space before a text's first word."""
        ids = [] if self.is_encoder_decoder else ids
        prompt, whole = (self.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, [*ids, *new]))
        return whole[len(prompt) :] if whole.startswith(prompt) else self.tokenizer.decode(new, skip_special_tokens=True)

    def _tokens_until(self, ids: list[int], new: list[int], stop: Sequence[str]) -> int:
        """Returns the number of new tokens up to the end of the first stop string. More tokens may follow it, since a row
        grows until all rows of the batch have ended."""

        def has_stopped(count: int) -> bool:
            text = self._text(ids, new[:count])
            return any(s in text for s in stop)

        return 1 + bisect.bisect_left(range(1, len(new)), True, key=has_stopped)


class _FiniteLogits(LogitsProcessor):
    """Raises RequestFailed for NaN or infinite logits, for which Transformers silently takes token 0."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not bool(scores.amax(-1).isfinite().all()):  # amax propagates NaN; single -inf values are suppressed tokens
            raise RequestFailed("the model's logits are NaN or infinite; its weights or its config.json are damaged")
        return scores


class _StopStrings(StoppingCriteria):
    """Stops a row once its generated text, without the prompt, contains a stop string.

    Transformers' own criterion also searches the prompt. It stops a row if the first new token completes a stop string that
    begins in the prompt.
    """

    def __init__(self, pipe: Pipeline, encoded: list[list[int]], before: int, stop: Sequence[str]) -> None:
        self.pipe, self.encoded, self.before, self.stop = pipe, encoded, before, stop
        self.tail = 4 * max(len(s) for s in stop) + 4  # a character is at most four byte tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        beams = len(input_ids) // len(self.encoded)  # rows of each prompt; they are adjacent
        ended = [self._ended(self.encoded[i // beams], row) for i, row in enumerate(input_ids.tolist())]
        return torch.tensor(ended, device=input_ids.device)

    def _ended(self, ids: list[int], row: list[int]) -> bool:
        # First a quick search of the last tokens, which may include the prompt; then the generated text decides.
        tail = self.pipe.tokenizer.decode(row[-self.tail :], skip_special_tokens=True)
        if not any(s in tail for s in self.stop):
            return False
        text = self.pipe._text(ids, row[self.before :])
        return any(s in text for s in self.stop)


def pipeline(
    model_name_or_path: str,
    *,
    scheme: str | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    verify: bool = False,
    progress: bool = False,
    batch_invariant: bool = False,
    engine: bool | None = None,
    head: str | None = SCHEME,
    max_concurrent: int = 64,
    cache_bytes: int | None = None,
    kv: str = "16",
    speculate: int = 0,
    draft: str | Path | None = None,
    lora: Mapping[str, str | Path] | None = None,
    step_ms: float | None = STEP_MS,
    kernels: str | Path | None = None,
    tensor_parallel: int = 1,
    quantization_mode: str | None = None,
    **unknown: Any,
) -> Pipeline:
    """Returns a pipeline over a Transformers model at a path or hub name, or in a GGUF file. The interface is that of
    DeepSpeed-MII's `mii.pipeline`.

    The output continues the prompt. The output of an encoder-decoder such as BART or T5 does not: it is a separate text,
    generated by Transformers' `generate`.

    Args:
        scheme: quantize 16-bit weights to it while loading ("wf6af16", "w4a16_g64", ...), as `lowbit.load` does. None loads the
            model unchanged: in 16 bits, or quantized by lowbit or another tool (`lowbit.load`).
        quantization_mode: deprecated name of `scheme`, from DeepSpeed-MII.
        tokenizer: a tokenizer or its path, if it is not the model's own.
        device: default "cuda" if torch sees a GPU, else "cpu".
        dtype: dtype of activations. Default on a GPU: the checkpoint's own. Default on a CPU: bfloat16 for quantized models,
            which run several times slower in float32 (`models.cpu`), and float32 for others.
        max_length: default `max_length` of calls, in tokens of prompt and output together.
        verify: first compare the files of a lowbit checkpoint with their checksums.
        progress: show bars while another tool's layers are read and while kernels are compiled for the first request.
        batch_invariant: on a GPU, quantized layers compute the same bits for a token in every batch.
        engine: True makes calls use the decode engine (docs/generate.md), False Transformers' `generate`. Default: True on a
            GPU.
        head: scheme of the LM head and the embedding of a quantized model, if the engine computes it on a GPU; None leaves them
            in 16 bits.
        max_concurrent: maximum number of sequences that the engine computes at once.
        cache_bytes: the engine's memory for keys and values (default: most of the GPU's free memory, `engine.Engine`).
        kv: how the engine stores keys and values: "16", "fp8", "int8", "int4", or one format for keys and another for values
            (docs/kv.md). Anything but "16" makes calls use the engine, on a CPU too.
        speculate: maximum number of tokens, up to 7, that a step guesses from a sequence's own text and verifies
            (docs/speculate.md). Any number above 0 makes calls use the engine, on a CPU too.
        draft: folder or hub name of a small model with the same tokenizer, which guesses the tokens instead. It is quantized to
            `scheme` unless its files are quantized already. `speculate` is 4 with a draft model unless it is given.
        lora: folders of LoRA adapters as PEFT writes them, by names (docs/lora.md). A call with `adapter=name` is computed with
            that adapter, other calls without one. Adapters make calls use the engine, on a CPU too.
        step_ms: milliseconds that a step of the engine on a GPU may take if it computes prompt tokens and decodes sequences at
            once; None for no limit.
        kernels: a kernels file of `lowbit compile`, so that nothing is compiled on a GPU. By default a file `kernels-*.lowbit`
            beside the checkpoint is used if this user compiled it. It runs with this process's rights.
        tensor_parallel: number of GPUs that compute the model together, each in a process of its own with its part of the
            weights (docs/generate.md). On a CPU, number of processes.

    Raises UnknownArgument for other arguments, CheckpointError for checkpoints that `models.load.load_causal` refuses (one that
    lacks parameters, for example), and ValueError if the checkpoint is already quantized to another scheme, the draft model has
    other tokens, or an adapter does not fit.
    """
    for name in unknown:
        raise UnknownArgument(name, set(inspect.signature(pipeline).parameters) - {"unknown"})
    if quantization_mode is not None:
        if scheme is not None and scheme != quantization_mode:
            raise ValueError(
                f"quantization_mode is the old name of scheme; got {quantization_mode!r} and {scheme!r}: leave out the first"
            )
        warnings.warn("quantization_mode is the old name of scheme", DeprecationWarning, stacklevel=2)
        scheme = quantization_mode
    parse_kv(kv)
    device, source = torch_device(device), resolve(model_name_or_path)
    if device.type == "cuda":
        folder = source.path if source.path.is_dir() else source.path.parent
        use_kernels(device, kernels, folder)  # before the weights are loaded, since kernels pack them
    head = head if engine in (True, None) and device.type == "cuda" else None
    ranks: LeadingRanks | None = None
    if tensor_parallel > 1:
        if engine is False or draft is not None or lora:
            what = "engine=False" if engine is False else "a draft model" if draft is not None else "LoRA adapters"
            raise ValueError(f"tensor_parallel={tensor_parallel} is the engine's, and goes without {what}")
        model, ranks = load_ranks(
            source, tensor_parallel, device, scheme=scheme, dtype=dtype, head=head, batch_invariant=batch_invariant,
            verify=verify, kernels=kernels,
        )  # fmt: skip
    else:
        model = load_causal(
            source, scheme=scheme, device=device, dtype=dtype, verify=verify, progress=progress, head=head,
            or_encoder_decoder=True,
        )  # fmt: skip
        numerics.check(model, source.path)
        if batch_invariant:
            make_batch_invariant(model, model.dtype)
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        tokenizer = tokenizer_of(tokenizer or source.path, model)
    drafts = {} if draft is None else {"draft": _draft_model(draft, scheme, tokenizer, model, device)}
    return Pipeline(
        model, tokenizer, max_length=max_length, engine=engine, batch_invariant=batch_invariant,
        max_concurrent=max_concurrent, cache_bytes=cache_bytes, kv=kv, step_ms=step_ms, lora=lora,
        speculate=speculate or (DRAFT_TOKENS if drafts else 0), ranks=ranks, progress=Bar() if progress else None, **drafts,
    )  # fmt: skip


def _draft_model(
    draft: str | Path, scheme: str | None, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, device: torch.device
) -> PreTrainedModel:
    """Returns a draft model, quantized to `scheme` unless its files are quantized. Raises ValueError if its vocabulary differs
    from that of the model's tokenizer."""
    source = resolve(draft)
    if source.quantized_to is not None or source.gguf is not None:
        scheme = None
    head = SCHEME if device.type == "cuda" else None
    loaded = load_causal(source, scheme=scheme, device=device, dtype=model.dtype, head=head)
    own, other = tokenizer.get_vocab(), tokenizer_of(source.path, loaded).get_vocab()
    if own != other:
        differ = sum(other.get(token) != number for token, number in own.items())
        raise ValueError(
            f"{draft}: a draft model has the tokens of the model; {differ:,} of {len(own):,} differ: take one of its family"
        )
    return loaded.eval()


class Bar:
    """A progress bar, removed when its work is done."""

    def __init__(self) -> None:
        self._shown: Progress | None = None

    def __call__(self, stage: Stage) -> None:
        """Shows a stage."""
        if self._shown is None:
            self._shown = Progress(total=stage.total, desc=stage.what, unit="done")
        self._shown.at(stage.done, stage.total, stage.what)
        if stage.done == stage.total:
            self._shown.close()
            self._shown = None


def _completes_stop_string(text: Detokenizer, sampled: SampledToken) -> bool:
    """Adds a token; returns True if it completes a stop string."""
    text.push(sampled.token)
    return text.stopped


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
