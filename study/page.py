"""Generates tables of result files between marks in Markdown pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowbit.eval.report import number, read_page, replace_block
from study.cases import DEFAULT_TEXT, FORMATS
from study.results import UNQUANTIZED, figure_of
from study.run import SEEN

Document = dict[str, Any]
Row = dict[str, Any]
Value = tuple[float, float | None]
FIRST = {"text": DEFAULT_TEXT, "seed": 0}
"""Default calibration of a case."""
DEFAULTS = ("gptq", "gptq damping=0.01", "gptq search=mse", "gptq search=mse damping=0.01")
"""GPTQ with its defaults, with each one turned off, and with both turned off."""


def write_pages(documents: Sequence[Document], pages: Sequence[Path]) -> list[str]:
    """Rewrites, in every page, the blocks whose marks it has: `<!-- study:NAME -->` to `<!-- /study:NAME -->`, NAME one of
    `BLOCKS`. Returns what was written, "PAGE: NAME". Raises ValueError for a page without any mark."""
    written, together = [], merged(documents)
    for page in pages:
        text = read_page(page)
        names = [name for name in BLOCKS if f"<!-- study:{name} -->" in text]
        if not names:
            raise ValueError(f"{page}: has none of the marks <!-- study:NAME -->, NAME one of {', '.join(BLOCKS)}")
        for name in names:
            shown = documents if name in _ANY else [document for document in together if len(texts_of(document)) > 1]
            parts = [BLOCKS[name](document) for document in shown]
            replace_block(page, f"study:{name}", "\n\n".join(part for part in parts if part))
            written.append(f"{page}: {name}")
    return written


def texts_of(document: Document) -> list[str]:
    """Returns the names of the texts that were measured on, the default calibration text first."""
    base = row_of(document, None, None)  # type: ignore[arg-type]
    names = [task["task"] for task in document["request"]["tasks"] if task["kind"] == "text"]
    names = [name for name in names if base is None or name in base["figures"]]
    return sorted(names, key=lambda name: (name != DEFAULT_TEXT, name))


def merged(documents: Sequence[Document]) -> list[Document]:
    """Merges documents of one model on the same texts: the first, plus cases that only the others have."""
    found: dict[Any, Document] = {}
    for document in documents:
        request = document["request"]
        texts = sorted(task["sha256"] for task in request["tasks"] if task["kind"] == "text")
        sizes = [request["settings"].get(name) for name in ("window", "windows", "samples", "length", "dtype")]
        first = found.setdefault(repr((request["model"], request["group"], texts, sizes)), {**document, "rows": []})
        known = {row["key"] for row in first["rows"]}
        first["rows"] = first["rows"] + [row for row in document["rows"] if row["key"] not in known]
    return list(found.values())


def row_of(document: Document, scheme: str, method: str, text: str | None = None, seed: int = 0) -> Row | None:
    """Returns the row of a case with calibration text `text`; None if it was not measured."""
    calibration = None if text is None else {"text": text, "seed": seed}
    wanted = (scheme, method, calibration)
    return next((r for r in document["rows"] if (r["scheme"], r["method"], r["calibration"]) == wanted), None)


def grid_scheme(document: Document, fmt: str, fine: bool) -> str:
    """Returns the scheme of a number format with one scale per channel or, if `fine`, per group."""
    start = FORMATS[fmt]
    return f"{start}_g{document['request']['group']}" if fine else f"{start}_pc" if start == "w4a16" else start


def mean_kl(document: Document, row: Row) -> Value | None:
    """Returns the mean KL divergence from 16 bits over the texts; None if a text is missing."""
    found = [figure_of(row, text, "KL mean") for text in texts_of(document)]
    values = [value for value in found if value is not None]
    if not values or len(values) < len(found):
        return None
    errors = [error for _, error in values]
    spread = None if None in errors else math.sqrt(sum(e * e for e in errors if e is not None)) / len(errors)
    return sum(v for v, _ in values) / len(values), spread


def change(row: Row | None, text: str) -> Value | None:
    """Returns the increase of the perplexity on a text over 16 bits, in percent."""
    found = None if row is None else figure_of(row, text, "nll difference")
    if found is None:
        return None
    ratio = math.exp(found[0])
    return 100 * (ratio - 1), None if found[1] is None else 100 * ratio * found[1]


def setting(document: Document) -> str:
    """Returns device, versions and texts of the measurement of a model."""
    request, machine = document["request"], document["machine"]
    s = request["settings"]
    device = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['threads']} threads"
    versions = ", ".join(f"{name} {v}" for name, v in document["versions"].items() if v and name in ("torch", "transformers"))
    head = ("text", "sha256 begins", "tokens measured", "perplexity in 16 bits")
    base = row_of(document, None, None)  # type: ignore[arg-type]
    lines = []
    for task in request["tasks"]:
        if task["kind"] == "text" and base is not None:
            cell = base["figures"][task["task"]]["perplexity"]
            lines.append((task["task"], f"`{task['sha256'][:12]}`", f"{cell[2]:,}", number(cell[0], cell[1])))
    unfinished = "" if document["complete"] else f" {len(document['rows'])} rows; not every case of the list was measured."
    return (
        f"**{request['model']}**: {document['date']}, {device}, {versions}; {s['dtype']}, groups of {request['group']}, "
        f"{s['windows']} windows of {s['window']} tokens of each text; calibration on {s['samples']} x {s['length']} tokens."
        f"{unfinished}\n\n{_table(head, lines, left=2)}"
    )


def grid(document: Document) -> str:
    """Formats x granularities x methods: change of perplexity on every text, divergence, same most likely token."""
    texts = texts_of(document)
    lines = []
    for fmt in FORMATS:
        for fine in (False, True):
            for method, text in (("rtn", None), ("gptq", DEFAULT_TEXT)):
                row = row_of(document, grid_scheme(document, fmt, fine), method, text)
                if row is None or mean_kl(document, row) is None:
                    continue
                same = [figure_of(row, t, "same top-1") for t in texts]
                top1 = sum(v[0] for v in same if v) / len(texts)
                cells = [_signed(change(row, t)) for t in texts]
                name = f"g{document['request']['group']}" if fine else "channel"
                kl = _value(mean_kl(document, row))
                lines.append((fmt, name, method, f"{row['bits_per_weight']:.2f}", *cells, kl, f"{100 * top1:.1f}"))
    if not lines:
        return ""
    head = ("format", "scale per", "method", "bits", *texts, "KL", "same top-1 %")
    return f"**{document['request']['model']}**\n\n{_table(head, lines, left=3)}"


def six(document: Document) -> str:
    """fp6 e3m2 and int6, rounded to nearest, on every text."""
    lines = []
    for fine in (False, True):
        rows = [row_of(document, grid_scheme(document, fmt, fine), "rtn") for fmt in ("fp6_e3m2", "int6")]
        if rows[0] is None or rows[1] is None:
            continue
        for text in texts_of(document):
            kl = [figure_of(row, text, "KL mean") for row in rows if row is not None]
            if kl[0] is None or kl[1] is None:
                continue
            name = f"g{document['request']['group']}" if fine else "channel"
            changes = [_signed(change(row, text)) for row in rows]
            lines.append((name, text, _value(kl[0]), _value(kl[1]), f"{kl[1][0] / kl[0][0]:.2f}", *changes))
    if not lines:
        return ""
    head = ("scale per", "text", "KL fp6_e3m2", "KL int6", "int6 / fp6", "perplexity fp6_e3m2 %", "perplexity int6 %")
    return f"**{document['request']['model']}**\n\n{_table(head, lines, left=2)}"


def calibration(document: Document) -> str:
    """GPTQ calibrated on each text and measured on all: the gain on the same text and on others."""
    texts = texts_of(document)
    parts = []
    for fmt, fine in (("int4", True), ("int4", False), ("fp6_e3m2", False)):
        scheme = grid_scheme(document, fmt, fine)
        rows = [(text, row_of(document, scheme, "gptq", text)) for text in texts]
        if all(row is None for _, row in rows):
            continue
        lines = [("rtn, none", *(_signed(change(row_of(document, scheme, "rtn"), t)) for t in texts), "")]
        for text, row in rows:
            if row is not None:
                cells = [_signed(change(row, t)) for t in texts]
                cells[texts.index(text)] = f"**{cells[texts.index(text)]}**"
                lines.append((f"gptq, {text}", *cells, _signed(change(row, SEEN))))
        head = ("calibrated on", *texts, "the very pieces")
        said = f"{_left(document, scheme)} {_home(document, scheme)}".strip()
        parts.append(f"`{scheme}`\n\n{_table(head, lines)}\n\n{said}".rstrip())
    return "\n\n".join([f"**{document['request']['model']}**", *parts]) if parts else ""


def _left(document: Document, scheme: str) -> str:
    """Returns a sentence with the share of the rounding loss that remains after GPTQ, on the same and on other texts."""
    texts = texts_of(document)
    rounded = {t: _nll(row_of(document, scheme, "rtn"), t) for t in texts}
    said = []
    for text in texts:
        row = row_of(document, scheme, "gptq", text)
        left = {t: 100 * own / base for t in texts if (own := _nll(row, t)) is not None and (base := rounded[t])}
        away = [value for t, value in left.items() if t != text]
        if text in left and away:
            said.append(f"{text} {left[text]:.0f} % and {min(away):.0f} to {max(away):.0f} %")
    if not said:
        return ""
    return f"Of what rounding to nearest loses (nats per token) GPTQ leaves, at home and elsewhere: {', '.join(said)}."


def _home(document: Document, scheme: str) -> str:
    """Returns the advantage of calibrating on the measured text, and the spread over calibration seeds."""
    texts = texts_of(document)
    nll = {c: {t: _nll(row_of(document, scheme, "gptq", c), t) for t in texts} for c in texts}
    gains = []
    for text in texts:
        away = [v for c in texts if c != text and (v := nll[c][text]) is not None]
        own = nll[text][text]
        if own is not None and away:
            gains.append(f"{text} {sum(away) / len(away) - own:.3f}")
    draws = [row for seed in range(3) if (row := row_of(document, scheme, "gptq", DEFAULT_TEXT, seed)) is not None]
    spreads = [s for t in texts if (s := _deviation([v for r in draws if (v := _nll(r, t)) is not None])) is not None]
    line = ""
    if gains:
        line += "Nats per token by which a text is better off when GPTQ was calibrated on it than, on average, on the others: "
        line += ", ".join(gains) + ". "
    if spreads:
        line += f"Standard deviation over {len(draws)} draws of the pieces of `{DEFAULT_TEXT}`: "
        line += f"{min(spreads):.3f} to {max(spreads):.3f}."
    return line


def _nll(row: Row | None, text: str) -> float | None:
    found = None if row is None else figure_of(row, text, "nll difference")
    return None if found is None else found[0]


def _deviation(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def defaults(document: Document) -> str:
    """GPTQ's defaults, and each one turned off."""
    texts = texts_of(document)
    lines = []
    for fine in (True, False):
        scheme = grid_scheme(document, "int4", fine)
        for method in DEFAULTS:
            row = row_of(document, scheme, method, DEFAULT_TEXT)
            if row is not None:
                lines.append((scheme, method, *(_signed(change(row, t)) for t in texts), _value(mean_kl(document, row))))
    if len(lines) < 2:
        return ""
    head = ("scheme", "method", *texts, "KL")
    return f"**{document['request']['model']}**\n\n{_table(head, lines, left=2)}"


