"""What is shown and written of a profile: tables, report.json and the page with the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gapless.config import RunConfig
from gapless.profiling.record import record
from gapless.profiling.summary import analyse
from gapless.profiling.timeline import page
from gapless.training import files

_ROWS = 12
"""Rows of a table; the files have them all."""


def profile(
    config: RunConfig, folder: str | Path, *, steps: int = 3, before: int = 5, console: Console | None = None
) -> dict[str, Any]:
    """Record some steps of a run, write report and timeline, and show the tables.

    Args:
        config: the run.
        folder: takes report-rank0.json, timeline-rank0.html and the traces of the profiler.
        steps: to record.
        before: steps to warm up.
        console: for the tables; by default standard output.

    Returns:
        The report.

    Raises:
        ValueError: see `record`; the folder cannot be written.
    """
    folder = Path(folder)
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    recorded = record(config, folder, steps=steps, before=before)
    name = Path(config.training.output_dir).name
    analysis = analyse(recorded, name)
    json_path = folder / f"report-rank{recorded.rank}.json"
    html_path = folder / f"timeline-rank{recorded.rank}.html"
    with files.writing(folder):
        files.write_text(json_path, json.dumps(analysis.report, indent=1, allow_nan=False) + "\n")
        files.write_text(html_path, page(recorded, analysis))
    if recorded.rank == 0:
        show(analysis.report, console or _console())
        for path in (json_path, html_path, *recorded.traces.values()):
            print(f"wrote {path}")
    return analysis.report


def _console() -> Console:
    """Where there is no terminal, wide enough for lines of code."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def show(report: dict[str, Any], console: Console) -> None:
    """The tables of a report."""
    for part in (_steps, _gpu_steps, _causes, _gaps, _syncs, _kinds, _kernels, _memory, _host):
        made = part(report)
        if made is not None:
            console.print()
            console.print(made, highlight=False)


