"""Builds the model that config.json describes on the meta device: modules, names and shapes without weights.

Transformers' exceptions for a damaged config.json or tokenizer become a CheckpointError of one line that names the file.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.checkpoint.gguf import gguf_file
from lowbit.checkpoint.reader import INDEX, SINGLE, read_json
from lowbit.checkpoint.schema import GUARD
from lowbit.checkpoint.target import COMPANIONS
from lowbit.models.complete import some
from lowbit.sources import TEMPLATES, linked_inside, model_folder

logger = logging.get_logger(__name__)

CONFIG_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError, TypeError,
    ValueError, StrictDataclassError, re.error,
)  # fmt: skip
"""Exceptions of Transformers 5 for fields of unexpected types or values: strict dataclasses check the declared fields of a
configuration; others fail when a module is built."""
ATTENTION = ("eager", "sdpa", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""Allowed values of `experts_implementation` in a config.json: kernels of PyTorch."""
PANIC = "PanicException"
"""The name of the BaseException that a panic of a Rust library raises; no module exports the class."""
MAX_LAYERS = 1000
"""Maximum number of layers. With a damaged, larger number, building the modules would take minutes."""
MAX_POSITIONS = 1 << 27
"""Maximum number of positions; larger tables would take gigabytes."""
_POSITIONS = re.compile(r"(^|[._])(max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx)$")
_EPSILON = re.compile(r"(^|[._])(\w+_)?(eps|epsilon)$")
_SCALE = re.compile(r"(^|[._])(rope_theta|rotary_emb_base|\w*_theta|factor|\w*softcapping)$")
_LAYER_COUNT = re.compile(r"(^|_)(n_layers?|num_layers|num_\w*layers|layers|depth)$")


class damaged:
    """Context manager that turns `CONFIG_ERRORS` into a CheckpointError of one line about the file or folder `where`.

    fields: the file's contents, of which the message names suspect values.
    """

    def __init__(self, where: Path | str, what: str, fields: Mapping[str, Any] | None = None) -> None:
        self.where, self.what, self.fields = where, what, fields or {}

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        # For unreadable files, the tokenizers package raises bare Exceptions, or panics, which are BaseExceptions.
        if kind is None or issubclass(kind, CheckpointError):
            return
        if not (kind is Exception or kind.__name__ == PANIC or issubclass(kind, CONFIG_ERRORS)):
            return
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise CheckpointError(f"{self.where}: {_code_refusal(self.fields)}") from error
        text = " ".join(str(error).split())
        named = text if isinstance(error, (ValueError, OSError, StrictDataclassError)) else f"{kind.__name__}: {text}"
        fields = ", ".join(f"{key} is {value!r}" for key, value in _suspects(self.fields, error))
        raise CheckpointError(f"{self.where}: {self.what} ({named}){f'; {fields}' if fields else ''}") from error


def config_of(source: str | Path) -> PreTrainedConfig:
    """Returns the configuration of the model in a folder or on a hub; raises CheckpointError for a damaged one."""
    path = Path(source)
    fields: Mapping[str, Any] = read_json(model_folder(path) / "config.json") if path.is_dir() else {}
    stated = fields.get("quantization_config")
    if stated is not None and not isinstance(stated, Mapping):
        raise CheckpointError(f"{_file(source)}: quantization_config is a JSON object, got {type(stated).__name__}")
    with damaged(_file(source), "Transformers cannot read it", fields):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    _check_weights_file(config, source)
    for part in _parts(config):
        _drop_kernels(part, _file(source))
    return config


def skeleton(source: str | Path) -> PreTrainedModel:
    """Returns the model of a Transformers folder or a hub name on the meta device. Raises CheckpointError for a config.json
    that Transformers cannot read."""
    return build(config_of(source), _file(source))


def config_as_read(reader: CheckpointReader) -> PreTrainedConfig:
    """Returns the configuration of the model of `reader`. tie_word_embeddings is taken from `reader.config`, since a rotated
    reader unties the LM head."""
    config = config_of(reader.folder)
    if "tie_word_embeddings" in reader.config:
        config.tie_word_embeddings = reader.config["tie_word_embeddings"]
    return config


