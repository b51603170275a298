"""A new run's folder is final once the run can begin; until then all is as it was."""

from __future__ import annotations

import os

import pytest

from agentevo.api.run import sft, train
from agentevo.errors import CheckpointError, ConfigError
from agentevo.runs.folder.chain import HeadFile, is_given_up, read_head
from agentevo.runs.folder.creation import new_folder, write_config
from agentevo.runs.folder.lock import only_trainer
from agentevo.runs.folder.run_folder import command_of


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_a_run_that_can_not_begin_leaves_the_one_that_it_was_to_replace(tmp_path, small_config):
    config = small_config(tmp_path / "run", "run.overwrite=true")
    write_config(config)
    (tmp_path / "run" / "summary.json").write_text("{}")
    before = contents(tmp_path / "run")

    with new_folder(config):  # and the function that it yields is not called
        (tmp_path / "run" / "half").write_text("written")

    assert contents(tmp_path / "run") == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with new_folder(config) as make_final:
        assert contents(tmp_path / "run") == {}
        make_final()

    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_can_not_begin_leaves_no_folder(tmp_path, small_config):
    with pytest.raises(ZeroDivisionError), new_folder(small_config(tmp_path / "run")):
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()


EARLY = ("trainer.lock", "metrics.jsonl", "store.sqlite", "store.sqlite-wal", ".config.yaml.tmp")


def early(folder):
    folder.mkdir()
    for name in EARLY:
        (folder / name).touch()


def test_a_run_begins_where_one_was_killed_before_its_config_was_written(tmp_path, small_config):
    early(tmp_path / "run")
    with new_folder(small_config(tmp_path / "run")) as make_final:
        assert contents(tmp_path / "run") == {}
        make_final()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_one_that_starts_just_now_is_left_alone(tmp_path, small_config):
    early(tmp_path / "run")
    with (
        only_trainer(tmp_path / "run"),
        pytest.raises(ConfigError, match="another process trains there"),
        new_folder(small_config(tmp_path / "run")),
    ):
        pass

    assert {path.name for path in (tmp_path / "run").iterdir()} == set(EARLY)


@pytest.mark.parametrize("name", ["thesis.tex", "metrics.jsonl", "trainer.lock"])
def test_a_folder_that_may_hold_more_is_refused(name, tmp_path, small_config):
    early(tmp_path / "run")
    path = tmp_path / "run" / name
    path.unlink() if name == "trainer.lock" else path.write_text("{}\n")

    with (
        pytest.raises(ConfigError, match="is not empty and is not a run"),
        new_folder(small_config(tmp_path / "run")),
    ):
        pass

    assert (tmp_path / "run" / "store.sqlite").is_file()


def test_a_pipe_in_the_place_of_head_json_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "head.json")
    with pytest.raises(CheckpointError, match=r"head\.json: is a device, pipe or socket"):
        read_head(tmp_path)


@pytest.mark.parametrize(
    "trained", ["metrics.jsonl", "checkpoints/step-000002/model.safetensors", None]
)
def test_a_run_that_has_trained_is_not_deleted_whatever_its_head_says(
    trained, tmp_path, small_config
):
    """head.json was edited, or is of another run: a new run takes the place of none but one that
    was given up before it trained."""
    config = small_config(tmp_path / "run")
    write_config(config)
    HeadFile(config.run_dir).give_up()
    (config.run_dir / "metrics.jsonl").write_text('{"step": 0, "val-core/agent/n": 1.0}\n')
    assert is_given_up(config.run_dir)

    if trained is None:
        return

    path = config.run_dir / trained
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"step": 0}\n{"step": 1, "training/global_step": 1.0}\n')
    assert not is_given_up(config.run_dir)

    with pytest.raises(ConfigError, match="holds a run already"), new_folder(config):
        pass

    assert path.is_file()


def test_config_yaml_names_the_command_whose_run_it_is(tmp_path, small_config):
    config = small_config(tmp_path / "run")
    write_config(config, "sft")
    assert command_of(tmp_path / "run") == "sft"


SFT = (
    "data.demonstrations=8",
    "sft.batch_conversations=4",
    "checkpoint.every=0",
    "evaluation.every=0",
)


@pytest.mark.slow
def test_sft_is_resumed_without_a_checkpoint(tmp_path, small_config, quiet_view):
    """Its steps are replayed from the first weights; also where nothing is held out."""
    config = small_config(tmp_path / "run", *SFT, "data.eval_share=0", "cold_start.episodes=0")
    with pytest.raises(KeyboardInterrupt):
        sft(config, view=quiet_view(step=1))

    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (checkpoint / "state.json").write_text("torn")

    with pytest.raises(ConfigError, match="run of `agentevo sft`"):
        train(config, resume=True, view=quiet_view())

    sft(config, resume=True, view=quiet_view())
    assert (tmp_path / "run" / "summary.json").is_file()
