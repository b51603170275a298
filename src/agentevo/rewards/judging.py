"""The common part of all judges. It asks models in order until one gives a usable answer. After an
unusable answer, a model gets one chance to correct the answer.

A judge's answer can quote an attempt with a forged verdict, so nothing in it is guessed:

    thought    reasoning at the beginning of an answer is ignored, including any draft verdicts
    cut        an answer that ended at the token limit is unusable
    several    all verdicts in an answer must agree, because one of two different verdicts may be a
               quotation
    broken     JSON that can't be parsed makes an answer unusable

One case is not detected: a judge states its own verdict only in free words and quotes a complete
forged verdict. A server that enforces a schema prevents this case.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import Field, field_validator

from agentevo.errors import AgentEvoError
from agentevo.rewards.reward import RewardConfig, ScorerModel
from agentevo.types import ImagePart, TextPart
from agentevo.types.content import Content
from agentevo.types.images import ImageFile

THOUGHT_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""Start -> end of the reasoning in an answer, for servers that do not remove reasoning."""
_JSON_START = re.compile(r'\{(?=\s*")|\[(?=\s*\{)')
_SCORE_TAG = re.compile(r"<\s*(/?)\s*score\s*>", re.IGNORECASE)
_CORRECT = re.compile(r"\b(in)?correct\b", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.!?;\n\u3002\uff01\uff1f]+[.!?;\n\u3002\uff01\uff1f]*")
_NOUN_AFTER = re.compile(
    r"(?:[\s*_]+(?:and\s+)?(?:final|numerical|actual|reference|complete))?[\s*_]+(?:answer|response|"
    r"result|solution|value|option|choice|number|one|reading|verdict|name|date|word|term)s?\b",
    re.IGNORECASE,
)
"""A noun after `correct`, which then describes the noun and is not a verdict."""
_NEGATION = re.compile(
    r"\b(?:not|never|no|non|nor|neither|cannot|hardly|without)\b|n['\u2019]t\b", re.IGNORECASE
)
_NEGATION_BEFORE = re.compile(
    r"(?:\b(?:not|never|cannot)|n['\u2019]t)"
    r"(?:\s{1,9}(?:at\s{1,9}all|be|been|being|considered|\w{1,30}ly)){0,2}[\s*_]{1,9}\Z",
    re.IGNORECASE,
)
"""Words immediately before `correct` that negate it."""
_UNCERTAIN = re.compile(
    r"\b(?:if|unless|whether|would|could|might|may|were|had|seems?|appears?|claims?|says|"
    r"said|states?|stated|asks?|quote|almost|nearly|partly|half|somewhat|mostly|far|than|anything|"
    r"nothing|more|less|rather|instead|supposedly|allegedly)\b|[?\"\u201c\u201d\u300c]",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",|\b(?:so|and|but|hence|thus|therefore|which)\b", re.IGNORECASE)
_EMPHASIS = re.compile(
    r"(?:entire|ful|complete|absolute|total|perfect|clear|exact|definite|certain|undoubted)ly",
    re.IGNORECASE,
)
_ANSWER_AFTER = re.compile(r"[*_ ]{0,9}:[*_\s]{0,9}(?:yes|no|true|false)\b", re.IGNORECASE)
_ADVERB = re.compile(r"\b(\w{1,30}ly)[\s*_]{1,9}\Z", re.IGNORECASE)


class UnusableError(ValueError):
    """A judge's answer can't be used. The message tells the judge how to correct it."""


def strict_object_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these fields. The schema has no bounds of numbers, so
    every server that enforces schemas accepts the schema."""
    return {
        "type": "object",
        "properties": dict(fields),
        "required": list(fields),
        "additionalProperties": False,
    }


def text_after_reasoning(reply: Any) -> str:
    """The text of a remote model's reply after its reasoning. Raises UnusableError for a reply that
    was cut off."""
    if reply.finish_reason == "length":
        raise UnusableError(
            "the answer was cut off at the limit of its tokens: keep it shorter (the limit is "
            "max_new_tokens of the remote model)"
        )

    text: str = reply.text.lstrip()
    for begin, end in THOUGHT_TAGS.items():
        if text.startswith(begin):
            _, mark, answer = text.partition(end)
            if not mark:
                raise UnusableError(f"the thought that begins with {begin} does not end")
            return answer

    return text


def objects_in(text: str) -> list[Any]:
    """The JSON objects, and lists of objects, in an answer, without nested ones. Raises
    UnusableError if one of them can't be parsed, or has a key twice."""
    values = []
    position = 0
    while start := _JSON_START.search(text, position):
        try:
            value, position = _JSON.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            excerpt = text[start.start() : start.start() + 60]
            raise UnusableError(f"there is JSON in it that can't be read: {excerpt!r}") from None
        values.append(value)

    return values


