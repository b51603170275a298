"""The commands that show what a run's agent did, turn by turn, and export it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import (
    Overwrite,
    RunDir,
    Wait,
    check_new_file,
    refuse_options,
)
from agentevo.cli.printing import tell_of_rows
from agentevo.errors import ConfigError, UnknownNameError
from agentevo.runtime.progress import bar

if TYPE_CHECKING:
    from agentevo.data import RowReport
    from agentevo.runs.folder.sft_export import ReadAnswer
    from agentevo.store import Store, TrajectorySummary
    from agentevo.types import Task, Trajectory

PAGE_OPTIONS = ("step", "every", "per_step", "out", "overwrite")
MOST = 1_000_000_000
"""A number that every store can hold."""
MAX_LISTED = 40
"""The most ids with the same beginning that an error names."""

trajectories = typer.Typer(no_args_is_help=True, help="Show and export the attempts of a run.")


@trajectories.command("show")
def show(
    context: typer.Context,
    run_dir: RunDir,
    trajectory_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="The id or a prefix of it.")
    ] = "",
    best: Annotated[
        bool,
        typer.Option("--best", help="Choose the highest reward (the newest of equals)."),
    ] = False,
    worst: Annotated[
        bool,
        typer.Option("--worst", help="Choose the lowest reward (the newest of equals)."),
    ] = False,
    last: Annotated[
        bool,
        typer.Option("--last", help="Choose the newest (the default)."),
    ] = False,
    html: Annotated[
        bool,
        typer.Option(
            "--html",
            help="Instead, write attempts as HTML files with an index: "
            "FOLDER/step_N/trajectory_ID.html.",
        ),
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=-MOST, max=MOST, help="With --html: only the attempts of this step."
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=MOST, help="With --html: only every Nth step, and the last one."
        ),
    ] = 4,
    per_step: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=MOST, help="With --html: the most attempts of a step."
        ),
    ] = 32,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --html: the folder for the pages. Default: trajectories_html in the run's "
            "folder.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            metavar="FOLDER",
            help="Also write the attempt's files into this new folder.",
        ),
    ] = None,
    wait: Wait = None,
) -> None:
    """Print one trajectory turn by turn: each token with its log-prob, and the agent's files. Or
    write many as HTML pages (--html)."""
    if html:
        if trajectory_id:
            raise ConfigError(f"{trajectory_id}: --html writes many attempts: leave the ID out")
        reason = "chooses one attempt, and --html writes many: leave it out"
        refuse_options(context, reason, ("best", "worst", "last", "files"))
        _write_pages(run_dir, step, every, per_step, out, wait, overwrite=overwrite)
        return

    refuse_options(context, "is for HTML pages: add --html", PAGE_OPTIONS)
    if files is not None and files.exists():
        raise ConfigError(f"--files {files}: is there already: give a new folder")
    if sum([bool(trajectory_id), best, worst, last]) > 1:
        raise ConfigError("trajectories show: give an ID or one of --best, --worst, --last")

    which = "best" if best else "worst" if worst else "last"
    _print_trajectory(run_dir, trajectory_id, which, files, wait)


def _print_trajectory(
    run_dir: Path, trajectory_id: str, which: str, files: Path | None, wait: float | None
) -> None:
    from rich.console import Console

    from agentevo.observability import render_trajectory
    from agentevo.observability.static_attempt import read_task
    from agentevo.runs.folder.run_folder import read_store, token_texts

    async def work(store: Store) -> tuple[Trajectory, str, Task | None]:
        summaries = await store.summaries()
        name = _choose(summaries, trajectory_id, which, run_dir)
        step = next(summary.trained_step for summary in summaries if summary.id == name)
        trajectory = await store.trajectory(name)
        credit = await _credit_of(store, step)
        return trajectory, credit, await read_task(store, trajectory)

    trajectory, credit, task = read_store(run_dir, work, wait_s=wait)
    decode = token_texts(run_dir) or (lambda token: f"<{token}>")
    Console().print(render_trajectory(trajectory, decode, credit, task))

    if files is not None:
        _write_files(trajectory, files)


def _write_pages(
    run_dir: Path,
    step: int | None,
    every: int,
    per_step: int,
    out: Path | None,
    wait: float | None,
    *,
    overwrite: bool,
) -> None:
    from agentevo.observability.trajectory_pages import INDEX, check_folder, choose, write_pages
    from agentevo.runs.folder.run_folder import check_run_folder, read_store, token_texts

    check_run_folder(run_dir)
    folder = out if out is not None else run_dir / "trajectories_html"
    check_folder(folder, overwrite=overwrite)
    decode = token_texts(run_dir)

    async def work(store: Store) -> int:
        chosen = await choose(store, step=step, every=every, per_step=per_step)
        if not chosen:
            of = "" if step is None else f" of step {step}"
            raise ConfigError(f"{run_dir}: the store holds no trajectory{of} yet")

        total = sum(len(chosen_step.attempts) for chosen_step in chosen)
        with bar("trajectories show --html", total, "pages") as progress:
            return await write_pages(
                store, chosen, folder, run=run_dir.name, decode=decode, advance=progress.advance
            )

    count = read_store(run_dir, work, wait_s=wait)
    print(f"{count} page{'s' * (count != 1)} written: {folder / INDEX}")


def _write_files(trajectory: Trajectory, folder: Path) -> None:
    from agentevo.store.files import write_files

    try:
        write_files(trajectory.files, folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--files {folder}: can't be written: {error}") from error
    count = len(trajectory.files)
    print(f"{count} file{'s' * (count != 1)} written to {folder}")


async def _credit_of(store: Store, step: int | None) -> str:
    """What decided how much its turns were worth when it was trained on, in words; empty if it was
    not."""
    from agentevo.training.batching.step_plan import KEY

    records = await store.steps(after=step - 1) if step else []
    rules = [record.record.get(KEY, {}).get("credit") for record in records if record.step == step]
    return f"trained in step {step}, credit: {rules[0]}" if rules and rules[0] else ""


def _choose(
    summaries: Sequence[TrajectorySummary], trajectory_id: str, which: str, run_dir: Path
) -> str:
    if trajectory_id:
        names = [summary.id for summary in summaries]
        matches = [name for name in names if name.startswith(trajectory_id)]
        if trajectory_id in names or len(matches) == 1:
            return trajectory_id if trajectory_id in names else matches[0]
        raise UnknownNameError(
            f"{run_dir}: {len(matches)} ids begin with {trajectory_id!r}: give more of one:\n"
            + "\n".join(matches[:MAX_LISTED])
            if matches
            else f"{run_dir}: no trajectory is called {trajectory_id!r}: `agentevo trajectories "
            f"show {run_dir}` shows the newest"
        )

    finished = [summary for summary in summaries if summary.status == "completed"] or list(
        summaries
    )
    if not finished:
        raise ConfigError(f"{run_dir}: the store holds no trajectory yet")

    sign = {"best": 1.0, "worst": -1.0, "last": 0.0}[which]
    return max(enumerate(finished), key=lambda pair: (sign * pair[1].reward, pair[0]))[1].id


OPTIONS = {
    "annotations": ("held_out",),
    "pairs": ("per_task", "margin"),
    "sft": ("split", "min_reward", "per_task", "model"),
}
"""What is written -> the options that choose its rows."""

Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT.jsonl[.gz]",
        help="The file to write, one trajectory per line.",
    ),
]
Sft = Annotated[
    bool,
    typer.Option(
        "--sft",
        help="Write the successful attempts of a run or of an evaluation (`agentevo eval "
        "--out`) as conversations for `agentevo sft`.",
    ),
]
Pairs = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="Write pairs of a better and a worse attempt for reward models and data.pairs: the "
        "best and the worst of each group.",
    ),
]
AnnotationsForm = Annotated[
    str | None,
    typer.Option(
        metavar="sft|pairs|labels|judge",
        help="Write people's labels (`agentevo annotate`). sft: conversations for `agentevo sft`. "
        "pairs, labels: for data.pairs of `agentevo train` (labels for kto and rft). judge: "
        "verdicts with rewards, for `agentevo judge`.",
    ),
]
HeldOut = Annotated[
    bool,
    typer.Option(
        "--held-out",
        help="With --annotations: include attempts of evaluations in sft, pairs and labels. "
        "Success on their tasks is then no longer a held-out measure.",
    ),
]
Margin = Annotated[
    float,
    typer.Option(
        metavar="REWARD", min=0, help="With --pairs: the rewards differ by more than this."
    ),
]
Split = Annotated[
    str,
    typer.Option(metavar="SPLIT", help="With --sft: attempts of training or of evaluations."),
]
MinReward = Annotated[
    float | None,
    typer.Option(
        metavar="REWARD", help="With --sft: the lowest reward. Default: successful attempts only."
    ),
]
PerTask = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="With --sft: the maximum number of attempts at one task, best first. With --pairs: "
        "the maximum number of pairs of one group.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --sft: the model whose replies to train on, `policy` or a remote model. "
        "Default: the remote model in attempts that use one, else the policy.",
    ),
]


@trajectories.command("export")
def export(
    context: typer.Context,
    run_dir: RunDir,
    out: Out,
    sft: Sft = False,
    split: Split = "train",
    min_reward: MinReward = None,
    per_task: PerTask = None,
    model: Model = None,
    pairs: Pairs = False,
    margin: Margin = 0.0,
    annotations: AnnotationsForm = None,
    held_out: HeldOut = False,
    overwrite: Overwrite = False,
    wait: Wait = None,
) -> None:
    """Export a run's trajectories with token ids and log-probs, its successful conversations
    (--sft), preference pairs (--pairs), or people's labels (--annotations)."""
    uses = {"annotations": annotations is not None, "pairs": pairs, "sft": sft}
    use = next((name for name, is_chosen in uses.items() if is_chosen), "")
    reason = f"has no effect with --{use}: leave it out"
    if not use:
        reason = "is for another content: add --sft, --pairs or --annotations"
    refuse_options(context, reason, allowed=(use, *OPTIONS.get(use, ()), "overwrite", "wait"))

    check_new_file(out, overwrite=overwrite)
    if annotations is not None:
        _export_annotations(run_dir, out, annotations, held_out, wait)
    elif pairs:
        _export_pairs(run_dir, out, margin, per_task or 1, wait)
    elif sft:
        _export_sft(run_dir, out, split, min_reward, per_task, model, wait)
    else:
        from agentevo.runs.folder.run_folder import read_store
        from agentevo.store import export_jsonl

        count = read_store(run_dir, lambda store: export_jsonl(store, out), wait_s=wait)
        print(f"{count} trajectories written to {out}")


