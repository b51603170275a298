"""Several processes that mean the same run, and one that does not."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from agentevo.config import build_config, load_config, to_yaml
from agentevo.errors import ConfigError, StoreUnavailableError
from agentevo.runs.folder import identity as run_identity
from agentevo.runs.folder.creation import write_config
from agentevo.runs.folder.identity import SharedConfig, confirm_run, ensure_run_folder
from agentevo.store.opening import open_store
from agentevo.types import Task


@pytest.mark.slow
def test_the_first_process_makes_the_folder_and_the_others_find_it(small_config, tmp_path):
    folder = tmp_path / "run"
    config = small_config(folder)
    started = Barrier(8)

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
    with pytest.raises(
        ConfigError,
        match=r"run.seed=5 and not 6, trainer.group_size=4 and not 8: .*config\.yaml as the recipe",
    ):
        ensure_run_folder(small_config(tmp_path, "trainer.group_size=8", "run.seed=6"))

    assert (tmp_path / "config.yaml").read_text() == held


def test_a_run_that_was_moved_or_renamed_is_the_same(small_config, tmp_path):
    ensure_run_folder(small_config(tmp_path / "here", "run.name=one"))
    (tmp_path / "here").rename(tmp_path / "there")
    ensure_run_folder(small_config(tmp_path / "there", "run.name=two"))


def test_what_is_no_run_is_refused(small_config, tmp_path):
    (tmp_path / "thesis.tex").write_text("not a run")
    with pytest.raises(ConfigError, match="is not empty and is not a run"):
        ensure_run_folder(small_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(small_config, tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(ConfigError, match=r"run is a file: give another run\.dir"):
        ensure_run_folder(small_config(tmp_path / "run"))


def test_an_empty_store_outside_of_the_folder_is_this_run_s(small_config, tmp_path):
    config = small_config(tmp_path / "run", f"store.url=sqlite:///{tmp_path / 'shared.sqlite'}")
    assert ensure_run_folder(config)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("same", [True, False])
def test_what_a_quicker_process_has_put_into_the_store(same, small_config, tmp_path, monkeypatch):
    """Between the look for config.yaml and the one into the store another process has made both: of
    this run, or of one that lies here."""
    url = f"store.url=sqlite:///{tmp_path / 'shared.sqlite'}"
    config, quicker = (
        small_config(tmp_path / "run", url, *keys) for keys in ((), () if same else ("run.seed=6",))
    )

    async def content(store):
        write_config(quicker)
        return "3 tasks"

    monkeypatch.setattr(run_identity, "content_of", content)
    if same:
        assert ensure_run_folder(config)
    else:
        with pytest.raises(ConfigError, match=r"run\.seed=6 and not 5"):
            ensure_run_folder(config)


@pytest.fixture
def away(small_config, tmp_path, monkeypatch):
    """A run whose database does not answer."""
    pytest.importorskip("asyncpg")
    monkeypatch.setenv("PASSWORD_OF_RUNS", "hush")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield small_config(
            tmp_path / "run",
            f"store.url=postgresql://me:${{env:PASSWORD_OF_RUNS}}@127.0.0.1:{found.getsockname()[1]}/runs",
        )


def test_a_database_that_is_away_is_waited_for(away):
    told = []
    with pytest.raises(StoreUnavailableError, match="stopped trying after 1 s"):
        ensure_run_folder(away, within_s=1.0, note=told.append)
    assert len(told) == 1 and "waiting until" in told[0] and "hush" not in told[0]
    assert not away.run_dir.exists()


def test_who_waits_for_a_database_can_be_stopped(away):
    begun = time.monotonic()
    assert not ensure_run_folder(
        away, within_s=600.0, stop=lambda: time.monotonic() > begun + 0.3, note=lambda line: None
    )
    assert time.monotonic() < begun + 300.0
    assert not away.run_dir.exists()


class Answers:
    """As a method: the first call's answer, then what another method says."""

    def __init__(self, first, then):
        self.asked = 0
        self._first = first
        self._then = then

    def __get__(self, owner, _):
        async def read(*given):
            self.asked += 1
            return self._first if self.asked == 1 else await self._then(owner, *given)

        return read


@pytest.fixture
def machine(tmp_path):
    """`machine(NAME, *overrides)`: the recipe with a folder of that name."""

    def made(name, *overrides):
        return build_config(
            {"environment": {"type": "coins"}},
            [
                f"run.dir={tmp_path / name}",
                f"store.url=sqlite:///{tmp_path / 'store.sqlite'}",
                f"rollout.weights.url=file://{tmp_path / 'bucket'}",
                "rollout.staleness=1",
                *overrides,
            ],
        )

    return made


