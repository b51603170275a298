"""A run whose store lies outside of its folder, and the run that replaces it."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import unused_name

from agentevo.api.run import Run, train
from agentevo.errors import ConfigError
from agentevo.runs.folder.run_folder import use_store
from agentevo.runs.processes.learn import learn
from agentevo.runs.processes.sample import sample
from agentevo.runs.processes.serve import serve

QUICK = (
    "trainer.steps=1",
    "cold_start.episodes=0",
    "trainer.groups_per_step=2",
    "trainer.group_size=2",
    "evaluation.samples=0",
    "evaluation.tasks=1",
    "evaluation.every=0",
)


def counts(url: str) -> dict[str, int]:
    return use_store(url, lambda store: store.counts())


def train_twice(small_config, quiet_view, folder: Path, url: str) -> None:
    """The same run again: refused without overwrite, by itself with it."""
    store = f"store.url={url}"
    first = train(small_config(folder, *QUICK, store), view=quiet_view())
    before = counts(url)
    assert before["steps"] == 1

    with pytest.raises(ConfigError, match="holds a run already"):
        train(small_config(folder, *QUICK, store), view=quiet_view())
    assert counts(url) == before

    again = train(
        small_config(folder, *QUICK, store, "run.seed=6", "run.overwrite=true"), view=quiet_view()
    )
    assert counts(url)["steps"] == 1
    assert (
        counts(url)["trajectories/train/dropped"] + counts(url)["trajectories/train/committed"] == 4
    )
    assert [t.id for t in again.trajectories(split="train")] == [
        t.id for t in Run(first.config).trajectories(split="train")
    ]


@pytest.mark.slow
def test_overwriting_a_run_empties_its_store(tmp_path, small_config, quiet_view):
    train_twice(
        small_config, quiet_view, tmp_path / "run", f"sqlite:///{tmp_path / 'shared.sqlite'}"
    )


@pytest.mark.slow
def test_overwriting_a_run_empties_its_schema(tmp_path, small_config, quiet_view, postgresql):
    train_twice(small_config, quiet_view, tmp_path / "run", postgresql.url(unused_name()))


@pytest.mark.slow
def test_another_run_s_store_is_refused_and_left_alone_whatever_is_overwritten(
    tmp_path, small_config, quiet_view
):
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    train(small_config(tmp_path / "one", *QUICK, f"store.url={url}"), view=quiet_view())
    before = counts(url)

    with pytest.raises(
        ConfigError,
        match=r"store\.url: the store holds .* 1 steps of another run: give another file",
    ):
        train(small_config(tmp_path / "two", *QUICK, f"store.url={url}"), view=quiet_view())

    assert not (tmp_path / "two").exists()

    train(small_config(tmp_path / "two", *QUICK), view=quiet_view())
    with pytest.raises(ConfigError, match="of another run"):
        train(
            small_config(tmp_path / "two", *QUICK, f"store.url={url}", "run.overwrite=true"),
            view=quiet_view(),
        )

    assert (tmp_path / "two" / "config.yaml").is_file()
    assert counts(url) == before


@pytest.mark.slow
def test_the_store_of_another_run_is_refused_by_every_part_of_a_run(
    tmp_path, small_config, quiet_view
):
    """`agentevo learn` would do the other run's steps again, `sample` give it tasks."""
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    train(small_config(tmp_path / "one", *QUICK, f"store.url={url}"), view=quiet_view())
    before = counts(url)

    other = small_config(tmp_path / "two", *QUICK, f"store.url={url}")
    for start in (
        lambda: learn(other, view=quiet_view()),
        lambda: sample(other),
        lambda: serve(other),
    ):
        with pytest.raises(
            ConfigError,
            match=r"store\.url: the store holds .* 1 steps of another run: give .* "
            r"that run's own run\.dir",
        ):
            start()

    assert not (tmp_path / "two").exists()
    assert counts(url) == before
