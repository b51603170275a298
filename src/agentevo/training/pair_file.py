"""Answers read from JSONL, one object a line, in TRL's conversational form:

    {"prompt": [messages], "chosen": answer, "rejected": answer}
    {"prompt": [messages], "completion": answer, "label": true}

A message is {"role": "user", "content": "..."}, an answer a text or a list of messages that begins
and ends with the assistant's. Only the assistant's messages in the answer are trained. Other keys
of a line are ignored. Every error names file and line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentevo.algorithms.preference import SINGLE_ANSWER_LOSSES
from agentevo.data.conversation import check_no_media, check_text
from agentevo.data.message_images import ImageCollector, place_images
from agentevo.data.messages import MESSAGE_KEYS, is_trained, messages_of
from agentevo.data.row_report import RowError
from agentevo.data.rows import read_json_lines
from agentevo.data.spooled_images import SpooledImages
from agentevo.errors import BadRequestError, ConfigError, ImageError, ModelError, shown
from agentevo.models.chat.chat_format import LONG_TEXT, NO_IMAGES, ChatFormat, num_characters
from agentevo.runtime.parsing import check_file
from agentevo.training.assistant_tokens import CHARACTERS_PER_TOKEN
from agentevo.training.pairs import CandidateAnswer, Pair
from agentevo.training.supervised import conversation_sample
from agentevo.types import Message, Sample
from agentevo.types.images import ImageFile

_ANSWERS = ("chosen", "rejected", "completion")
"""The keys of a line that have an answer."""


@dataclass(frozen=True)
class PairLine:
    """One line as messages. A single answer is chosen where its label is true, else rejected."""

    where: str
    """FILE:LINE"""
    prompt: list[Message]
    chosen: list[Message] | None
    rejected: list[Message] | None
    images: Mapping[str, ImageFile] = field(default_factory=dict)
    """The images of the file, by digest."""
    margin: float | None = None
    """How much better the chosen answer is, where the line states it and the loss uses it."""


def read_pair_file(path: Path, loss: str, key: str = "data.pairs") -> list[PairLine]:
    """Every line, checked for the preference loss `loss`, or for `bradley_terry`. `key` names the
    file in the recipe. Raises ConfigError."""
    try:
        check_file(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}: give a JSONL file") from error

    images = ImageCollector(folder=path.parent, files=SpooledImages())
    pair_lines = [_line(row.value, row.where, loss, images) for row in read_json_lines(path)]
    if not pair_lines:
        raise ConfigError(
            f"{key}: {path} has no lines: give one JSON object with prompt, chosen and "
            "rejected a line"
        )

    if loss == "rft" and all(line.chosen is None for line in pair_lines):
        raise ConfigError(
            f"{key}: {path} has no answer with label true, and rft learns only from those: add some"
        )

    return pair_lines


def _line(record: Any, where: str, loss: str, images: ImageCollector) -> PairLine:
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where}: is not a JSON object: write {{'prompt': [messages], 'chosen': ..., "
            "'rejected': ...}}"
        )

    try:
        check_text(record)
        check_no_media(record, may_have_images=loss != "bradley_terry")  # a classifier reads text
        if "prompt" in record:
            record = {**record, "prompt": place_images(record["prompt"], dict(record), images)}
        for key in _ANSWERS:  # the columns of images are the prompt's
            if key in record:
                record = {**record, key: place_images(record[key], {}, images)}
    except RowError as error:
        raise ConfigError(f"{where}: {error}") from error

    prompt = _messages(record, "prompt", where)
    if not prompt or prompt[-1].role == "assistant":
        raise ConfigError(
            f"{where}: prompt must end with a message that the assistant answers: move its last "
            f"message into the answers"
        )

    if "completion" in record:
        if loss not in SINGLE_ANSWER_LOSSES:
            raise ConfigError(
                f"{where}: a single completion, but {loss} compares two answers: give chosen and "
                "rejected, or train by kto"
            )

        if not isinstance(record.get("label"), bool):
            raise ConfigError(
                f"{where}: label is {record.get('label', 'missing')!r}: give true (desirable) or "
                "false"
            )

        answer = _answer(record, "completion", where)
        return PairLine(
            where,
            prompt,
            answer if record["label"] else None,
            None if record["label"] else answer,
            images.files,
        )

    chosen = _answer(record, "chosen", where)
    rejected = _answer(record, "rejected", where)
    if chosen == rejected:
        raise ConfigError(
            f"{where}: chosen and rejected are the same answer, so there is nothing to learn: "
            f"remove the line"
        )

    margin = _margin(record, where) if loss == "bradley_terry" else None
    return PairLine(where, prompt, chosen, rejected, images.files, margin)


def _margin(record: dict[str, Any], where: str) -> float | None:
    margin = record.get("margin")
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if margin is None or (is_number and 0 <= margin < math.inf):
        return None if margin is None else float(margin)
    raise ConfigError(
        f"{where}: margin is {shown(margin)}: give a number of at least 0, or leave it out"
    )


def _answer(record: dict[str, Any], key: str, where: str) -> list[Message]:
    if isinstance(record.get(key), str):
        return [Message("assistant", record[key])]

    messages = _messages(record, key, where)
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        raise ConfigError(
            f"{where}: {key} must begin and end with a message of role assistant: give a text, "
            "or such messages"
        )

    for number, message in enumerate(record[key], start=1):
        try:
            trained = is_trained(message, f"message {number}")
        except BadRequestError as error:
            raise ConfigError(f"{where}: {key}: {error}") from error
        if trained is False and message["role"] == "assistant":
            raise ConfigError(
                f"{where}: {key}: message {number} is marked as one that is not trained, and an "
                "answer is compared as a whole: put it into the prompt, or remove the mark"
            )

    return messages


def _messages(record: dict[str, Any], key: str, where: str) -> list[Message]:
    if key not in record:
        raise ConfigError(
            f"{where}: {key} is missing: a line has prompt, chosen and rejected, or prompt, "
            "completion and label"
        )

    if not isinstance(record[key], list):
        form = '[{"role": "user", "content": "..."}]'
        raise ConfigError(
            f"{where}: {key} is not a list of messages: give "
            f"{form}{'' if key == 'prompt' else ' or a text'}"
        )

    raw_messages = [
        {k: v for k, v in message.items() if k in MESSAGE_KEYS}
        if isinstance(message, dict)
        else message
        for message in record[key]
    ]
    try:
        return messages_of(raw_messages)
    except BadRequestError as error:
        raise ConfigError(f"{where}: {key}: {error}") from error


def pairs_of_lines(
    lines: Sequence[PairLine], chat: ChatFormat, loss: str, max_tokens: int
) -> list[list[Pair]]:
    """The pairs of each line; with a loss of single answers both answers of a line are separate,
    and with rft only the chosen one counts.

    Raises ConfigError for a text that the tokenizer or the chat template can't encode, or that has
    more than `max_tokens` tokens.
    """

    def encode(line: PairLine, answer: Sequence[Message], which: str) -> CandidateAnswer:
        name = f"{line.where} {which}"
        characters = num_characters([*line.prompt, *answer])
        size = f"{characters} characters, far more than {max_tokens} tokens"
        if characters <= CHARACTERS_PER_TOKEN * max(max_tokens, LONG_TEXT):
            sample = answer_sample(line.prompt, answer, chat, line.where, name, line.images)
            size = f"{len(sample.ids)} tokens"
            if len(sample.ids) <= max_tokens:
                return CandidateAnswer(name, (sample,))

        raise ConfigError(
            f"{line.where}: prompt and {which} have {size}, and the limit is {max_tokens} "
            "(data.max_tokens, within the model's context): shorten them, or remove the line"
        )

    groups: list[list[Pair]] = []
    for line in lines:
        try:
            chosen = None if line.chosen is None else encode(line, line.chosen, "chosen")
            rejected = (
                None
                if line.rejected is None or loss == "rft"
                else encode(line, line.rejected, "rejected")
            )
        except (ModelError, ImageError) as error:
            raise ConfigError(f"{line.where}: {error}") from error

        if loss in SINGLE_ANSWER_LOSSES:
            singles = [Pair(line.where, chosen=chosen)] if chosen is not None else []
            groups.append(
                singles + ([Pair(line.where, rejected=rejected)] if rejected is not None else [])
            )
        else:
            groups.append([Pair(line.where, chosen, rejected)])

    return [pairs for pairs in groups if pairs]


def answer_sample(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    chat: ChatFormat,
    group_id: str,
    name: str,
    images: Mapping[str, ImageFile] = NO_IMAGES,
) -> Sample:
    """A sample that trains the assistant's messages in the answer, but not those in the prompt.
    `images`: those of the messages, by digest."""
    sample = conversation_sample([*prompt, *answer], chat, name, images)
    said_before = max(
        (place for place, message in enumerate(prompt) if message.role == "assistant"), default=-1
    )
    num_context_ids = (
        len(conversation_sample(prompt[: said_before + 1], chat, name, images).ids)
        if said_before >= 0
        else 0
    )
    mask = sample.loss_mask & (np.arange(len(sample.ids)) >= num_context_ids)
    return Sample.given(
        name, group_id, sample.ids, mask, images=sample.images, processor=sample.processor
    )
