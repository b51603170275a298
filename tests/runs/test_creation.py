"""A new run's folder is final once the run can begin; until then all is as it was."""

from __future__ import annotations

import pytest

from agentevo.api.run import sft, train
from agentevo.errors import ConfigError
from agentevo.runs.creation import command_of, new_folder, write_config


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
