"""`agentevo sft --reward-model`: a reward model from a file of pairs, in a run's folder of its own.

    RUN/config.yaml   metrics.jsonl   reward_model.json   model/   tensorboard/

A run that is stopped or fails leaves nothing; it is not resumed. Nothing of it is sampled, so it
has no store.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
from transformers import PreTrainedModel

from agentevo.config import RunConfig
from agentevo.config.parallel import check_alone
from agentevo.config.sft import check_rm
from agentevo.errors import ConfigError
from agentevo.models.files.load import check_overrides, load_model
from agentevo.models.files.resolve import TINY, saved_folder
from agentevo.models.files.save import save_model
from agentevo.observability.metrics import MetricsLog
from agentevo.observability.trackers import Tracking
from agentevo.rewards.reward import text_of
from agentevo.rewards.reward_model import longest_conversation
from agentevo.runs.folder.creation import check_folder, new_folder, write_config
from agentevo.runs.folder.lock import only_trainer
from agentevo.runs.orchestration.tracking import check_tracking, track
from agentevo.runtime.console import to_stderr
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.seeds import derive_seed
from agentevo.runtime.signals import end_stopped, stop_on_interrupt
from agentevo.training.pair_file import PairLine, read_pair_file
from agentevo.training.reward_model import (
    RewardPair,
    classifier_of,
    encode_pairs,
    held_out,
    keep_scale,
    train_reward_model,
)

LOSS = "bradley_terry"
RESULT = "reward_model.json"
NOTE_EVERY = 10
"""Optimizer steps between two lines of output."""


def split_pairs(config: RunConfig) -> tuple[list[PairLine], list[PairLine]]:
    """Pairs to train on, and held-out ones. Raises ConfigError."""
    lines = read_pair_file(check_rm(config), LOSS, key="rm.pairs")
    if config.rm.eval is not None:
        return lines, read_pair_file(config.rm.eval, LOSS, key="rm.eval")

    random.Random(derive_seed(config.run.seed, "rm-split")).shuffle(lines)
    count = round(config.rm.eval_share * len(lines))
    if not count or count == len(lines):
        raise ConfigError(
            f"rm.eval_share={config.rm.eval_share:g} of {len(lines)} pairs holds out {count}: at "
            f"least one must be held out and one trained on: give more pairs, or rm.eval"
        )

    return lines[count:], lines[:count]


def check_parts(config: RunConfig) -> tuple[list[PairLine], list[PairLine]]:
    """Refuses what `train` refuses before it loads the model; returns `split_pairs`. Downloads and
    writes nothing. Raises ConfigError and ModelError."""
    check_alone("the training of a reward model (agentevo sft --reward-model)")
    check_tracking(config)
    lines = split_pairs(config)
    check_folder(config)
    if config.model.name != TINY:
        check_overrides(config.model, saved_folder(config.model.name))
    return lines


def train(config: RunConfig, note: Callable[[str], None] = to_stderr) -> dict[str, float]:
    """Trains the model, evaluates it on the held-out pairs before and after, and saves it as
    RUN/model. Returns the contents of reward_model.json. Raises ConfigError before anything is
    created."""
    train_lines, eval_lines = check_parts(config)
    loaded = load_model(
        config.model,
        corpus=lambda: _texts([*train_lines, *eval_lines]),
        seed=derive_seed(config.run.seed, "model"),
    )
    tokenizer = loaded.tokenizer
    seed = derive_seed(config.run.seed, "rm")
    model = classifier_of(loaded.model, tokenizer, seed)
    del loaded
    longest = longest_conversation(model, tokenizer, config.rm.max_tokens)
    pairs, held_out_pairs = (
        encode_pairs(lines, tokenizer, config.rm.margin, longest)
        for lines in (train_lines, eval_lines)
    )
    with (
        stop_on_interrupt(note) as received,
        new_folder(config) as make_final,
        only_trainer(config.run_dir),
    ):
        write_config(config, "rm")
        with track(config, "rm", note, lambda: bool(received)) as tracking:
            result = _train(
                config, model, pairs, held_out_pairs, seed, lambda: bool(received), note, tracking
            )

        if result is not None:
            save_model(model, tokenizer, config.run_dir / "model")
            with must_write(config.run_dir / RESULT):
                write_atomic(config.run_dir / RESULT, msgspec.json.encode(result))
            make_final()

    end_stopped(received)
    assert result is not None
    return result


def _train(
    config: RunConfig,
    model: PreTrainedModel,
    pairs: Sequence[RewardPair],
    held_out_pairs: Sequence[RewardPair],
    seed: int,
    stop: Callable[[], bool],
    note: Callable[[str], None],
    tracking: Tracking,
) -> dict[str, float] | None:
    """The results; None if the training was stopped."""
    size = config.rm.micro_batch_pairs
    before = held_out(model, held_out_pairs, size)
    note(
        f"held-out accuracy before: {before['rm/eval/accuracy']:.1%} of {len(held_out_pairs)} pairs"
    )

    with MetricsLog(config.run_dir / "metrics.jsonl") as log:
        log.tracking = tracking
        log.log(0, before)
        last = 0

        def progress(step: int, total: int, metrics: dict[str, float]) -> None:
            nonlocal last
            last = step
            log.log(step, metrics)
            log.deliver_to_trackers(step - 1)

            if step % NOTE_EVERY == 0 or step == total:
                note(
                    f"{step}/{total}: loss {metrics['rm/loss']:.4f}, accuracy "
                    f"{metrics['rm/accuracy']:.1%}"
                )

        if not train_reward_model(
            model, pairs, config.rm, memory=config.memory, seed=seed, progress=progress, stop=stop
        ):
            return None

        after = held_out(model, held_out_pairs, size)
        log.log(last, after)
        log.deliver_to_trackers(last)

    keep_scale(model, after)
    note(f"held-out accuracy after: {after['rm/eval/accuracy']:.1%}")
    counts = {"pairs": float(len(pairs)), "held_out_pairs": float(len(held_out_pairs))}
    return after | {"rm/eval/accuracy_before": before["rm/eval/accuracy"]} | counts


def _texts(lines: Sequence[PairLine]) -> list[str]:
    """Texts with every word, for a tokenizer made of words."""
    return [
        text_of(message.content)
        for line in lines
        for message in [*line.prompt, *(line.chosen or ()), *(line.rejected or ())]
    ]
