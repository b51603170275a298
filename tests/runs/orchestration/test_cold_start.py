"""The cold start: the solver's episodes become samples, and the policy learns to say what the
solver said."""

from __future__ import annotations

import asyncio

import pytest
from seeing_chats import seeing_chat

from agentevo.api.run import train
from agentevo.config import ColdStartSection, build_config
from agentevo.errors import ConfigError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.files.save import save_model
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.observability import read_metrics
from agentevo.rollout.tasks import environment_seed
from agentevo.runs.orchestration.cold_start import solver_samples
from agentevo.runs.orchestration.components import open_components
from agentevo.runs.orchestration.players import make_environment
from agentevo.training.supervised import train_supervised


def demonstrations(parts, view):
    section = parts.config.cold_start
    return solver_samples(
        parts.config, parts.chat, section.episodes, section.random_action_rate, view
    ).samples


def with_parts(config, tmp_path, work):
    async def open_run_store():
        async with open_components(
            config, store_url=f"sqlite:///{tmp_path / 'store.sqlite'}"
        ) as parts:
            return work(parts)

    return asyncio.run(open_run_store())


@pytest.mark.parametrize("memory", ["episode", "turn"])
def test_demonstrations_train_what_the_solver_says(memory, small_config, quiet_view, tmp_path):
    config = small_config(tmp_path / "run", "cold_start.episodes=6", f"agent.memory={memory}")

    def work(parts):
        samples = demonstrations(parts, quiet_view())
        said = []
        for sample in samples:
            tokens = [
                token
                for token, trained in zip(sample.ids, sample.loss_mask, strict=True)
                if trained
            ]
            said.append(parts.tokenizer.decode(tokens).split("<|end|>")[:-1])

        return samples, said

    samples, said = with_parts(config, tmp_path, work)
    assert {answer for answers in said for answer in answers} <= {"Up", "Down", "Left", "Right"}

    names = [sample.trajectory_id for sample in samples]
    assert list(dict.fromkeys(names)) == [f"demonstration-{n}" for n in range(6)]
    if memory == "turn":
        assert all(len(answers) == 1 for answers in said)
        assert len(samples) > 6
    else:
        assert len(samples) == 6

    # on ice that does not slip the solver's actions lead to the goal when they are played again
    environment = make_environment(config)
    for index in range(6):
        environment.reset(seed=environment_seed(5, "demonstration", 64 + index))
        actions = [
            answer
            for name, answers in zip(names, said, strict=True)
            if name == f"demonstration-{index}"
            for answer in answers
        ]
        assert [environment.step(action)[4]["success"] for action in actions][-1]


def test_demonstrations_in_pictures_have_their_images(small_config, quiet_view, tmp_path):
    config = small_config(tmp_path / "run", "environment.observation=image")
    samples, images = solver_samples(config, seeing_chat(), 2, 0.0, quiet_view())
    spans = [span for sample in samples for span in sample.images]
    assert {span.digest for span in spans} <= {*images}
    assert len(samples) == 2 and all(sample.images and sample.processor for sample in samples)

    class Recorder:
        """A trainer that must have been shown exactly the images of its samples."""

        def show(self, files):
            self.shown = {*files}

        def step(self, samples):
            assert self.shown == {span.digest for sample in samples for span in sample.images}
            return {"sft/loss": 1.0}

    losses = train_supervised(
        samples,
        ColdStartSection(epochs=2, batch_episodes=1),
        config.trainer,
        make=lambda settings, steps: Recorder(),
        seed=0,
        progress=lambda *_: None,
        images=images,
    )
    assert losses == [1.0] * 4

    blind = ChatFormat(byte_tokenizer(1024))
    with pytest.raises(ConfigError, match=r"reads text alone: .*environment.observation=text"):
        solver_samples(config, blind, 2, 0.0, quiet_view())


def test_an_environment_without_a_solver_is_refused(quiet_view, tmp_path):
    config = build_config(
        {
            "environment": {"type": "gymnasium", "id": "CartPole-v1"},
            "model": {"name": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
            "cold_start": {"episodes": 2},
        },
        [f"run.dir={tmp_path / 'run'}"],
    )
    with pytest.raises(ConfigError, match=r"no solver to learn from: set cold_start\.episodes=0"):
        with_parts(config, tmp_path, lambda parts: demonstrations(parts, quiet_view()))


@pytest.mark.slow
def test_a_cold_start_learns_what_it_is_shown(small_config, quiet_view, tmp_path):
    config = small_config(
        tmp_path / "run",
        "trainer.steps=0",
        "cold_start.episodes=80",
        "cold_start.epochs=3",
        "agent.memory=turn",
    )
    done = train(config, view=quiet_view())
    row = next(
        row for row in read_metrics(done.dir / "metrics.jsonl") if "cold_start/loss_first" in row
    )
    assert row["cold_start/loss_last"] < 0.3 * row["cold_start/loss_first"]
    assert done.summary["eval"]["cold_start_before"] is None, "random weights have nothing to show"
    assert done.summary["tokens"]["trained"] == row["cold_start/tokens"]


@pytest.mark.slow
def test_a_model_that_can_already_speak_is_measured_before_its_cold_start_too(
    small_config, quiet_view, tmp_path, outcome_of, assert_same
):
    """Two evaluations of different weights before the first step; a resumed run keeps both."""

    def save(parts):
        return save_model(parts.model, parts.tokenizer, tmp_path / "model")

    with_parts(small_config(tmp_path / "none"), tmp_path, save)
    tree = small_config(tmp_path / "run").model_dump(mode="json")
    tree["model"] = {"name": str(tmp_path / "model")}
    tree["cold_start"]["episodes"] = 8
    config = build_config(tree, ["trainer.steps=2", "checkpoint.every=1"])
    whole = train(config, view=quiet_view())
    assert whole.summary["eval"]["cold_start_before"] is not None

    before = outcome_of(config.run_dir)
    again = build_config(
        tree, ["trainer.steps=2", "checkpoint.every=1", f"run.dir={tmp_path / 'again'}"]
    )
    with pytest.raises(KeyboardInterrupt):
        train(again, view=quiet_view(step=1))

    train(again, resume=True, view=quiet_view())
    assert_same(outcome_of(again.run_dir), before)
