"""The reward `reward_model`: a sequence classifier scores the whole conversation.

It is the reward model of RLHF (arXiv 2203.02155). `agentevo sft --reward-model` trains a reward
model, and any folder or hub name that AutoModelForSequenceClassification of transformers loads
works too. The model reads text, so its tokenizer can differ from the policy's. torch is imported
when the first attempt is scored.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from agentevo.data.message_markers import MessageMarkers, encode_rendering
from agentevo.errors import ConfigError, ModelError
from agentevo.rewards.reward import RewardConfig, Score, reward, text_of
from agentevo.runtime.device_names import DeviceName
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.parsing import parse_json
from agentevo.types import Message, Task, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MEAN = "reward_mean"
"""The key in a model's config.json with the mean reward of the answers that the model was evaluated
on."""
STD = "reward_std"
"""The key in a model's config.json with the standard deviation of those rewards."""


class ModelRewardConfig(RewardConfig):
    """A reward that a sequence classifier gives."""

    model: str = Field(min_length=1)
    """The folder or Hugging Face name of a sequence classifier, such as RUN/model from
    `agentevo sft --reward-model`."""
    output: int | None = Field(default=None, ge=0)
    """The output to use, for a model with several: its probability is the reward. A single output
    is used directly."""
    normalise: Literal["model", "none", "sigmoid"] = "model"
    """How a single output x is scaled: (x - mean) / std, with the mean and standard deviation in
    the model's config (`agentevo sft --reward-model` writes them), else x; x; or the sigmoid of
    x."""
    solved_from: float = 0.0
    """The lowest value that counts as a success."""
    batch: int = Field(default=16, ge=1)
    """The maximum number of conversations in a forward pass. On a CPU each conversation has its own
    pass, so an attempt's score is bitwise independent of the other conversations."""
    max_tokens: int | None = Field(default=None, ge=8)
    """The maximum length of a conversation, in tokens. Of a longer conversation, the end is used.
    Default: the model's context."""
    device: DeviceName = "auto"
    """The device. `auto` is a CUDA GPU if there is one."""
    timeout_s: float = Field(default=600.0, gt=0)
    """The time limit of a score, in seconds, including the loading of the model. Beyond it, the
    attempt is recorded as failed."""


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], max_tokens: int
) -> list[int]:
    """The ids of a whole conversation for a classifier. They follow the chat template. If the
    tokenizer has none, the last reply is the second text of a pair. Of a longer conversation, the
    end is kept. Raises ModelError if the template does not accept the conversation."""
    if tokenizer.chat_template:
        markers = MessageMarkers(tokenizer, partial(_prompt_text, tokenizer))
        plain = [
            {"role": message.role, "content": markers.cut(text_of(message.content), message.role)}
            for message in messages
        ]
        try:
            text = tokenizer.apply_chat_template(plain, tokenize=False)
        except Exception as error:  # a template can raise anything
            raise ModelError(
                f"the reward model's chat template does not take this conversation: {error}"
            ) from error

        ids = encode_rendering(tokenizer, str(text))[-max_tokens:]
    else:
        before = "\n".join(text_of(message.content) for message in messages[:-1])
        reply = text_of(messages[-1].content)
        ids = tokenizer(before, reply, truncation=True, max_length=max_tokens)["input_ids"]

    if not ids:
        raise ModelError("the conversation is empty: there is nothing to judge")

    return list(ids)


def _prompt_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def longest_conversation(model: Any, tokenizer: Any, max_tokens: int | None) -> int:
    """The number of tokens that the model can read, at most `max_tokens`."""
    config = model.config.get_text_config()
    limits = [
        max_tokens,
        getattr(config, "max_position_embeddings", None),
        tokenizer.model_max_length,
    ]
    return min(limit for limit in limits if limit is not None and limit > 0)


