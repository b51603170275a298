"""`agentevo learn`: the trainer alone. Samplers and engines of the same recipe are other processes,
which may start and end at any time."""

from __future__ import annotations

from functools import partial

from agentevo.config import RunConfig
from agentevo.config.named_agents import check_one_policy
from agentevo.config.parallel import follows, world_size
from agentevo.errors import ConfigError
from agentevo.inference.serving.secret import RunSecret
from agentevo.observability import LiveView
from agentevo.observability.tracing import check_tracing
from agentevo.rollout.given_tasks import GivenTasks
from agentevo.runs.folder.identity import confirm_run, ensure_run_folder
from agentevo.runs.folder.resume_rules import check_resume
from agentevo.runs.orchestration.checks import (
    check_parts,
    check_unloaded,
    load_checked,
    needs_no_whole_model,
    startup_notes,
)
from agentevo.runs.orchestration.ranks import follow
from agentevo.runs.orchestration.refusals import Refusals
from agentevo.runs.orchestration.run import run_training
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.paths import check_new_folder


def check_learn(config: RunConfig, *, may_fetch: bool = True) -> GivenTasks | None:
    """Does the checks of `learn` on a recipe before it loads the model and looks at its folder.
    Returns and downloads the same as `check_parts`. Raises ConfigError."""
    if config.run.overwrite:
        raise ConfigError(
            "run.overwrite deletes the run's folder, which its other processes use: leave it "
            "out, or delete the folder first"
        )

    if config.data.given:
        raise ConfigError(
            "data provides the training data, so no samplers are needed: use agentevo train"
        )

    secret = RunSecret(config.run_dir / "engines", config.rollout.engine_secret)
    refusals = Refusals()
    refusals.collect(secret.check)
    refusals.collect(check_one_policy, config)
    refusals.collect(check_tracing, config)
    given_tasks = refusals.collect(
        check_parts, config, None, resume=False, is_disaggregated=True, may_fetch=may_fetch
    )
    refusals.raise_all()
    return given_tasks


def check_dry_learn(config: RunConfig) -> list[str]:
    """As `orchestration.checks.check_dry`, of `learn`."""
    refusals = Refusals()
    given_tasks = refusals.collect(check_learn, config, may_fetch=False)
    refusals.collect(check_new_folder, config.run_dir, "run.dir")
    refusals.collect(check_unloaded, config)
    refusals.raise_all()
    return startup_notes(config, given_tasks)


def learn(config: RunConfig, *, resume: bool = False, view: LiveView | None = None) -> None:
    """Trains from the run's current step to its last one; blocks. The first process of the run
    makes its folder.

    `resume`: continues with a configuration that differs from the run's in keys that a resume may
    change, and makes it the run's. A model that can't be loaded leaves no folder behind. Raises
    ConfigError if the folder holds another configuration, or another process trains there.
    """
    check_learn(config)
    if follows():
        follow(config)
        return

    view = view if view is not None else LiveView(config.run.name)
    if config.rollout.weights.url is not None and config.rollout.engine_secret is None:
        view.note(
            "rollout.weights.url is set and rollout.engine_secret is not: engines and samplers can "
            "use this folder only; with folders of their own they need "
            "rollout.engine_secret='${env:NAME}'"
        )

    loaded = None
    if resume:
        check_resume(config, started_separately=True)
    else:
        new = not (config.run_dir / "config.yaml").is_file()
        for_part = world_size() > 1 and needs_no_whole_model(config, is_disaggregated=True)
        loaded = load_checked(config, for_part=for_part) if new else None
        ensure_run_folder(config)

    confirm = partial(confirm_run, config, resume=resume, note=view.note)
    run_coroutine(
        run_training(config, view, command="learn", resume=True, loaded=loaded, confirm=confirm)
    )