def build(config: PreTrainedConfig, where: Path | str, *, buffers: bool = False) -> PreTrainedModel:
    """Returns the model of a configuration on the meta device; with `buffers`, buffers are on the CPU with values."""
    fields = config.to_dict()
    for key, value in _leaves(fields):
        if _LAYER_COUNT.search(key) and type(value) is int and value > MAX_LAYERS:
            raise CheckpointError(f"{where}: {key} is {value:,}; models of up to {MAX_LAYERS:,} layers are read")
        _check_number(key, value, where)
    cls = _architecture(config, where)
    name = "causal language model" if cls is None else cls.__name__
    device_context = init_empty_weights(include_buffers=False) if buffers else torch.device("meta")
    with damaged(where, f"Transformers cannot build a {name} from it", fields), device_context:
        model: PreTrainedModel = (
            AutoModelForCausalLM.from_config(config, trust_remote_code=False) if cls is None else cls(config)
        )
        model.state_dict()  # an impossible dimension may raise an error only here
    return model


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Returns True for an encoder-decoder such as BART or T5."""
    known = type(model).__name__ in _names(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    return known and bool(getattr(model.config, "is_encoder_decoder", False))


def causal_refusals(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns why a model does not predict the next token; empty if it does."""
    name = type(model).__name__
    if is_encoder_decoder(model):
        return (
            f"its architecture is {name}, an encoder-decoder, which does not continue a text; such models are quantized "
            "without calibration (rtn, hqq), answer as pipelines and by lowbit generate, and are measured on summaries (lowbit "
            "eval --suite), and that is all",
        )
    if name not in _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return (
            f"its architecture is {name}, which has no causal language-model head; generating, measuring and calibrating take "
            "models that predict the next token, such as LlamaForCausalLM",
        )
    both_ways = model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if both_ways and getattr(model.config, "is_decoder", None) is False:
        return (
            f"its {name} looks at later tokens too (config.json: is_decoder is false), so it does not predict the next one",
        )
    return ()


def causal_skeleton(source: str | Path) -> PreTrainedModel:
    """Returns `skeleton` of a model that predicts the next token; raises CheckpointError for other architectures."""
    model = skeleton(source)
    require_causal(model, source)
    return model


def require_causal(model: PreTrainedModel, source: str | Path, *, or_encoder_decoder: bool = False) -> None:
    """Raises CheckpointError unless the model predicts the next token, or is an allowed encoder-decoder."""
    reasons = () if or_encoder_decoder and is_encoder_decoder(model) else causal_refusals(model)
    if reasons:
        raise CheckpointError(f"{source}: {'; '.join(reasons)}")


def tokenizer_of(source: str | Path, model: nn.Module | None = None) -> Any:
    """Returns the tokenizer of a folder, a GGUF file or a hub name.

    Raises CheckpointError for a damaged one, and for one with more tokens (without added ones) than the embedding of `model`
    has rows.
    """
    path = Path(source)
    gguf = gguf_file(path)
    if path.is_dir():
        model_folder(path)
    elif gguf is not None:  # Transformers also reads files in the folder of the GGUF file
        for name in ("config.json", TEMPLATES, *COMPANIONS):
            linked_inside(gguf.parent / name, gguf.parent)
    stated: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):  # tokenizer.json is megabytes
        if (path / name).is_file():
            stated = read_json(path / name)
            _check_length(path / name, stated)
    what = "its tokenizer (tokenizer.json) cannot be read" if gguf is None else "its tokenizer cannot be read"
    with damaged(source, what, {"auto_map": stated.get("auto_map")}), _without_panics():
        at = (source, {}) if gguf is None else (gguf.parent, {"gguf_file": gguf.name})
        tokenizer = AutoTokenizer.from_pretrained(at[0], trust_remote_code=False, **at[1])
        _try(tokenizer)
    if model is not None:
        rows = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        tokens = max(tokenizer.vocab_size, 1 + _last_token(tokenizer))
        if tokens > rows:
            raise CheckpointError(
                f"{source}: its tokenizer has {tokens:,} tokens, the model's embedding {rows:,} rows (vocab_size "
                "in config.json); the two belong to different models"
            )
    return tokenizer


SAMPLE = "Hello, world! 1 + 1 = 2\n  naïve 世界 👍"
"""A text that a loaded tokenizer encodes and decodes once, since many damaged files are read without an error."""


def _try(tokenizer: Any) -> None:
    """Raises an error if a tokenizer does not encode a text to integers and decode them to a text."""
    ids = tokenizer(SAMPLE).input_ids
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"it makes {type(ids).__name__} of a text instead of token numbers")
    for skip in (False, True):
        if not isinstance(tokenizer.decode(ids, skip_special_tokens=skip), str):
            raise ValueError("it makes no text of token numbers")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        token = getattr(tokenizer, name)
        if token is not None and type(token) is not int:
            raise ValueError(f"{name} is a token's number, got {token!r}")


def _last_token(tokenizer: Any) -> int:
    """Returns the largest token id without added tokens; -1 if there is none."""
    added = tokenizer.get_added_vocab()
    return max((number for token, number in tokenizer.get_vocab().items() if token not in added), default=-1)