@pytest.mark.slow
def test_machines_without_a_shared_folder_meet_in_the_object_store(machine, tmp_path, monkeypatch):
    """The second one joins although the store is in use, also where that came to be while it
    looked, and one of another recipe does not."""

    async def fill():
        async with await open_store(machine("x").store_url) as store:
            await store.add_tasks([Task(id="1", query="q")])

    async def held_by_now(*given):
        return "1 task"

    with monkeypatch.context() as patched:  # between its two looks the first one comes
        patched.setattr(SharedConfig, "read", answers := Answers({}, SharedConfig.read))
        patched.setattr(run_identity, "_content_of", held_by_now)
        SharedConfig.of(machine("first")).write(to_yaml(machine("first")))
        assert ensure_run_folder(machine("slow")) and answers.asked == 2

    assert ensure_run_folder(machine("first"))

    asyncio.run(fill())
    assert ensure_run_folder(machine("second"))
    assert (tmp_path / "second" / "config.yaml").is_file()

    with pytest.raises(ConfigError, match=r"bucket is a run with run.seed=0 and not 1"):
        ensure_run_folder(machine("third", "run.seed=1"))
    assert not (tmp_path / "third").exists()

    (tmp_path / "bucket" / "config.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="is not a run's configuration"):
        ensure_run_folder(machine("fourth"))


MORE = "trainer.steps=7"


def confirmed(config, *, resume=True):
    """What a trainer does that has the lock; what it says."""
    said = []
    finish = asyncio.run(confirm_run(config, resume=resume, note=said.append))
    write_config(config)
    finish()
    return said


@pytest.mark.slow
def test_what_a_trainer_changes_holds_for_all(machine, tmp_path):
    """Other machines take it over, also one that has its folder, and refuse what was before."""
    confirmed(machine("trainer"), resume=not ensure_run_folder(machine("trainer")))
    assert ensure_run_folder(machine("sampler"))

    said = confirmed(machine("trainer", MORE))
    assert said == ["from now on with trainer.steps=7, which was 40"]
    for name in ("sampler", "fresh"):
        with pytest.raises(ConfigError, match=r"bucket is a run with trainer.steps=7 and not 40"):
            ensure_run_folder(machine(name))
        assert ensure_run_folder(machine(name, MORE))
        assert load_config(tmp_path / name / "config.yaml").trainer.steps == 7

    with pytest.raises(ConfigError, match=r"trainer is a run with .* `agentevo learn RECIPE --re"):
        confirmed(machine("trainer"), resume=False)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["rollout.weights.url=file://{}/b", "run.seed=9"])
def test_a_folder_of_another_run_is_not_taken_over(changed, machine, tmp_path):
    other = changed.format(tmp_path), f"store.url=sqlite:///{tmp_path / 'other.sqlite'}"
    assert ensure_run_folder(machine("one"))
    before = (tmp_path / "one" / "config.yaml").read_text()
    SharedConfig.of(machine("one", *other)).write(to_yaml(machine("one", *other)))
    with pytest.raises(ConfigError, match=r"one (is a run|was started) with "):
        ensure_run_folder(machine("one", *other))
    assert (tmp_path / "one" / "config.yaml").read_text() == before


@pytest.mark.slow
def test_a_kill_between_folder_and_object_store_is_mended_by_the_next_start(machine, tmp_path):
    ensure_run_folder(machine("trainer"))
    write_config(machine("trainer", MORE))  # and there it was killed
    confirmed(machine("trainer", MORE), resume=False)
    assert load_config(tmp_path / "bucket" / "config.yaml").trainer.steps == 7


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "1234"])
def test_weights_of_another_run_are_left_alone(own, machine, tmp_path):
    """Their recipe too, though a resume might change what differs."""
    confirmed(machine("trainer"), resume=not ensure_run_folder(machine("trainer")))
    before = (tmp_path / "bucket" / "config.yaml").read_bytes()
    (tmp_path / "bucket" / "writer.json").write_text("5678")
    write_config(machine("other"))

    if own is not None:
        (tmp_path / "other" / "weights").mkdir()
        (tmp_path / "other" / "weights" / "writer").write_text(own)

    for resume, more in ((True, (MORE,)), (False, ())):
        with pytest.raises(ConfigError, match="bucket has the weights of another run"):
            confirmed(machine("other", *more), resume=resume)
    assert (tmp_path / "bucket" / "config.yaml").read_bytes() == before

    (tmp_path / "bucket" / "writer.json").write_text("12")  # an upload of our own that broke off
    if own is not None:
        assert confirmed(machine("other", MORE))


@pytest.mark.slow
def test_a_recipe_can_be_changed_where_head_json_was_deleted(machine, tmp_path):
    """As its own errors advise."""
    ensure_run_folder(machine("trainer"))
    (tmp_path / "trainer" / "metrics.jsonl").touch()
    assert confirmed(machine("trainer", MORE))


def test_a_sampler_alone_is_told_what_to_do_with_its_folder(small_config, tmp_path):
    """Without an object store nobody knows of the trainer's change."""
    ensure_run_folder(small_config(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"or delete this folder if the trainer has changed"):
        ensure_run_folder(small_config(tmp_path / "run", MORE))
    with pytest.raises(ConfigError) as refused:
        ensure_run_folder(small_config(tmp_path / "run", "run.seed=9"))
    assert "--resume" not in str(refused.value)


@pytest.mark.slow
def test_a_trainer_that_was_killed_before_it_began_is_resumed_as_it_was(machine):
    """A launch gives --resume to every start but the first."""
    ensure_run_folder(machine("trainer"))
    assert confirmed(machine("trainer")) == []


@pytest.mark.slow
def test_no_resume_where_it_could_not_be_told_or_would_be_another_run(machine, tmp_path):
    ensure_run_folder(machine("sampler"))
    with pytest.raises(ConfigError, match="this run's trainer never used this folder"):
        confirmed(machine("sampler", MORE))

    write_config(machine("trainer"))
    for change in (
        "rollout.weights.url=null",
        f"rollout.weights.url=file://{tmp_path / 'other'}",
        "trainer.group_size=2",
        "sampling.temperature=0.5",
    ):
        for in_turn in ((), ("rollout.staleness=0",)):
            write_config(machine("trainer", *in_turn))
            with pytest.raises(ConfigError, match=f"was started with {change.partition('=')[0]}="):
                confirmed(machine("trainer", *in_turn, change))

    write_config(machine("trainer"))
    other = machine("trainer", "run.seed=9")
    SharedConfig.of(other).write(to_yaml(other))

    with pytest.raises(ConfigError, match=r"bucket is a run with run.seed=9 and not 0"):
        confirmed(machine("trainer"), resume=False)

    assert load_config(tmp_path / "bucket" / "config.yaml").run.seed == 9
