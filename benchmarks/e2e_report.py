"""Tables and plots of a result file of `python -m benchmarks e2e`. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys, write_plots
from lowbit.picture import Theme, new_figure, plain

SCHEMA = 1
E2E = "lowbit bench e2e"

KINDS = {
    "products": ("gemm", "cutlass", "cublas", "nvjet", "splitK"),
    "attention": ("attention", "append"),
    "norms, gates, routing": (
        "norm",
        "gate",
        "embed",
        "route",
        "choose_many",
        "count_slots",
        "sum_counts",
        "place_slots",
        "topk",
    ),
    "drawing": ("survey", "weigh", "collect", "settle", "argmax"),
}
"""Kinds of a step's kernels by parts of the kernel name; the rest is "other"."""


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file of `python -m benchmarks e2e`. Raises ValueError that says what is wrong with
    it."""
    document = read_json(path, E2E, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date"))
    return document


def tables(document: dict[str, Any]) -> list[Table]:
    """Returns a table of steps for each model and context (milliseconds per token, share of the limit, speedup over 16 bits,
    kernels per layer), and one of Python times for each model."""
    rows = [row for row in document["rows"] if row["error"] is None]
    of_contexts = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        here = [row for row in rows if row["model"] == model]
        found += [_step_table(document, here, context) for name, context in of_contexts if name == model]
        found.append(_python_table(here))
    if prompts := [row for row in document.get("prompts", ()) if row["error"] is None]:
        found.append(_prompt_table(document, prompts))
    return found


def _step_table(document: dict[str, Any], rows: list[dict[str, Any]], context: int) -> Table:
    title = f"{rows[0]['model']}, context {context:,}: a step of a decode on {document['machine']['gpu']}"
    table = narrow_table(("weights",), ("users", "ms a token", "of limit", "x 16 bits", "tokens/s", "kernels"), title)
    for row in (row for row in rows if row["context"] == context):
        ms, limit, wide, kernels = (row[key] for key in ("ms_per_token", "limit_ms", "bf16_ms_per_token", "kernels_per_layer"))
        table.add_row(
            _weights(row), str(row["batch"]), f"{ms:.3f}", f"{100 * limit / ms:.0f} %" if limit else "-",
            f"{wide / ms:.2f}" if wide else "-", f"{row['tokens_per_gpu_s']:,.0f}", f"{kernels:.1f}" if kernels else "-",
        )  # fmt: skip
    return table


def _prompt_table(document: dict[str, Any], prompts: list[dict[str, Any]]) -> Table:
    """Returns the table of long prompts, from the request to its first token."""
    title = f"One long prompt on {document['machine']['gpu']}"
    table = narrow_table(("model", "weights"), ("prompt", "s to its first token", "tokens/s"), title)
    for row in prompts:
        table.add_row(
            row["model"], _weights(row), f"{row['prompt']:,}", f"{row['prompt_s']:.2f}", f"{row['prefill_tok_s']:,.0f}"
        )
    return table


def _python_table(rows: list[dict[str, Any]]) -> Table:
    """Returns the table of what was timed from Python: a row for each weights and number of users, of the first context that
    has one."""
    table = narrow_table(
        ("weights",), ("users", "ms a token", "prompt tokens/s", "in products"), f"{rows[0]['model']}: from Python"
    )
    seen = set()
    for row in rows:
        key, wall, rate, share = (_weights(row), row["batch"]), *(row.get(k) for k in _FROM_PYTHON)
        if key not in seen and (wall or rate):
            table.add_row(
                key[0], str(key[1]), f"{wall:.3f}" if wall else "-", f"{rate:,.0f}" if rate else "-",
                f"{100 * share:.0f} %" if share else "-",
            )  # fmt: skip
            seen.add(key)
    return table


_FROM_PYTHON = ("step_wall_ms", "prefill_tok_s", "prefill_products")


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each row without a time."""
    rows = [row for row in document["rows"] if row["error"] is not None]
    labels = [[row["model"], _weights(row), *(f"{k} {row[k]:,}" for k in ("batch", "context") if row[k])] for row in rows]
    prompts = [row for row in document.get("prompts", ()) if row["error"] is not None]
    rows += prompts
    labels += [[row["model"], _weights(row), f"prompt {row['prompt']:,}"] for row in prompts]
    return [f"{', '.join(names)}: {row['error']}" for names, row in zip(labels, rows, strict=True)]


def _weights(row: dict[str, Any]) -> str:
    """Returns the row's scheme, or "16 bits" and the library of the products. Also names the format of keys and values unless
    they have 16 bits, and the generation loop unless it is lowbit's."""
    products, impl = row.get("products"), row["impl"].removeprefix("transformers ").removeprefix("lowbit ")
    details = (products, stored_kv(row), None if impl == "lowbit" else impl)
    return ", ".join([row["scheme"] or "16 bits", *filter(None, details)])


