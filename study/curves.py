"""The loss of each scheme and method in one small table, which the package contains for `lowbit recommend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lowbit.eval.results import write_json
from lowbit.formats import parse_scheme
from study.page import FIRST, mean_kl, merged, texts_of
from study.results import STUDY

TABLE = Path("lowbit/eval/data/divergence.json")

COMMON = ("w8a16", "rtn")
"""The case by which divergences on other texts are compared: schemes with 8-bit activations mostly have its weights."""


def curves(documents: Sequence[dict[str, Any]], short: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Returns the table: for each model with several texts its numbers of linear and other weights, the setting, and a row
    for each case without calibration or with the default one. Files of one model are merged; the first occurrence of a case
    counts. `short` files (`study.sizes`) add schemes with 8-bit activations to these models: they have fewer and shorter texts,
    so their divergences are multiplied by that of `COMMON` in the model's own file over that in the short one. They add no
    model, since estimates of the cases that it lacks would rest on few."""
    models = []
    for document in (d for d in merged(documents) if len(texts_of(d)) > 1 and "weights" in d):
        request = document["request"]
        machines = [d for d in documents if d["request"]["model"] == request["model"] and len(texts_of(d)) > 1]
        rows = list(_rows(document))
        more = [row for d in short if d["request"]["model"] == request["model"] for row in _scaled(list(_rows(d)), rows)]
        models.append(
            {
                "model": request["model"], **document["weights"], "group": request["group"], "texts": texts_of(document),
                "tokens": request["settings"]["windows"] * request["settings"]["window"],
                "measured": sorted({_where(d) for d in machines}),
                "rows": rows + more,
            }
        )  # fmt: skip
    return {"result": STUDY, "models": sorted(models, key=lambda m: m["linear"])}


def write_curves(documents: Sequence[dict[str, Any]], short: Sequence[dict[str, Any]], path: Path = TABLE) -> None:
    """Writes the table of all result files."""
    write_json(path, curves(documents, short))


def _scaled(short: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of schemes with activations that only the short file has, on the scale of the model's own rows."""
    known = {(row["scheme"], row["method"]): row["kl"] for row in rows}
    measured = {(row["scheme"], row["method"]): row["kl"] for row in short}
    if COMMON not in known or COMMON not in measured:
        return
    factor = known[COMMON] / measured[COMMON]
    for row in short:
        if parse_scheme(row["scheme"]).activation is not None and (row["scheme"], row["method"]) not in known:
            error = None if row["error"] is None else float(f"{row['error'] * factor:.3g}")
            yield row | {"kl": float(f"{row['kl'] * factor:.4g}"), "error": error}


def _where(document: dict[str, Any]) -> str:
    machine = document["machine"]
    return f"{document['date']}, {', '.join(machine['gpus']) or machine['processor']}"


def _rows(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in document["rows"]:
        kl = mean_kl(document, row) if row["method"] and row["calibration"] in (None, FIRST) else None
        if kl is not None:
            error = None if kl[1] is None else float(f"{kl[1]:.3g}")
            bits = round(row["bits_per_weight"], 4)
            yield {
                "scheme": row["scheme"], "method": row["method"], "bits": bits, "kl": float(f"{kl[0]:.4g}"), "error": error,
            }  # fmt: skip
