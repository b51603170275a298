"""The commands that look at what runs have reached, or pass it on: `table`, `plot`, `merge`,
`report`."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, cast

import typer

from agentevo.cli.arguments import RunDir, path_word
from agentevo.errors import UnknownNameError
from agentevo.progress import bar


def table(
    folders: Annotated[
        list[Path],
        typer.Argument(
            parser=path_word, metavar="RUN_DIR...", help="Folders of finished runs or sweeps."
        ),
    ],
    each: Annotated[
        bool,
        typer.Option("--each", help="One row per run, instead of one per setting."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_word,
            metavar="FILE",
            help="Also write the table into this Markdown file, between `<!-- table -->` and `<!-- "
            "/table -->`.",
        ),
    ] = None,
) -> None:
    """Print the results of runs as a Markdown table."""
    from agentevo.runs.result_table import (
        check_page,
        make_rows,
        markdown,
        read_results,
        write_table,
    )

    if out is not None:
        check_page(out)

    text = markdown(make_rows(read_results(folders), each=each))
    print(text, end="")
    if out is not None:
        write_table(out, text)


def plot(
    folders: Annotated[
        list[Path],
        typer.Argument(parser=path_word, metavar="RUN_DIR...", help="Folders of runs or sweeps."),
    ],
    out: Annotated[
        Path, typer.Option(parser=path_word, metavar="FILE.png", help="The image file to write.")
    ] = Path("runs.png"),
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="A metric of metrics.jsonl, in its own panel. Repeatable. Default: held-out "
            "success, score and other main metrics.",
        ),
    ] = None,
    x: Annotated[str, typer.Option(metavar="step|tokens|time", help="The x axis.")] = "step",
    each: Annotated[
        bool,
        typer.Option("--each", help="One line per run, instead of one per setting."),
    ] = False,
) -> None:
    """Plot the curves of several runs in one image: for each setting the mean over its seeds, and
    the range."""
    from agentevo.observability.chart_lines import NAMES, Axis, band_chart, metrics_to_compare
    from agentevo.observability.comparison_plot import MOST_PANELS, check_picture, write_comparison
    from agentevo.runs.comparison import measured_runs, settings_of

    check_picture(out)
    if x not in NAMES:
        raise UnknownNameError(f"--x {x}: there are {', '.join(NAMES)}")

    runs = measured_runs(folders)
    settings = settings_of(runs, each=each)
    names = sorted({name for run in runs for name in run.table.columns})
    metric_names = metric or metrics_to_compare(names)[:MOST_PANELS]
    charts = []
    for name in metric_names:
        chart = band_chart(settings, name, cast(Axis, x))
        if chart is None:
            near = get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f": did you mean {', '.join(near)}?" if near else ""
            raise UnknownNameError(f"--metric {name}: no run has logged it{hint}")
        charts.append(chart)

    write_comparison(charts, out)
    print(f"{len(runs)} runs, {len(settings)} lines, {len(charts)} metrics: {out}")


def merge(
    source: Annotated[
        Path,
        typer.Argument(
            parser=path_word,
            metavar="CHECKPOINT|RUN_DIR",
            help="The folder of an adapter, or of a run (uses its best checkpoint).",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(parser=path_word, metavar="OUT", help="The folder for the merged model."),
    ],
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The base model, a name or a folder, if it has moved since training.",
        ),
    ] = "",
) -> None:
    """Merge an adapter (model.lora) into its base model."""
    from agentevo.runs.folder import UNSCORED, is_run_folder, run_config

    if is_run_folder(source):
        from agentevo.api.run import Run

        source = Run(run_config(source, UNSCORED)).checkpoint

    from agentevo.models.merge import merge_adapter

    with bar("merge"):
        merged = merge_adapter(source, out, base or None)

    print(merged)


def report(run_dir: RunDir) -> None:
    """Write RUN_DIR/report.html and plots/ again, also for a running or interrupted run."""
    from agentevo.observability import report_from_run
    from agentevo.runs.folder import check_run_folder, token_texts

    with bar("report"):
        written = report_from_run(check_run_folder(run_dir), token_texts(run_dir))
    print(written)