def _export_annotations(
    run_dir: Path, out: Path, form: str, held_out: bool, wait: float | None
) -> None:
    from agentevo.runs.folder.annotation_export import FORMATS as ANNOTATION_FORMATS
    from agentevo.runs.folder.annotation_export import export_annotations
    from agentevo.runs.folder.annotations import read_annotations
    from agentevo.runs.folder.run_folder import check_run_folder, read_store

    if form not in ANNOTATION_FORMATS:
        raise ConfigError(f"--annotations {form}: there are {', '.join(ANNOTATION_FORMATS)}")

    labels = read_annotations(check_run_folder(run_dir))
    read = _reader(run_dir)

    async def work(store: Store) -> tuple[int, Counter[str]]:
        return await export_annotations(store, labels, out, form, read, held_out=held_out)

    count, left_out = read_store(run_dir, work, wait_s=wait)
    print(f"{count} {'row' if count == 1 else 'rows'} written to {out}")
    for why, number in left_out.most_common():
        print(f"{number} left out: {why}")


def _export_sft(
    run_dir: Path,
    out: Path,
    split: str,
    min_reward: float | None,
    per_task: int | None,
    model: str | None,
    wait: float | None,
) -> None:
    from agentevo.store.records import SPLITS

    if split not in SPLITS:
        raise ConfigError(f"--split {split}: there are {', '.join(SPLITS)}")

    from agentevo.runs.evaluation.results import SETTINGS
    from agentevo.runs.folder.run_folder import read_store, remote_model_names
    from agentevo.runs.folder.sft_export import POLICY, export_sft

    if (run_dir / SETTINGS).is_file():
        _export_played(run_dir, out, min_reward, per_task, model)
        return

    model_names = [POLICY, *remote_model_names(run_dir)]
    if model is not None and model not in model_names:
        raise UnknownNameError(f"--model {model}: the run has {', '.join(model_names)}")

    read = _reader(run_dir)

    async def work(store: Store) -> RowReport:
        return await export_sft(
            store,
            out,
            read,
            split=split,
            min_reward=min_reward,
            per_task=per_task,
            model=model,
        )

    tell_of_rows(read_store(run_dir, work, wait_s=wait), out)


