"""Several processes that mean the same run, and one that does not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from agentevo.config import load_config
from agentevo.errors import ConfigError
from agentevo.orchestration.run_identity import ensure_run_folder


def test_the_first_process_makes_the_folder_and_the_others_find_it(small_config, tmp_path):
    folder = tmp_path / "run"
    config, started = small_config(folder), Barrier(8)

    def start(_: int) -> None:
        started.wait()
        ensure_run_folder(config)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(start, range(8)))
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    again = load_config(folder / "config.yaml")
    assert again == config
    written = (folder / "config.yaml").stat()
    ensure_run_folder(again)
    assert (folder / "config.yaml").stat() == written


def test_another_run_is_refused_and_its_keys_are_named(small_config, tmp_path):
    ensure_run_folder(small_config(tmp_path))
    held = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"run.seed=5 and not 6, trainer.group_size=4 and not 8: .*config\.yaml as the recipe"):
        ensure_run_folder(small_config(tmp_path, "trainer.group_size=8", "run.seed=6"))
    assert (tmp_path / "config.yaml").read_text() == held


def test_a_run_that_was_moved_or_renamed_is_the_same(small_config, tmp_path):
    ensure_run_folder(small_config(tmp_path / "here", "run.name=one"))
    (tmp_path / "here").rename(tmp_path / "there")
    ensure_run_folder(small_config(tmp_path / "there", "run.name=two"))


def test_what_is_no_run_is_refused(small_config, tmp_path):
    (tmp_path / "thesis.tex").write_text("not a run")
    with pytest.raises(ConfigError, match="is not empty and not a run"):
        ensure_run_folder(small_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(small_config, tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(ConfigError, match=r"run is a file: give another run\.dir"):
        ensure_run_folder(small_config(tmp_path / "run"))