def outputs(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Any:
    """The model's outputs [n, labels] for conversations of any lengths, padded on the right."""
    import torch

    width = max(map(len, rows))
    pad = model.config.pad_token_id
    ids = torch.full((len(rows), width), 0 if pad is None else pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1

    device = next(model.parameters()).device
    return model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits


def conversation_of(trajectory: Trajectory) -> list[Message]:
    """The messages up to the last reply, as in the prompt of its turn."""
    pieces = []
    turn = trajectory.turns[-1]
    while True:
        pieces.append(turn.messages)
        if turn.parent is None:
            return [message for piece in reversed(pieces) for message in piece]
        turn = trajectory.turns[turn.parent]


class Classifier:
    """The model and its tokenizer, loaded at the first use. Several threads may use it, and one of
    them computes at a time."""

    def __init__(self, config: ModelRewardConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any] | None = None

    def values(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The value of each conversation. Raises ModelError for a model that can't be loaded."""
        with self._lock:
            import torch

            model, tokenizer = self._loaded = self._loaded or self._load()
            longest = longest_conversation(model, tokenizer, self.config.max_tokens)
            rows = [
                conversation_ids(tokenizer, conversation, longest) for conversation in conversations
            ]
            is_unbatched = model.config.pad_token_id is None or model.device.type == "cpu"
            size = 1 if is_unbatched else self.config.batch
            with torch.inference_mode():
                parts = [
                    self._values_of(
                        outputs(model, rows[begin : begin + size]).float(), model.config
                    )
                    for begin in range(0, len(rows), size)
                ]

            scores: list[float] = torch.cat(parts).tolist()
            return scores

    def _values_of(self, logits: Any, shape: Any) -> Any:
        """The values [n] of logits [n, labels]."""
        config = self.config
        if logits.shape[-1] > 1:
            if config.output is None or config.output >= logits.shape[-1]:
                raise ModelError(
                    f"reward_model: {config.model} has {logits.shape[-1]} outputs: choose one with "
                    f"output=0 to {logits.shape[-1] - 1} (its config.json names them)"
                )
            return logits.softmax(dim=-1)[:, config.output]

        values = logits[:, 0]
        if config.normalise == "sigmoid":
            return values.sigmoid()

        std = getattr(shape, STD, None)
        if config.normalise == "model" and std:
            return (values - getattr(shape, MEAN, 0.0)) / std

        return values

    def _load(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        from agentevo.runtime.cpu_threads import check_threads
        from agentevo.runtime.devices import find

        logging.disable_progress_bar()  # the live view uses the terminal
        name = self.config.model

        device = find(self.config.device, "device")
        if device.type == "cpu":
            check_threads(torch.get_num_threads())

        path = Path(name).expanduser()
        source = str(path) if path.is_dir() else name
        try:
            with torch.random.fork_rng(devices=[]):
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    source, output_loading_info=True
                )
            tokenizer = AutoTokenizer.from_pretrained(source)
            model.to(device).eval()
        except Exception as error:  # a damaged folder can raise anything
            raise ModelError(
                f"reward_model: {name} can't be read as a sequence classifier "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): give a folder of "
                "`agentevo sft --reward-model`, or a hub name of one"
            ) from error

        if info["missing_keys"]:
            raise ModelError(
                f"reward_model: {name} lacks {sorted(map(str, info['missing_keys']))[0]}: it is "
                "not a trained sequence classifier; train one from it with `agentevo sft "
                "--reward-model`"
            )

        if model.config.pad_token_id is None and tokenizer.pad_token_id is not None:
            model.config.pad_token_id = tokenizer.pad_token_id

        return model, tokenizer


@reward("reward_model")
class ModelReward:
    """The score of the whole conversation by a sequence classifier (`agentevo sft --reward-model`
    trains one)."""

    Config = ModelRewardConfig

    def __init__(self, config: ModelRewardConfig) -> None:
        """Raises ConfigError for a folder without such a model."""
        self.config = config
        check_classifier(config.model)
        self._classifier = Classifier(config)
        self._waiting: list[tuple[list[Message], asyncio.Future[float]]] = []
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. Attempts that wait at the same time share a forward pass."""
        if not trajectory.turns:
            raise ValueError("the attempt has no reply to judge")

        loop = asyncio.get_running_loop()
        mine: asyncio.Future[float] = loop.create_future()
        entry = (conversation_of(trajectory), mine)
        self._waiting.append(entry)

        try:
            async with self._turn(loop):
                if not mine.done():
                    await self._judge(entry)
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

        value = mine.result()
        return Score(value, success=value >= self.config.solved_from)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        if self._turns is None or self._turns[0] is not loop:
            self._turns = (loop, asyncio.Lock())
        return self._turns[1]

    async def _judge(self, own_request: tuple[list[Message], asyncio.Future[float]]) -> None:
        """Scores this request together with the waiting ones. An error of one request does not
        affect the others."""
        self._waiting.remove(own_request)
        peers = [
            request
            for request in self._waiting
            if request[1].get_loop() is own_request[1].get_loop()
        ]
        together = [own_request, *peers[: self.config.batch - 1]]
        try:
            values = await in_thread(
                self._classifier.values, [conversation for conversation, _ in together]
            )
        except ModelError:
            if len(together) == 1:
                raise
            values = await in_thread(self._classifier.values, [own_request[0]])
            together = [own_request]

        for (_, future), value in zip(together, values, strict=True):
            if not future.done():
                future.set_result(value)


def check_classifier(name: str) -> None:
    """Raises ConfigError for a folder without a sequence classifier, and for a path that does not
    exist. A hub name is checked when it is loaded."""
    path = Path(name).expanduser()
    if not path.exists():
        if name.count("/") == 1 and not name.startswith((".", "/", "~")):
            return
        raise ConfigError(
            f"reward_model.model: {name} does not exist: give the folder of a sequence classifier, "
            "such as RUN/model of `agentevo sft --reward-model`"
        )

    try:
        kinds = parse_json((path / "config.json").read_text(encoding="utf-8"))["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"reward_model.model: {name} has no config.json that names a model: give the folder of "
            "a sequence classifier, such as RUN/model of `agentevo sft --reward-model`"
        ) from error

    if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds or ()):
        raise ConfigError(
            f"reward_model.model: {name} has {', '.join(map(str, kinds or ('nothing',)))}, not a "
            "sequence classifier: train one from it with `agentevo sft --reward-model`"
        )
