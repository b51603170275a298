"""`agentevo report`: what runs have reached, as a page, a table or a picture."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, cast

import typer

from agentevo.cli.arguments import refuse_options
from agentevo.errors import UnknownNameError
from agentevo.runtime.progress import bar


def report(
    context: typer.Context,
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Folders of runs or sweeps."),
    ],
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="Print the results of finished runs as a Markdown table. The default for a "
            "sweep and for several runs.",
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Also write the table into this Markdown file, between `<!-- table -->` and `<!-- "
            "/table -->`.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Plot the curves of all runs in this image: for each setting the mean over its "
            "seeds, and the range.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="With --plot: a metric of metrics.jsonl, in its own panel. Repeatable. Default: "
            "held-out success, score and other main metrics.",
        ),
    ] = None,
    x: Annotated[
        str, typer.Option(metavar="step|tokens|time", help="With --plot: the x axis.")
    ] = "step",
    each: Annotated[
        bool,
        typer.Option("--each", help="One row or line per run, instead of one per setting."),
    ] = False,
) -> None:
    """Write a run's report again, or compare runs by a table or a plot. The report is
    RUN_DIR/report.html with plots/; the run may still be under way."""
    from agentevo.runs.folder.run_folder import is_sweep_folder

    if plot is not None:
        refuse_options(context, "is for a table: leave it out with --plot", ("table", "page"))
        _plot(folders, plot, metric or (), x, each)
        return

    refuse_options(context, "is for curves: add --plot FILE.png", ("metric", "x"))
    if table or page is not None or len(folders) > 1 or is_sweep_folder(folders[0]):
        _print_table(folders, page, each)
        return

    refuse_options(context, "is for a table or curves: add --table or --plot", ("each",))
    _write_report(folders[0])


def _print_table(folders: Sequence[Path], page: Path | None, each: bool) -> None:
    from agentevo.runs.folder.result_table import (
        check_page,
        make_rows,
        markdown,
        read_results,
        write_table,
    )

    if page is not None:
        check_page(page)

    text = markdown(make_rows(read_results(folders), each=each))
    print(text, end="")
    if page is not None:
        write_table(page, text)


def _plot(folders: Sequence[Path], out: Path, metrics: Sequence[str], x: str, each: bool) -> None:
    from agentevo.observability.chart_lines import NAMES, Axis, band_chart, metrics_to_compare
    from agentevo.observability.plots import MOST_PANELS, check_picture, write_comparison
    from agentevo.runs.folder.comparison import measured_runs, settings_of

    check_picture(out)
    if x not in NAMES:
        raise UnknownNameError(f"--x {x}: there are {', '.join(NAMES)}")

    runs = measured_runs(folders)
    settings = settings_of(runs, each=each)
    names = sorted({name for run in runs for name in run.table.columns})
    charts = []
    for name in metrics or metrics_to_compare(names)[:MOST_PANELS]:
        chart = band_chart(settings, name, cast(Axis, x))
        if chart is None:
            near = get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f": did you mean {', '.join(near)}?" if near else ""
            raise UnknownNameError(f"--metric {name}: no run has logged it{hint}")
        charts.append(chart)

    write_comparison(charts, out)
    print(f"runs: {len(runs)}, lines: {len(settings)}, metrics: {len(charts)}; {out}")


def _write_report(run_dir: Path) -> None:
    from agentevo.observability import report_from_run
    from agentevo.runs.folder.run_folder import check_run_folder, token_texts

    with bar("report"):
        written = report_from_run(check_run_folder(run_dir), token_texts(run_dir))
    print(written)
