"""`agentevo eval`: measures models on tasks, scores kept attempts again, and grades tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from agentevo.cli.arguments import Overrides, refuse_options, written_options
from agentevo.cli.printing import print_note
from agentevo.errors import ConfigError

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder for the results, one line per attempt. By default nothing is stored.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


Target = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|RUN|MODEL",
        help="A recipe (its untrained model), a run (RUN, RUN@STEP), or a model: a folder, a "
        "known name, a name of remote_models, or URL#MODEL. With --rescore: a folder of --out.",
    ),
]
Checkpoint = Annotated[
    str,
    typer.Option(
        metavar="PATH|best|last",
        help="The checkpoint; a run's best by default. A name of remote_models or URL#MODEL "
        "plays instead.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Tasks instead of the recipe's. Repeatable."),
]
Attempts = Annotated[
    int | None,
    typer.Option(
        "--attempts",
        "-k",
        metavar="N",
        help="Attempts per task, for pass@1 to pass@N. Default: 1.",
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODEL", help="Another model on the same tasks, written like TARGET. Repeatable."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help=(
            "Sampling temperature. Default: 0 (greedy) for one attempt, "
            "evaluation.temperature for several."
        )
    ),
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling mass.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="The most tokens of one completion.")]
Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Use only the first N tasks.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Also group the results by this key of the tasks, such as a difficulty.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the evaluation in --out.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Resume, and play failed attempts again.")
]


Rescore = Annotated[
    bool,
    typer.Option(
        "--rescore",
        help="Score the attempts in a folder of --out again, by other rewards (such as "
        "rewards=[math]), without playing.",
    ),
]


def evaluate(
    context: typer.Context,
    target: Target,
    overrides: Overrides = None,
    checkpoint: Checkpoint = "",
    tasks: Tasks = None,
    attempts: Attempts = None,
    against: Against = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    by: By = None,
    out: Out = None,
    resume: Resume = False,
    retry_failed: RetryFailed = False,
    rescore: Rescore = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate models on held-out tasks: success next to a random and an optimal player, or pass@k
    of several models."""
    if rescore:
        reason = "is for playing, and --rescore does not play: leave it out"
        refuse_options(context, reason, allowed=("rescore", "out", "as_json"))
        _rescore(Path(target), overrides or [], out, as_json)
        return

    if not (written_options(context).keys() - {"checkpoint"}) and _is_plain(target):
        _evaluate_plainly(target, overrides or [], checkpoint)
        return

    from agentevo.runs.evaluation.evaluate import EvaluationRun

    sampling = {"top_p": top_p, "max_new_tokens": max_new_tokens}
    what = EvaluationRun(
        target=target,
        against=against or [],
        overrides=overrides or [],
        tasks=tasks or [],
        limit=limit,
        by=by or [],
        attempts=1 if attempts is None else attempts,
        checkpoint=checkpoint,
        temperature=temperature,
        sampling={name: value for name, value in sampling.items() if value is not None},
        out=out,
        resume=resume or retry_failed,
        retry_failed=retry_failed,
    )
    _measure(what, as_json)


def _rescore(folder: Path, overrides: list[str], out: Path | None, as_json: bool) -> None:
    from agentevo.runs.evaluation.score import score

    summary = score(folder, overrides, out, print_note)
    if not as_json:
        _show_heading(summary)
    _show(summary, as_json)


def _measure(what: Any, as_json: bool) -> None:
    from agentevo.runs.evaluation.evaluate import check_attempts
    from agentevo.runs.evaluation.evaluate import evaluate as measured

    begin = {} if as_json else {"begin": _show_heading}
    with _bars() as progress:
        summary = measured(what, print_note, progress, **begin)

    _show(summary, as_json)
    check_attempts(summary)


def _show(summary: dict[str, Any], as_json: bool) -> None:
    import json

    from agentevo.runs.evaluation.summary import table

    if as_json:
        print(json.dumps(summary, indent=1, sort_keys=True))
    else:
        print(table(summary))


def _show_heading(measured: Mapping[str, Any]) -> None:
    tasks = measured["num_tasks"]
    attempts = measured["attempts"]
    drawn = "greedy" if measured["temperature"] == 0 else f"temperature {measured['temperature']:g}"
    rewards = ", ".join(reward.get("label") or reward["name"] for reward in measured["rewards"])
    judged = f", judged by {rewards}" if rewards else ""
    print(
        f"{tasks} task{'s' * (tasks != 1)}, {attempts} attempt{'s' * (attempts != 1)} each, "
        f"{drawn}, at most {measured['sampling']['max_new_tokens']} tokens a turn; "
        f"{measured['agent']['type']}{judged}",
        flush=True,
    )


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each model, one after the other."""
    from agentevo.runtime.progress import ProgressBar, bar

    shown: dict[str, ProgressBar] = {}
    with ExitStack() as stack:

        def show_progress(label: str, done: int, total: int) -> None:
            if label not in shown:
                stack.close()
                shown[label] = stack.enter_context(bar(f"eval {label}", total, "tasks"))
            shown[label].to(done)

        yield show_progress


def _is_plain(target: str) -> bool:
    """Whether it is a run or a recipe, or nothing that is known."""
    from agentevo.runs.evaluation.contestants import is_model
    from agentevo.runs.folder.run_folder import is_run_folder

    if is_run_folder(Path(target)):
        return True
    folder = target.rpartition("@")[0]
    return not ("://" in target or is_model(target) or (folder and is_run_folder(Path(folder))))


def _evaluate_plainly(target: str, overrides: list[str], checkpoint: str) -> None:
    from agentevo.runs.folder.run_folder import is_run_folder

    if is_run_folder(Path(target)):
        _evaluate_run(Path(target), overrides, checkpoint or "best")
    elif checkpoint in ("best", "last"):
        raise ConfigError(
            f"--checkpoint {checkpoint} names a checkpoint of a run: give the run's folder "
            "instead of "
            f"{target}, or the path of a checkpoint"
        )
    else:
        _evaluate_recipe(target, overrides, checkpoint)


def _evaluate_run(run_dir: Path, overrides: list[str], checkpoint: str) -> None:
    from agentevo.runs.folder.run_folder import run_config

    config = run_config(run_dir, overrides)
    from agentevo.api.run import Run
    from agentevo.observability import LiveView

    Run(config).eval(
        checkpoint=checkpoint, samples=config.evaluation.samples, view=LiveView(str(run_dir))
    )


def _evaluate_recipe(recipe: str, overrides: list[str], checkpoint: str) -> None:
    from agentevo.config import load_config
    from agentevo.runs.evaluation.contestants import check_word

    check_word(recipe)
    config = load_config(recipe, overrides)
    from agentevo.api.run import evaluate_model
    from agentevo.observability import LiveView

    evaluate_model(
        config, checkpoint=Path(checkpoint) if checkpoint else None, view=LiveView(config.run.name)
    )
