"""The `agentevo` command: turns words into calls, prints what comes back, and decides the exit
code.

    0    done
    1    it failed on the way (`AgentEvoError`), or `doctor` found something wrong
    2    the words or the configuration are wrong: said in one line per problem on stderr, and nothing was created
    130  stopped by Ctrl-C

`main` is the one boundary where errors become messages; commands let them through. Whatever is
heavy (torch, transformers, SQLAlchemy, matplotlib) is imported inside the command that needs it, so
`agentevo --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo import __version__
from agentevo.cli import audit as audit_commands
from agentevo.cli import processes, store
from agentevo.cli.table import print_table
from agentevo.errors import AgentEvoError, ConfigError, UnknownNameError

if TYPE_CHECKING:
    from agentevo.config.keys import Explanation
    from agentevo.config.sweep import Sweep
    from agentevo.doctor.checks import Check
    from agentevo.store import Store, TrajectorySummary
    from agentevo.types import Trajectory

app = typer.Typer(
    name="agentevo",
    help="Trains language-model agents that act over many turns: any agent in, a better model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models = typer.Typer(no_args_is_help=True, help="Small models known by name.")
config_commands = typer.Typer(
    no_args_is_help=True, help="What a recipe resolves to, and what each key means."
)
trajectories = typer.Typer(no_args_is_help=True, help="What a run's agent did, turn by turn.")
app.add_typer(models, name="models")
app.add_typer(config_commands, name="config")
app.add_typer(trajectories, name="trajectories")
app.add_typer(store.stores, name="store")

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Path of a .yaml file, or the name of a packaged recipe (`agentevo list recipes`).",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c]...", help="Changes to the recipe, such as trainer.steps=10."),
]
RunDir = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, such as runs/coins.")
]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. The only place that turns an error into a
    message."""
    try:
        typer.main.get_command(app)(args=None if argv is None else list(argv), prog_name="agentevo")
    except ConfigError as error:
        return _fail(error, 2)
    except AgentEvoError as error:
        return _fail(error, 1)
    except SystemExit as exit_request:
        if exit_request.code == 130:
            print(
                "stopped cleanly: whole checkpoints are kept, and the same command with --resume "
                "goes on from the last",
                file=sys.stderr,
            )
        return exit_request.code if isinstance(exit_request.code, int) else 0
    return 0


def _fail(error: AgentEvoError, code: int) -> int:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"agentevo {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None: ...


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the last checkpoint of the run's folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved configuration and create nothing.")
    ] = False,
) -> None:
    """Train an agent: evaluate, train, evaluate again, report. A recipe with a `sweep` is several
    runs, and ends with a table of them."""
    from agentevo.config import load_config, to_yaml
    from agentevo.config.sweep import load_sweep

    sweep = load_sweep(recipe, overrides or [])
    if sweep is not None:
        _warn_of_kept_keys(recipe, overrides or [])
        _train_sweep(sweep, resume, dry_run)
        return
    config = load_config(recipe, overrides or [])
    _warn_of_kept_keys(recipe, overrides or [])
    if resume and config.run.overwrite:
        raise ConfigError(
            "--resume goes on with the run in the folder and run.overwrite deletes it: give only "
            "one of the two"
        )
    if dry_run:
        print(to_yaml(config), end="")
        return
    from agentevo.observability import LiveView
    from agentevo.orchestration.run import train as train_run
    from agentevo.processes.supervisor import Supervisor

    train_run(config, resume=resume, view=LiveView(config.run.name), supervisor=Supervisor)


def _warn_of_kept_keys(recipe: str, overrides: list[str]) -> None:
    """A preset named on the command line does not bring its own values for what the recipe has
    set."""
    from agentevo.config import sources
    from agentevo.config.other_preset import kept_keys

    path = sources.find_recipe(recipe)
    for line in kept_keys(sources.read_yaml(path), overrides, where=str(path)):
        print(f"warning: {line}", file=sys.stderr)


@app.command()
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the last checkpoint of the run's folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved configuration and create nothing.")
    ] = False,
) -> None:
    """Fine-tune on conversations (`data`, `sft`): from files, the environment's solver, or a run's
    best attempts."""
    from agentevo.config import check_sft, load_config, to_yaml

    config = load_config(recipe, overrides or [], needs_environment=False)
    if resume and config.run.overwrite:
        raise ConfigError(
            "--resume goes on with the run in the folder and run.overwrite deletes it: give only "
            "one of the two"
        )
    check_sft(config)
    if dry_run:
        print(to_yaml(config), end="")
        return
    from agentevo.observability import LiveView
    from agentevo.orchestration.run import train as train_run

    train_run(config, command="sft", resume=resume, view=LiveView(config.run.name))


app.command()(processes.learn)
app.command()(processes.sample)
app.command()(processes.serve)