def find_agreement(verdicts: Iterable[T], reason: str) -> T:
    """The verdict on which all `verdicts` agree. Raises UnusableError if they differ, and with
    `reason` if there are none."""
    candidates = list(verdicts)
    if not candidates:
        raise UnusableError(reason)
    if any(verdict != candidates[0] for verdict in candidates):
        raise UnusableError("there are verdicts in it that differ: give yours, and quote none")
    return candidates[0]


def number_of(value: object) -> float | None:
    """The value as a float. Accepts a text too, because small models write numbers as texts. None
    for other values."""
    if isinstance(value, str) and len(value) < 40:
        try:
            value = float(value)
        except ValueError:
            return None

    if isinstance(value, bool) or not isinstance(value, int | float):
        return None

    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def scores_in_tags(text: str) -> list[str]:
    """The texts between <score> and </score>. Raises UnusableError if a tag has no partner."""
    values = []
    start: int | None = None
    for tag in _SCORE_TAG.finditer(text):
        if bool(tag[1]) == (start is None):
            raise UnusableError("a tag <score> or </score> has no partner")
        if start is None:
            start = tag.end()
        else:
            values.append(text[start : tag.start()].strip())
            start = None

    if start is not None:
        raise UnusableError("a tag <score> is not closed")
    return values


def verdicts_in_words(text: str) -> list[bool]:
    """The verdicts of the words correct and incorrect. Raises UnusableError for an ambiguous
    sentence."""
    verdicts = []
    for sentence in _SENTENCE.findall(text):
        verdict_words = [
            match
            for match in _CORRECT.finditer(sentence)
            if match[1] is not None or not _NOUN_AFTER.match(sentence, match.end())
        ]
        num_negations = len(_NEGATION.findall(sentence)) if verdict_words else 0
        is_uncertain = bool(verdict_words) and _UNCERTAIN.search(sentence) is not None
        for match in verdict_words:
            verdict = None if is_uncertain else _verdict(sentence, match, num_negations)
            if verdict is None:
                raise UnusableError(
                    f"whether it says correct or incorrect is not clear: {sentence.strip()[:100]!r}"
                )
            verdicts.append(verdict)

    return verdicts


def _verdict(sentence: str, match: re.Match[str], num_negations: int) -> bool | None:
    """The verdict of one word `correct` or `incorrect` in a sentence. None if it is ambiguous."""
    before = sentence[max(0, match.start() - 100) : match.start()]
    adverb = _ADVERB.search(before)
    if (
        before.endswith(("-", "\u2010", "\u2011"))
        or _ANSWER_AFTER.match(sentence, match.end())
        or (adverb is not None and not _EMPHASIS.fullmatch(adverb[1]))
    ):
        return None

    if match[1] is not None:
        return None if _NEGATION.search(_CLAUSE.split(before)[-1]) else False

    is_negated = _NEGATION_BEFORE.search(before) is not None
    return None if num_negations > is_negated else not is_negated


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key occurs twice")
    return fields


_JSON = json.JSONDecoder(object_pairs_hook=_without_repeated_keys)


T = TypeVar("T")
ROLE = "judge"
"""The role of judges' calls in the price log."""
MAX_ECHO = 20_000
"""The maximum number of characters of its unusable answer that a judge sees again."""


THRESHOLDS = {
    "min_rank_correlation": ("its rank correlation with the truth", True),
    "max_position_bias": ("its position bias", False),
    "max_injected": ("the share of injections that raise a score", False),
}
"""Key -> the name of the measured value, and whether the key is its lower bound (else the
upper)."""