def stored_kv(row: dict[str, Any]) -> str:
    """Returns the format of a row's keys and values; an empty string for 16 bits."""
    kv = row.get("kv_dtype") or "float16"
    return "" if kv in ("float16", "bfloat16") else f"KV {kv}"


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Returns the microseconds that each kind of kernel adds to a step; 0 if the file has only total times."""
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, (_, _, *added) in row.get("kernels", {}).items():
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        found[kind] += sum(added)
    return found


def plot(document: dict[str, Any], path: Path) -> None:
    """Plots tokens per second of each user against the batch size, with a line per scheme and a panel per model and context;
    below, the time of a step by kind of kernel. Raises ValueError if there is nothing to plot or matplotlib is not
    installed."""
    rows = [row for row in document["rows"] if row["ms_per_token"] is not None]
    if not rows:
        raise ValueError("the results hold no measured row to plot")
    write_plots(path, E2E, lambda theme: _draw(document, rows, theme))


def _draw(document: dict[str, Any], rows: list[dict[str, Any]], theme: Theme) -> Any:
    panels = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    timed = [row for row in rows if row.get("kernels") and sum(shares(row).values())]
    figure = new_figure(max(5.2, 3.8 * len(panels)), 6.4 if timed else 3.6, theme)
    grid = figure.subplots(2 if timed else 1, len(panels), squeeze=False)
    for number, panel in enumerate(panels):
        here = [row for row in rows if (row["model"], row["context"]) == panel]
        _users(grid[0][number], here, f"{panel[0]}, context {panel[1]:,}", theme)
        if timed:
            _where(grid[1][number], [row for row in here if row in timed], theme)
    if timed:
        kinds = grid[1][0].get_legend_handles_labels()
        figure.legend(*kinds, fontsize=6.5, frameon=False, labelcolor=theme.text, ncols=5, loc="outside lower left")
    title = f"Tokens a second for each user, by batch: {document['machine']['gpu']}, {document['date']}"
    figure.suptitle(title, color=theme.text, fontsize=10, x=0.01, ha="left")
    return figure


def _users(axis: Any, rows: list[dict[str, Any]], title: str, theme: Theme) -> None:
    """Plots a line for each scheme; 16 bits and rivals are grey. Each line has its first value as a label on the left, and its
    name at a point where the lines are apart.
    """
    plain(axis, theme, title)
    text = {"fontsize": 7.5, "textcoords": "offset points", "va": "center", "ha": "right", "xytext": (-6, 0)}
    lines = list(dict.fromkeys(_line_of(row) for row in rows))
    styles = ("-", "--", ":", "-.")
    for number, line_of in enumerate(sorted(lines, key=lambda line: _fastest(rows, line), reverse=True)):
        here = sorted((row for row in rows if _line_of(row) == line_of), key=lambda row: row["batch"])
        scheme, impl, kv = line_of
        own = scheme is not None and impl.startswith("lowbit")
        color, label = theme.own if own else theme.rival, _weights({"scheme": scheme, "impl": impl, "kv_dtype": kv})
        users, each = [r["batch"] for r in here], [1e3 / r["ms_per_token"] for r in here]
        line = {"marker": "o", "markersize": 3, "linewidth": 2 if own else 1.4}
        axis.plot(users, each, styles[number % 4], color=color, label=label, **line)
        axis.annotate(f"{each[0]:,.0f}", (users[0], each[0]), color=color, weight="bold", **text)
    batches = sorted({row["batch"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.set_xlim(left=batches[0] / 2)
    axis.set_ylim(0, 1.12 * max(1e3 / row["ms_per_token"] for row in rows))
    axis.set_xlabel("users at once")
    axis.legend(fontsize=6.5, frameon=False, labelcolor=theme.text, loc="upper right", handlelength=3.5)


def _line_of(row: dict[str, Any]) -> tuple[str | None, str, str | None]:
    """Returns what distinguishes the lines of a plot: scheme, implementation, and the type of keys and values."""
    return row["scheme"], row["impl"], row.get("kv_dtype")


def _fastest(rows: list[dict[str, Any]], line: tuple[str | None, str, str | None]) -> float:
    return max(1e3 / row["ms_per_token"] for row in rows if _line_of(row) == line)


def bar_name(row: dict[str, Any]) -> str:
    """Returns the name of a row's bar: its scheme, format of keys and values, users, and whether the step is one launch."""
    launch = "one launch" if row["impl"] == "lowbit one launch" else None
    return ", ".join(filter(None, (row["scheme"] or "16 bits", stored_kv(row), launch, str(row["batch"]))))


def _where(axis: Any, rows: list[dict[str, Any]], theme: Theme) -> None:
    """Plots a stacked bar for each scheme and batch: the time that each kind of kernel adds to a step. A step in one launch is
    one kernel, of another kind."""
    plain(axis, theme, "where the time of a step goes, ms")
    axis.grid(visible=False)
    colors = (theme.own, theme.second, theme.rival, theme.text, theme.grid)
    names = [bar_name(row) for row in rows]
    start = [0.0] * len(rows)
    for kind, color in zip((*KINDS, "other"), colors, strict=True):
        ms = [shares(row)[kind] / 1e3 for row in rows]
        axis.barh(range(len(rows)), ms, left=start, height=0.7, color=color, label=kind)
        start = [a + b for a, b in zip(start, ms, strict=True)]
    axis.set_yticks(range(len(rows)), names, fontsize=6)
    axis.invert_yaxis()