def _train_sweep(sweep: Sweep, resume: bool, dry_run: bool) -> None:
    if resume and sweep.overwrite:
        raise ConfigError(
            "--resume goes on with the sweep in the folder and run.overwrite deletes it: give "
            "only one of the two"
        )
    if dry_run:
        print(f"{sweep.dir}: {len(sweep.members)} runs, {sweep.parallel} at once")
        print_table(
            (one.name, ", ".join(f"{key}={value}" for key, value in one.changes.items()))
            for one in sweep.members
        )
        return
    from agentevo.observability.sweep_view import SweepView
    from agentevo.processes.sweep import run_sweep

    run_sweep(sweep, resume=resume, view=SweepView(sweep.name))


@app.command()
def table(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Folders of finished runs, or of sweeps."),
    ],
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="A row for each run, instead of one for all seeds of a setting."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also put it into this Markdown file, between `<!-- table -->` and `<!-- /table "
            "-->`.",
        ),
    ] = None,
) -> None:
    """Print what runs reached as a Markdown table."""
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


@app.command("eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN_DIR", help="A recipe's model as it is, or what a run has trained."
        ),
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        str,
        typer.Option(metavar="PATH|best|last", help="Which checkpoint; of a run, best by default."),
    ] = "",
) -> None:
    """Measure success on held-out tasks, beside a random and an optimal player."""
    from agentevo.runs.folder import is_run_folder

    if is_run_folder(Path(target)):
        _evaluate_run(Path(target), overrides or [], checkpoint or "best")
    elif checkpoint in ("best", "last"):
        raise ConfigError(
            f"--checkpoint {checkpoint} is one of a run's: give the run's folder instead of "
            f"{target}, or the path of a checkpoint"
        )
    else:
        _evaluate_recipe(target, overrides or [], checkpoint)


def _evaluate_run(run_dir: Path, overrides: list[str], checkpoint: str) -> None:
    from agentevo.runs.folder import run_config

    config = run_config(run_dir, overrides)
    from agentevo.api.run import Run
    from agentevo.observability import LiveView

    Run(config).eval(
        checkpoint=checkpoint, samples=config.evaluation.samples, view=LiveView(str(run_dir))
    )


def _evaluate_recipe(recipe: str, overrides: list[str], checkpoint: str) -> None:
    from agentevo.config import load_config

    config = load_config(recipe, overrides)
    from agentevo.api.run import evaluate_model
    from agentevo.observability import LiveView

    evaluate_model(
        config, checkpoint=Path(checkpoint) if checkpoint else None, view=LiveView(config.run.name)
    )


@app.command()
def merge(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT|RUN_DIR",
            help="Folder of an adapter, or of a run (then its best one).",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the merged model.")],
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The adapter's base, where it is no longer where the adapter says: a name or a "
            "folder.",
        ),
    ] = "",
) -> None:
    """Make one plain Hugging Face model of an adapter (model.lora) and its base."""
    from agentevo.runs.folder import is_run_folder, run_config

    if is_run_folder(source):
        from agentevo.api.run import Run

        source = Run(run_config(source)).checkpoint
    from agentevo.models.merge import merge_adapter

    print(merge_adapter(source, out, base or None))


@app.command()
def report(run_dir: RunDir) -> None:
    """Write RUN_DIR/report.html and plots/ again, also of a run that is under way or was
    interrupted."""
    from agentevo.observability import report_from_run
    from agentevo.runs.folder import check_run_folder, token_texts

    print(report_from_run(check_run_folder(run_dir), token_texts(run_dir)))


app.command()(audit_commands.audit)
app.command()(audit_commands.replay)


@app.command()
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE|RUN_DIR]",
            help="What to try with one group of attempts. Without it, the installation.",
        ),
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Say in plain words whether a recipe (or the installation) is in order, and what to change if
    not."""
    checks = _check(target, overrides or []) if target else _check_installation()
    for check in checks:
        print(check)
    if any(check.status == "wrong" for check in checks):
        raise typer.Exit(1)


def _check(target: str, overrides: list[str]) -> list[Check]:
    from agentevo.config import load_config
    from agentevo.runs.folder import is_run_folder, run_config

    if is_run_folder(Path(target)):
        from agentevo.api.run import Run
        from agentevo.doctor.diagnostics import check_recipe

        config = run_config(Path(target), overrides)
        return check_recipe(config, Run(config).checkpoint_path("last"))
    _warn_of_kept_keys(target, overrides)
    config = load_config(target, overrides, needs_environment=False)
    if config.data.taught:
        from agentevo.doctor.sft_diagnostics import check_sft_recipe

        return check_sft_recipe(config)
    from agentevo.doctor.diagnostics import check_recipe

    return check_recipe(load_config(target, overrides))


def _check_installation() -> list[Check]:
    from agentevo.doctor.installation import check_installation

    return check_installation()


@app.command("list")
def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="environments, agents, rewards, algorithms, models, recipes, engines or stores.",
        ),
    ],
) -> None:
    """List what a recipe may name."""
    from agentevo.listings import LISTS
    from agentevo.registry import nearest

    if kind not in LISTS:
        guess = nearest(kind, list(LISTS))
        hint = f"did you mean {guess!r}? " if guess else ""
        raise UnknownNameError(f"nothing is listed under {kind!r}: {hint}known: {', '.join(LISTS)}")
    print_table(LISTS[kind]())


@models.command("list")
def list_models() -> None:
    """List the known models and whether they are on this machine."""
    from agentevo.listings import models as known

    print_table(known())


@models.command("get")
def get_model(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A known model, or a hub name org/name.")
    ],
) -> None:
    """Download a model, so that training starts at once and needs no network."""
    from agentevo.models.resolve import fetch

    print(fetch(name, progress=lambda line: print(line, file=sys.stderr)))


@config_commands.command("show")
def show_config(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print the whole resolved configuration as YAML."""
    from agentevo.config import load_config, to_yaml

    config = load_config(recipe, overrides or [])
    _warn_of_kept_keys(recipe, overrides or [])
    print(to_yaml(config), end="")