def tasks(document: Document) -> str:
    """Questions, summaries and programs."""
    texts = {*texts_of(document), SEEN}
    base = row_of(document, None, None)  # type: ignore[arg-type]
    if base is None:
        return ""
    columns = [(t, m) for t in base["figures"] if t not in texts for m in base["figures"][t]]
    rows = [row for row in document["rows"] if columns and figure_of(row, *columns[0]) is not None]
    if not rows:
        return ""
    lines = []
    for row in rows:
        cells = [_value(figure_of(row, t, m)) for t, m in columns]
        lines.append((_name(row), f"{row['bits_per_weight']:.2f}", *cells))
    counts = ", ".join(f"{t}: {next(iter(base['figures'][t].values()))[2]}" for t in dict.fromkeys(t for t, _ in columns))
    head = ("case", "bits", *(f"{t} {m}" for t, m in columns))
    return f"**{document['request']['model']}** (records of {counts})\n\n{_table(head, lines)}"


def more(document: Document) -> str:
    """The cases outside the grid, fewest bits first."""
    fine = grid_scheme(document, "int4", True)
    grid_schemes = {grid_scheme(document, fmt, groups) for fmt in FORMATS for groups in (False, True)}
    rows = []
    for row in document["rows"]:
        in_grid = row["method"] in ("rtn", "gptq") and row["scheme"] in grid_schemes - {fine}
        if row["method"] not in (None, *DEFAULTS[1:]) and not in_grid and row["calibration"] in (None, FIRST):
            rows.append(row)
    lines = []
    for row in sorted(rows, key=lambda row: (row["bits_per_weight"], row["method"])):
        kl = mean_kl(document, row)
        if kl is not None:
            cells = [_signed(change(row, t)) for t in texts_of(document)]
            lines.append((row["scheme"], row["method"], f"{row['bits_per_weight']:.2f}", *cells, _value(kl)))
    if not lines:
        return ""
    head = ("scheme", "method", "bits", *texts_of(document), "KL")
    return f"**{document['request']['model']}**\n\n{_table(head, lines, left=2)}"