def _check_length(path: Path, fields: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a model_max_length that is no number."""
    length = fields.get("model_max_length")
    if length is not None and (type(length) not in (int, float) or math.isnan(length)):
        raise CheckpointError(f"{path}: model_max_length is a number of tokens, got {length!r}; correct it or remove it")


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Suppresses the stderr output of a Rust panic inside. Other output of the process to stderr is written at the end."""
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == PANIC
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            if not panicked and (text := written.read()):
                sys.stderr.flush()
                os.write(2, text)


def _architecture(config: PreTrainedConfig, where: Path | str) -> type[PreTrainedModel] | None:
    """Returns the class that config.json names; None if it names none, which means the causal model of its type."""
    stated = config.architectures
    if not stated:
        return None
    if not isinstance(stated, list) or not isinstance(stated[0], str):
        raise CheckpointError(f"{where}: architectures is a list of names, got {stated!r}")
    cls = getattr(transformers, stated[0], None)
    if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel):
        raise CheckpointError(
            f"{where}: architectures names {stated[0]!r}, which is no model of Transformers {transformers.__version__}"
        )
    expected: type[PreTrainedConfig] | None = getattr(cls, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise CheckpointError(f"{where}: model_type {config.model_type!r} does not go with the architecture {stated[0]}")
    return cls


def _code_refusal(fields: Mapping[str, Any]) -> str:
    """Returns why a model with its own code is not read, and the remedy."""
    stated = fields.get("auto_map")
    lists = (value if isinstance(value, list) else [value] for _, value in _leaves(stated))
    named = sorted({str(name) for names in lists for name in names if name})
    model_type = f" of model_type {fields['model_type']!r}" if "model_type" in fields else ""
    return (
        f"auto_map names code that comes with the model{model_type}{f' ({some(named)})' if named else ''}; lowbit runs no code "
        f"of a model's files and reads models that Transformers has itself, {transformers.__version__} here: a newer one may "
        "have it (pip install --upgrade transformers)"
    )


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yields a configuration and those nested in it, such as of a text and a vision model."""
    yield config
    for value in vars(config).values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, PreTrainedConfig):
                yield from _parts(part)


def _drop_kernels(config: PreTrainedConfig, where: Path | str) -> None:
    """Removes kernel names that are not PyTorch's: Transformers would download others from a hub and run them, even for
    flash_attention_2 if the package kernels is installed."""
    for key, ours in (("attn_implementation", ATTENTION), ("experts_implementation", EXPERTS)):
        stated = getattr(config, f"_{key}", None)
        if stated is not None and stated not in ours:
            _warn(f"{where}: {key} is {stated!r}, which is ignored: a file does not choose kernels; the default is used")
            setattr(config, f"_{key}_internal", None)


@functools.cache
def _warn(line: str) -> None:
    """Logs a warning once per process, since a configuration is read several times."""
    logger.warning(line)


def _check_weights_file(config: PreTrainedConfig, source: str | Path) -> None:
    """Raises CheckpointError if config.json names another weights file than those whose headers are checked."""
    stated = getattr(config, "transformers_weights", None)
    if stated not in (None, GUARD):
        raise CheckpointError(
            f"{_file(source)}: transformers_weights is {stated!r}, and only {SINGLE} or {INDEX} is read; rename the file and "
            "remove the field"
        )


def _check_number(key: str, value: Any, where: Path | str) -> None:
    """Raises CheckpointError for a number of a configuration that is out of range."""
    numbers = [each for each in (value if isinstance(value, (list, tuple)) else [value]) if type(each) in (int, float)]
    for number in numbers:
        allowed = ""
        if math.isnan(number):
            allowed = "a number"
        elif _POSITIONS.search(key) and number > MAX_POSITIONS:
            allowed = f"at most {MAX_POSITIONS:,} tokens"
        elif _EPSILON.search(key) and not 0 <= number <= 1:
            allowed = "from 0 to 1"
        elif _SCALE.search(key) and not 0 < number < math.inf:
            allowed = "a number above 0"
        if allowed:
            raise CheckpointError(f"{where}: {key} is {number!r}, it has to be {allowed}; take the file of the original model")


def _file(source: str | Path) -> Path | str:
    return Path(source) / "config.json" if Path(source).is_dir() else f"config.json of {source}"


def _names(mapping: Mapping[str, Any]) -> set[str]:
    return {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}


def _leaves(fields: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value in nested objects with its name, such as rope_parameters.rope_type."""
    if isinstance(fields, Mapping):
        for key, value in fields.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, fields


def _suspects(fields: Mapping[str, Any], error: BaseException | None) -> list[tuple[str, Any]]:
    """Returns up to three fields: those with the missing key of a KeyError, else sizes below 1 or above 2^31."""
    leaves = [(key, value) for key, value in _leaves(fields) if not key.startswith("quantization_config")]
    if isinstance(error, KeyError) and error.args:
        return [(key, value) for key, value in leaves if value == error.args[0] and value is not None][:3]
    sizes = [(key, value) for key, value in leaves if type(value) is int and not key.endswith(("_id", "_ids"))]
    return [(key, value) for key, value in sizes if not 0 < value < 1 << 31][:3]
