"""Batched generation with a Transformers model: left padding, exact finish reasons, one Response per prompt."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lowbit.formats import parse_scheme
from lowbit.models.hf import LowbitConfig
from lowbit.pipeline.request import FinishReason, GenerateParams, Response, UnknownArgument


class Pipeline:
    """A model and its tokenizer, called with one prompt or several."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        # Chat models name further tokens that end a turn in their generation config.
        self._eos = sorted({*_ids(model.generation_config.eos_token_id), *_ids(tokenizer.eos_token_id)})

    def __call__(self, prompts: str | list[str], **arguments: Any) -> list[Response]:
        """Responses to `prompts`, in order; arguments are the fields of `GenerateParams`.

        Raises UnknownArgument for others, ValueError for values out of range, no or empty prompts.
        """
        params = GenerateParams.from_arguments(arguments)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or not all(isinstance(t, str) and t for t in texts):
            raise ValueError(f"prompts are one or more non-empty strings, got {prompts!r}")
        if self.model is None:
            raise RuntimeError("this pipeline was destroyed")
        encoded = [self.tokenizer(t).input_ids for t in texts]
        limit = params.new_tokens(max(len(ids) for ids in encoded))
        generated = self._generate(encoded, params, limit)
        return [self._response(t, ids, new, params) for t, ids, new in zip(texts, encoded, generated, strict=True)]

    def destroy(self) -> None:
        """Lets go of the model and its memory; the pipeline cannot be called afterwards."""
        self.model = None  # type: ignore[assignment]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _generate(self, encoded: list[list[int]], params: GenerateParams, limit: int) -> list[list[int]]:
        longest = max(len(ids) for ids in encoded)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self._eos or [0])[0]
        device = self.model.device
        tokens = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in encoded], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in encoded], device=device)
        options: dict[str, Any] = {"max_new_tokens": limit, "min_new_tokens": params.min_new_tokens, "pad_token_id": pad}
        if params.do_sample:
            options |= {"do_sample": True, "top_p": params.top_p, "top_k": params.top_k or 0}
            options |= {"temperature": params.temperature} if params.temperature is not None else {}
        else:
            options |= {"do_sample": False, "top_p": None, "top_k": None, "temperature": None}
        if params.stop:
            options |= {"stop_strings": list(params.stop), "tokenizer": self.tokenizer}
        options["eos_token_id"] = None if params.ignore_eos else (self._eos or None)
        if params.seed is not None:
            torch.manual_seed(params.seed)
        out: Tensor = self.model.generate(tokens, attention_mask=mask, **options)
        return [row.tolist() for row in out[:, longest:]]

    def _response(self, prompt: str, ids: list[int], new: list[int], params: GenerateParams) -> Response:
        """Cuts one row of the batch where it ended: at the end-of-text token, then at the first stop string."""
        reason = FinishReason.LENGTH
        if not params.ignore_eos:
            for i, token in enumerate(new):
                if token in self._eos:
                    new, reason = new[: i + 1], FinishReason.STOP
                    break
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        cut = min((text.find(s) for s in params.stop if s in text), default=-1)
        if cut >= 0:
            reason = FinishReason.STOP
            new = new[: self._tokens_until(new, params.stop)]
            text = text[:cut]
        return Response(prompt + text if params.return_full_text else text, len(ids), len(new), reason)

    def _tokens_until(self, new: list[int], stop: Any) -> int:
        """How many tokens there were when a stop string was complete; others of the batch may have run on."""
        for count in range(1, len(new)):
            text = self.tokenizer.decode(new[:count], skip_special_tokens=True)
            if any(s in text for s in stop):
                return count
        return len(new)


def pipeline(
    model_name_or_path: str,
    *,
    quantization_mode: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **unknown: Any,
) -> Pipeline:
    """A pipeline over the Transformers model at a path or hub name, DeepSpeed-MII's `mii.pipeline`.

    quantization_mode: a scheme to quantize 16-bit weights to while loading ("wf6af16", "w4a16_g64", ...); None takes the
    model as it is, quantized or not. device: "cuda" when torch sees a GPU, else "cpu". dtype of activations: the
    checkpoint's own on a GPU, float32 on a CPU. Raises UnknownArgument for other arguments, and ValueError when the
    checkpoint is quantized to something else already.
    """
    for name in unknown:
        raise UnknownArgument(name, set(inspect.signature(pipeline).parameters) - {"unknown"})
    scheme = None if quantization_mode is None else parse_scheme(quantization_mode)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = AutoConfig.from_pretrained(model_name_or_path)
    stored = getattr(config, "quantization_config", None)
    quantization: dict[str, Any] = {}
    if scheme is not None:
        if stored is None:
            quantization = {"quantization_config": LowbitConfig(scheme.name)}
        elif stored.get("scheme") != scheme.name:
            held = stored.get("scheme", stored.get("quant_method"))
            raise ValueError(
                f"{model_name_or_path} is quantized already, to {held}; leave out quantization_mode={quantization_mode!r}"
            )
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    model = AutoModelForCausalLM.from_pretrained(
        model_name_or_path,
        dtype=dtype or (own if device.type == "cuda" else torch.float32),
        device_map={"": device},
        **quantization,
    )
    return Pipeline(model, AutoTokenizer.from_pretrained(model_name_or_path))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