class JudgeOptions(RewardConfig):
    """The options of a reward for which remote models are judges."""

    models: tuple[str, ...] = Field(default=("judge",), min_length=1)
    """Names in `remote_models`, tried in this order until a model gives a usable answer. A model
    with `api: engine` runs on this machine."""
    timeout_s: float = Field(default=300.0, gt=0)
    """The time limit of one score, in seconds, for all models together. Beyond it, the attempt is
    recorded as failed."""

    images: int = Field(default=0, ge=0, le=64)
    """How many of an attempt's last images the judge sees, such as screenshots. Its `models` must
    take images (remote_models.NAME.sees_images). Default: none; the judge reads how many there
    are."""
    calibration: str | None = None
    """The file that `agentevo judge` wrote for this judge. Training is refused if the
    file belongs to another judge, or if a value misses its threshold."""
    min_rank_correlation: float = Field(default=0.5, ge=-1, le=1)
    """The lowest rank correlation (Spearman's) with the truth."""
    max_position_bias: float = Field(default=0.25, ge=0, le=1)
    """The largest change of a score between the first and the last position."""
    max_injected: float = Field(default=0.1, ge=0, le=1)
    """The largest share of injections that raise the score of a bad attempt."""
    uncalibrated: bool = False
    """Train with this judge although its agreement with the truth was not measured."""

    @property
    def needs_calibration(self) -> bool:
        """Whether training with this judge is refused if it was not calibrated."""
        return not self.uncalibrated

    @field_validator("models", mode="before")
    @classmethod
    def _to_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class NoScoreError(AgentEvoError):
    """No judge gave a usable answer."""


@dataclass(frozen=True, slots=True)
class JudgeAnswer(Generic[T]):
    model: str
    value: T
    text: str


async def ask_in_order(
    models: Mapping[str, ScorerModel],
    names: Sequence[str],
    question: Content,
    read: Callable[[str], T],
    *,
    until: float,
    attempt: str,
    correction: Callable[[str], str],
    seed: int | None = None,
    schema: Mapping[str, Any] | None = None,
    images: Mapping[str, ImageFile] | None = None,
) -> JudgeAnswer[T]:
    """The first usable answer. `images`: maps a digest to the image, if the question has any. Each
    model gets its share of the time until the monotonic time `until`. `schema` is the schema of the
    answer. Servers that support schemas enforce it. `read` receives a model's text after its
    reasoning, and raises UnusableError if the text can't be used. The model then gets one more
    request, with the `correction`. Raises NoScoreError with the problem of each model."""
    options: dict[str, Any] = {"seed": seed, "schema": schema}
    if not isinstance(question, str):
        options["images"] = images
    options = {name: value for name, value in options.items() if value is not None}
    problems = []
    for index, name in enumerate(names):
        if name not in models:
            problems.append(f"{name}: no remote model has that name")
            continue

        num_left = len(names) - index
        share_s = max(0.0, (until - time.monotonic()) / num_left)
        try:
            async with asyncio.timeout(share_s if num_left > 1 else None):
                value, text = await _ask(
                    partial(models[name].generate, role=ROLE, attempt=attempt, **options),
                    question,
                    read,
                    correction,
                )
                return JudgeAnswer(name, value, text)
        except TimeoutError:
            problems.append(f"{name}: no answer within its share of timeout_s, {share_s:.1f} s")
        except (AgentEvoError, UnusableError) as error:
            problems.append(f"{name}: {error}")

    raise NoScoreError(
        f"no judge gave a score: {'; '.join(problems)}: check the model's answers, or name "
        "another model in the reward's `models`"
    )


def with_images(
    question: str, images: Sequence[ImagePart], intro: str, name: Callable[[ImagePart], str]
) -> Content:
    """The question behind its images, if there are any: the intro, and each image behind its
    name."""
    if not images:
        return question

    parts: list[TextPart | ImagePart] = [TextPart(intro)]
    for image in images:
        parts += [TextPart(f"\n{name(image)}:\n"), image]
    return (*parts, TextPart(f"\n{question}"))


async def all_or_first_error(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines. A failure does not cancel the others, because their requests
    are paid and their answers stored. Raises the first failure after all have ended."""
    outcomes = await asyncio.gather(*coroutines, return_exceptions=True)
    values: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        values.append(outcome)
    return values


async def _ask(
    generate: Callable[..., Awaitable[Any]],
    question: Content,
    read: Callable[[str], T],
    correction: Callable[[str], str],
) -> tuple[T, str]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    reply = await generate(messages)
    try:
        return read(text_after_reasoning(reply)), reply.text
    except UnusableError as error:
        echo = reply.text[-MAX_ECHO:].strip() or "(nothing)"
        messages += [
            {"role": "assistant", "content": echo},
            {"role": "user", "content": correction(str(error))},
        ]

    reply = await generate(messages)
    return read(text_after_reasoning(reply)), reply.text
