"""The commands for the annotations of a run's attempts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overwrite, RunDir, Wait, check_new_file, path_word
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.store import Store

commands = typer.Typer(no_args_is_help=True, help="Use people's labels of a run's attempts.")


@commands.command("export")
def export(
    run_dir: RunDir,
    out: Annotated[
        Path,
        typer.Argument(parser=path_word, metavar="OUT.jsonl[.gz]", help="The file to write."),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="sft: conversations for `agentevo sft`. pairs, labels: for data.pairs of "
            "`agentevo train` (labels for kto and rft). judge: verdicts with rewards.",
        ),
    ] = "sft",
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Include attempts of evaluations in sft, pairs and labels. Success on their tasks "
            "is then no longer a held-out measure. Default: excluded.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    wait: Wait = None,
) -> None:
    """Export people's labels of a run's attempts as training data."""
    from agentevo.runs.annotation_export import FORMATS, export_annotations
    from agentevo.runs.annotations import read_annotations
    from agentevo.runs.folder import check_run_folder, read_store, saved_tokenizer
    from agentevo.runs.sft_export import answer_reader

    if form not in FORMATS:
        raise ConfigError(f"--format {form}: there are {', '.join(FORMATS)}")

    check_new_file(out, overwrite=overwrite)
    annotations = read_annotations(check_run_folder(run_dir))

    tokenizer = saved_tokenizer(run_dir)
    chat = None
    if tokenizer is not None:
        from agentevo.models.chat import ChatFormat

        chat = ChatFormat(tokenizer)

    async def work(store: Store) -> tuple[int, Counter[str]]:
        return await export_annotations(
            store, annotations, out, form, answer_reader(chat), held_out=held_out
        )

    count, left_out = read_store(run_dir, work, wait_s=wait)
    print(f"{count} {'row' if count == 1 else 'rows'} written to {out}")
    for why, number in left_out.most_common():
        print(f"{number} left out: {why}")


@commands.command("calibrate")
def calibrate(
    run_dir: RunDir,
    passed_from: Annotated[
        float,
        typer.Option(
            metavar="VALUE", help="The lowest value of a reward part that counts as a pass."
        ),
    ] = 0.5,
) -> None:
    """Show how often people's labels and the rewards agree: the share with its 95% interval, and
    Cohen's kappa."""
    from agentevo.runs.annotations import calibration, read_annotations
    from agentevo.runs.folder import check_run_folder

    rows = calibration(read_annotations(check_run_folder(run_dir)), passed_from)
    if not rows:
        print("no attempt is labelled yet (agentevo annotate)")

    for row in rows:
        rate = row.rate or 0.0
        low, high = row.interval or (0.0, 1.0)
        kappa = "" if row.kappa is None else f", kappa {row.kappa:.2f}"
        print(f"{row.judge}: {rate:.0%} of {row.num} agree [{low:.0%}, {high:.0%}]{kappa}")