def frontier(document: Document) -> list[tuple[Row, Value]]:
    """Returns the Pareto frontier: cases that no case with as few bits beats, fewest bits first, with their divergence."""
    found: list[tuple[Row, Value]] = []
    measured = [
        (row, mean_kl(document, row)) for row in document["rows"] if row["calibration"] in (None, FIRST) and row["method"]
    ]
    shown = [(row, kl) for row, kl in measured if kl is not None]
    for row, kl in sorted(shown, key=lambda pair: (pair[0]["bits_per_weight"], pair[1])):
        if not found or kl[0] < found[-1][1][0]:
            found.append((row, kl))
    return found


def choice(document: Document) -> str:
    """The frontier of divergence against bytes: all weights, those that are not quantized in 16 bits."""
    if "weights" not in document:
        return ""
    lines, weights = [], document["weights"]
    for row, kl in frontier(document):
        size = (row["bits_per_weight"] * weights["linear"] / 8 + 2 * weights["other"]) / 1e6
        lines.append((f"`{row['scheme']}`", f"`{row['method']}`", f"{row['bits_per_weight']:.2f}", f"{size:.0f}", _value(kl)))
    if not lines:
        return ""
    whole = 2e-6 * (weights["linear"] + weights["other"])
    head = ("scheme", "method", "bits per weight", "MB of all weights", "KL")
    return f"**{document['request']['model']}**, {whole:,.0f} MB in 16 bits\n\n{_table(head, lines, left=2)}"


def _name(row: Row) -> str:
    return UNQUANTIZED if row["scheme"] is None else f"{row['scheme']} {row['method']}"


def _value(found: Value | None) -> str:
    return "" if found is None else number(*found)


def _signed(found: Value | None) -> str:
    return "" if found is None else f"{'+' if found[0] > 0 else ''}{number(*found)}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


_ANY = ("setting", "tasks")
"""Blocks that also show files with a single text."""
BLOCKS: dict[str, Callable[[Document], str]] = {
    "setting": setting,
    "grid": grid,
    "six": six,
    "calibration": calibration,
    "defaults": defaults,
    "tasks": tasks,
    "more": more,
    "choice": choice,
}
"""Block names and the functions that generate them from a document."""