def _table(title: str, *columns: str) -> Table:
    """Columns that begin with `<` are text, the others numbers."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        if column.startswith("<"):
            table.add_column(Text(column[1:]), overflow="fold")
        else:
            table.add_column(Text(column), justify="right", no_wrap=True)
    return table


def _steps(report: dict[str, Any]) -> Text:
    steps, rates = report["steps"], report["rates"]
    plain, measured, traced = (_median(steps[key]) for key in ("plain_ms", "measured_ms", "traced_ms"))
    first, last = steps["first"], steps["first"] + steps["recorded"] - 1
    fewest, most = min(steps["micro_batches"]), max(steps["micro_batches"])
    batches = str(most) if fewest == most else f"{fewest} to {most}"
    lines = [
        f"steps {first} to {last} of {report['run']} on {report['device']}, each {batches} x "
        f"{steps['tokens']:,} tokens",
        f"a step takes {plain:.1f} ms without the profiler, {measured:.1f} ms measured, {traced:.1f} ms traced "
        "(Python frames and shapes)",
    ]
    if steps["launched_ms"] is not None:
        lines.append(
            "steps are CUDA graphs; time by kind, limits and memory are of steps launched kernel by kernel, which take "
            f"{_median(steps['launched_ms']):.1f} ms traced"
        )
    if steps["graphs_recorded"]:
        lines.append(
            f"{steps['graphs_recorded']} graphs were recorded during the measured steps, which takes time: warm up for "
            "longer, with --before"
        )
    if rates is not None:
        lines.append(
            f"rates for limits: matmul {rates['matmul_tflops']:.0f} TFLOP/s, copy {rates['copy_gb_per_s']:,.0f} GB/s"
        )
    gpu = report["gpu"]
    if gpu is None:
        lines.append("there is no GPU in this run: what follows is the host")
    else:
        lines.append(
            f"GPU busy {gpu['busy_percent']:.2f} % of {gpu['wall_ms']:.1f} ms; the same work is "
            f"{gpu['busy_percent_of_plain_steps']:.2f} % of as many steps without the profiler"
        )
    return Text("\n".join(lines))


def _gpu_steps(report: dict[str, Any]) -> Table | None:
    if report["gpu"] is None:
        return None
    table = _table("GPU by step", "step", "ms", "busy ms", "busy %", "idle ms", "launches")
    for row in report["gpu"]["steps"]:
        idle = row["wall_ms"] - row["busy_ms"]
        table.add_row(
            str(row["step"]),
            f"{row['wall_ms']:.2f}",
            f"{row['busy_ms']:.2f}",
            f"{row['busy_percent']:.2f}",
            f"{idle:.2f}",
            f"{row['launches']:,}",
        )
    return table


def _causes(report: dict[str, Any]) -> Table | None:
    gpu = report["gpu"]
    if gpu is None:
        return None
    title = f"Why the GPU waited: {gpu['gaps_over_5_us']} gaps over 5 us"
    table = _table(title, "ms", "gaps", "<cause", "<the host", "<line")
    for row in gpu["causes"][:_ROWS]:
        table.add_row(f"{row['ms']:.3f}", str(row["gaps"]), row["cause"], Text(row["doing"]), Text(row["place"] or ""))
    rest = gpu["causes"][_ROWS:]
    if rest:
        table.add_row(f"{sum(row['ms'] for row in rest):.3f}", str(sum(row["gaps"] for row in rest)), "others", "", "")
    table.add_row(f"{gpu['idle_in_short_gaps_ms']:.3f}", "", "short", "gaps of up to 5 us", "")
    return table


def _gaps(report: dict[str, Any]) -> Table | None:
    if report["gpu"] is None or not report["gpu"]["gaps"]:
        return None
    table = _table("The longest gaps", "at ms", "us", "<after", "<before", "<the host")
    for row in report["gpu"]["gaps"][:_ROWS]:
        table.add_row(
            f"{row['at_ms']:.2f}",
            f"{row['us']:.1f}",
            Text(short_name(row["after"])),
            Text(short_name(row["before"])),
            Text(row["doing"]),
        )
    return table


def _syncs(report: dict[str, Any]) -> Table | None:
    if report["gpu"] is None:
        return None
    if not report["syncs"]:
        return _table("Nothing held the host: no synchronisation, no copy from or to pageable memory, no allocation")
    table = _table("What held the host, per step", "ms", "times", "longest ms", "<call", "<line")
    for row in report["syncs"]:
        late = " (metrics of the step before)" if row["reads_metrics"] else ""
        beside = "" if row["thread"] == "main" else f" ({row['thread']})"
        table.add_row(
            f"{row['ms_per_step']:.3f}",
            f"{row['per_step']:.1f}",
            f"{row['longest_ms']:.3f}",
            Text(row["call"] + beside + late),
            Text(row["place"] or ""),
        )
    return table


def _kinds(report: dict[str, Any]) -> Table | None:
    if report["kinds"] is None:
        return None
    return _kernel_table("Time on the GPU by kind, per step", "kind", report["kinds"])


def _kernels(report: dict[str, Any]) -> Table | None:
    if report["kernels"] is None:
        return None
    rows = [{**row, "kernel": short_name(row["kernel"])} for row in report["kernels"][:_ROWS]]
    return _kernel_table("The longest kernels, per step", "kernel", rows)


def _kernel_table(title: str, key: str, rows: list[dict[str, Any]]) -> Table:
    """The limit is of the kernels that have one; `% of limit` compares it with their time alone."""
    table = _table(title, f"<{key}", "ms", "%", "launches", "limit ms", "of ms", "% of limit")
    for row in rows:
        limits = ["", "", ""]
        if row["limit_ms"] is not None:
            limits = [f"{row['limit_ms']:.3f}", f"{row['ms_with_limit']:.3f}", f"{row['limit_percent']:.0f}"]
        cells = [f"{row['ms']:.3f}", f"{row['percent']:.1f}", f"{row['launches']:.0f}", *limits]
        table.add_row(Text(row[key]), *cells)
    return table


def _memory(report: dict[str, Any]) -> Table | None:
    memory = report["memory"]
    if memory is None:
        return None
    title = f"Memory: at most {memory['peak_gib']:.2f} GiB allocated, {memory['reserved_gib']:.2f} GiB reserved"
    table = _table(title, "<part", "peak GiB", "<at", "last GiB")
    for row in memory["parts"]:
        table.add_row(row["part"], f"{row['peak_gib']:.2f}", row["peak_at"], f"{row['last_gib']:.2f}")
    return table


def _host(report: dict[str, Any]) -> Table:
    host = report["host"]
    title = f"Operations on the host, per step: their own time; {host['calls_per_step']:,.0f} calls"
    table = _table(title, "<operation", "<kind", "ms", "calls")
    for row in host["ops"][:_ROWS]:
        table.add_row(Text(short_name(row["op"])), row["kind"], f"{row['ms']:.2f}", f"{row['calls']:,.0f}")
    return table


def short_name(name: str, width: int = 48) -> str:
    """A kernel's name without return type, namespaces and arguments, cut to a width."""
    name = name.removeprefix("void ").removeprefix("autograd::engine::evaluate_function: ")
    head = name.partition("<")[0].partition("(")[0]
    if name.startswith(("Memcpy", "Memset")) or not head:
        head = name
    head = head.removeprefix("at::native::")
    return head if len(head) <= width else head[: width - 2] + ".."


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
