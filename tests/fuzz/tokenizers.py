"""Damaged tokenizer files must give a one-line error that names the file, or a tokenizer that encodes and decodes."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lowbit.checkpoint import CheckpointError
from lowbit.engine import Detokenizer
from lowbit.models.skeleton import tokenizer_of
from tests.fuzz.changes import VALUES, changed, changes_of
from tests.tiny import tiny_tokenizer

NAMES = ("tokenizer.json", "tokenizer_config.json")
LETTERS = [chr(c) for c in range(97, 123)]


def _bpe():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "ab", "abc"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def _unigram():
    inner = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((c, -2.0) for c in LETTERS)], unk_id=0))
    inner.normalizer = normalizers.Prepend("▁")
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<unk>")


def _wordpiece():
    vocab = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS)])}
    inner = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[SEP]")


MADE = {"words": tiny_tokenizer, "bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece}


@functools.cache
def documents(kind):
    """The JSON files of a tokenizer, by name."""
    with tempfile.TemporaryDirectory() as folder:
        MADE[kind]().save_pretrained(folder)
        found = {name: json.loads(Path(folder, name).read_text()) for name in NAMES}
    config = {"pad_token": None, "add_bos_token": True, "clean_up_tokenization_spaces": False, "padding_side": "left",
              "chat_template": "{{ messages }}", "extra_special_tokens": {}, "added_tokens_decoder": {}}  # fmt: skip
    found["tokenizer_config.json"] |= config
    return found


@functools.cache
def _parts():
    """The values of all fields in the files of all kinds; each is valid in its own field and odd in another."""
    found = [value for kind in MADE for document in documents(kind).values() for value in _values(document)]
    return sorted({json.dumps(value) for value in found}, key=lambda text: (len(text), text))


def _values(document, depth=4):
    items = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    for value in list(items)[:20]:
        yield value
        if depth:
            yield from _values(value, depth - 1)


def _cases():
    values = VALUES | st.sampled_from(_parts()).map(json.loads)
    return st.tuples(st.sampled_from(sorted(MADE)), st.sampled_from(NAMES)).flatmap(
        lambda file: changes_of(documents(file[0])[file[1]], values).map(lambda changes: (*file, changes))
    )


CASES = st.deferred(_cases)
"""(kind of tokenizer, changed file, changes)."""
TEXTS = ("abc de", "", "x" * 300, "a\u0301\u200d\ufffd \U0001f44d", "<s></s>[CLS]<unk>", "\0\n\t ")


def check(case):
    """Loads a changed tokenizer; if that succeeds, it must encode and decode."""
    kind, name, changes = case
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for each, document in documents(kind).items():
            document = changed(document, changes) if each == name else document
            (folder / each).write_text(json.dumps(document))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        try:
            tokenizer = tokenizer_of(folder)
        except CheckpointError as error:
            assert str(folder) in str(error) and "\n" not in str(error), error
            return
        for text in TEXTS:
            ids = tokenizer(text).input_ids
            assert isinstance(ids, list) and all(type(token) is int for token in ids), ids
            assert isinstance(tokenizer.decode(ids), str)
            stream = Detokenizer(tokenizer, ids)
            shown = "".join(map(stream.push, ids)) + stream.finish()
            assert shown == stream.text
        assert all(type(name) is str for name in tokenizer.get_vocab())