@config_commands.command("explain")
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="A dotted key, or a section. Without it, the sections."
        ),
    ] = "",
) -> None:
    """Say what a key means: type, range, default, unit. `algorithm.NAME` explains a preset,
    advantage, policy loss, KL or aggregation."""
    from agentevo.catalogue.describe import describe
    from agentevo.config.sweep import recipe_keys

    keys = recipe_keys()
    if not key:
        print_table((section.key, section.meaning) for section in keys.sections())
        return
    if (
        key not in keys.names()
        and key.startswith("algorithm.")
        and (found := describe(key.removeprefix("algorithm.")))
    ):
        print("\n\n".join(found))
        return
    print("\n\n".join(_explanation_text(one) for one in keys.explain(key)))


@trajectories.command("export")
def export(
    run_dir: RunDir,
    out: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl[.gz]", help="File to write, one trajectory a line.")
    ],
) -> None:
    """Write every trajectory of a run to a file, token ids and log-probs included."""
    from agentevo.runs.folder import read_store
    from agentevo.store import export_jsonl

    count = read_store(run_dir, lambda store: export_jsonl(store, out))
    print(f"{count} trajectories written to {out}")


@trajectories.command("show")
def show(
    run_dir: RunDir,
    trajectory_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="Id, or the beginning of it.")
    ] = "",
    best: Annotated[
        bool,
        typer.Option("--best", help="The one with the highest reward (of equals, the newest)."),
    ] = False,
    worst: Annotated[
        bool,
        typer.Option("--worst", help="The one with the lowest reward (of equals, the newest)."),
    ] = False,
    last: Annotated[
        bool,
        typer.Option("--last", help="The newest one (also what is shown when nothing is chosen)."),
    ] = False,
) -> None:
    """Print one trajectory turn by turn, each token with its log-prob."""
    if sum([bool(trajectory_id), best, worst, last]) > 1:
        raise ConfigError("trajectories show: give an ID or one of --best, --worst, --last")
    from rich.console import Console

    from agentevo.observability import render_trajectory
    from agentevo.runs.folder import read_store, token_texts

    async def work(store: Store) -> Trajectory:
        found = await store.summaries()
        return await store.trajectory(
            _choose(found, trajectory_id, "best" if best else "worst" if worst else "last", run_dir)
        )

    trajectory = read_store(run_dir, work)
    Console().print(
        render_trajectory(trajectory, token_texts(run_dir) or (lambda token: f"<{token}>"))
    )


def _choose(
    found: Sequence[TrajectorySummary], trajectory_id: str, which: str, run_dir: Path
) -> str:
    if trajectory_id:
        matches = [one.id for one in found if one.id == trajectory_id] or [
            one.id for one in found if one.id.startswith(trajectory_id)
        ]
        if len(matches) == 1:
            return matches[0]
        many = (
            f"{len(matches)} begin so, the first is {matches[0]}"
            if matches
            else f"`agentevo trajectories show {run_dir}` shows the newest"
        )
        raise UnknownNameError(f"{run_dir}: no trajectory is called {trajectory_id!r}: {many}")
    finished = [one for one in found if one.status == "completed"] or list(found)
    if not finished:
        raise ConfigError(f"{run_dir}: the store holds no trajectory yet")
    sign = {"best": 1.0, "worst": -1.0, "last": 0.0}[which]
    return max(enumerate(finished), key=lambda pair: (sign * pair[1].reward, pair[0]))[1].id


def _explanation_text(one: Explanation) -> str:
    heading = (
        f"{one.key} (with {one.key.split('.')[0]}.type={', '.join(one.option_of)})"
        if one.option_of
        else one.key
    )
    lines = [heading, f"  {one.meaning}"]
    if one.keys:
        names = [
            f"{key.key} ({', '.join(key.option_of)})" if key.option_of else key.key
            for key in one.keys
        ]
        return "\n".join(
            [
                *lines,
                "",
                *(
                    f"  {name}\n      {key.meaning}"
                    for name, key in zip(names, one.keys, strict=True)
                ),
            ]
        )
    return "\n".join(
        [
            *lines,
            f"  type     {one.type}",
            f"  default  {one.default or 'none: it must be given'}",
            f"  unit     {one.unit or 'none'}",
        ]
    )