def _export_played(
    folder: Path, out: Path, min_reward: float | None, per_task: int | None, model: str | None
) -> None:
    """Exports the attempts in a folder of `agentevo eval --out`."""
    from agentevo.runs.evaluation.results import ResultsFolder
    from agentevo.runs.folder.run_folder import tokenizer_in
    from agentevo.runs.folder.sft_export import export_played
    from agentevo.runtime.event_loop import run_coroutine

    results = ResultsFolder(folder)
    played = dict(results.settings().get("played_models") or {})
    if len(played) != 1:
        raise ConfigError(
            f"{folder}: it has attempts of {len(played)} models ({', '.join(played)}): evaluate "
            "only the one whose replies you want"
        )

    weights = str(*played.values())
    has_tokenizer = (Path(weights) / "tokenizer_config.json").is_file()
    read = _reader_of(tokenizer_in(weights) if has_tokenizer else None)
    done = export_played(
        list(results.trajectories().values()),
        out,
        read,
        min_reward=min_reward,
        per_task=per_task,
        model=model,
    )
    tell_of_rows(run_coroutine(done), out)


def _export_pairs(
    run_dir: Path, out: Path, margin: float, per_group: int, wait: float | None
) -> None:
    from agentevo.runs.folder.annotation_export import export_pairs
    from agentevo.runs.folder.run_folder import read_store

    read = _reader(run_dir)

    async def work(store: Store) -> RowReport:
        return await export_pairs(store, out, read, margin=margin, per_group=per_group)

    tell_of_rows(read_store(run_dir, work, wait_s=wait), out, "pairs")


def _reader(run_dir: Path) -> ReadAnswer:
    """The function that parses the policy's text in the notation of its model family."""
    from agentevo.runs.folder.run_folder import saved_tokenizer

    return _reader_of(saved_tokenizer(run_dir))


def _reader_of(tokenizer: Any | None) -> ReadAnswer:
    from agentevo.runs.folder.sft_export import answer_reader

    if tokenizer is None:
        return answer_reader(None)
    from agentevo.models.chat.chat_format import ChatFormat
    from agentevo.models.vision.image_template import ImageChatTemplate

    # The templates of some models that see leave out a content that is not a list of parts.
    return answer_reader(ChatFormat(tokenizer, template=ImageChatTemplate(tokenizer, frozenset())))
