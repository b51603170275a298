"""The frozen records of the data path (see docs/design.md, section 2).

Invariant (token-exactness): along the tree of a trajectory, the tokens that the engine saw before
turn `t` emitted its completion are

    context(t) = context(parent(t)) + completion_ids(parent(t)) + prompt_ids(t)

with `context(root) = prompt_ids(root)`. A turn therefore stores only the ids that it adds. No text
is ever encoded again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from agentevo.errors import shown
from agentevo.types.image_span import ImageSpan
from agentevo.types.penalties import Penalties, TokenPenalties
from agentevo.types.routed_experts import RoutedExperts
from agentevo.types.turn_columns import TURN_COLUMNS, column_of

FinishReason = Literal["stop", "length"]
"""`stop`: a stop token or stop string ended the completion. `length`: the token limit did."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A text among the parts of a message."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, omit_defaults=True, tag="image"):
    """An image by digest: a message never holds pixels."""

    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Digest of the image file's bytes, in hexadecimal."""
    media_type: str = "image/png"


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a tool in an assistant's message."""

    name: str
    arguments: str
    """The exact text that the model or the demonstrator wrote, which may not be valid JSON."""
    id: str = ""
    """Empty if none was given."""


Role = Literal["system", "user", "assistant", "tool"]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat message, for chat templates and for people. Training uses token ids instead."""

    role: Role
    content: str | tuple[TextPart | ImagePart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For the role `tool`: the id of the call that this message answers."""
    name: str | None = None
    """The speaker's name; for the role `tool`, the tool's name."""
    reasoning: str | None = None
    """The assistant's reasoning before the answer, if it is separate from the content."""

    @property
    def text(self) -> str:
        """The text of the content, without images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task: an environment and a seed, or a query with a reference answer."""

    id: str
    environment: str | None = None
    """The registered name of the environment, or None for tasks of another agent."""
    seed: int = 0
    """The seed of the environment. All members of a group get the same seed."""
    query: str | None = None
    answer: Any = None
    scorer: str | None = None
    """The name of the reward that scores this task instead of the recipe's, or several names
    separated by commas."""
    metadata: dict[str, Any] = {}


QUERY_MESSAGES = "query_messages"
"""Key of a task's metadata for the chat that its row gave as the query. No column of a row may have
this name."""
QUEUED_FOR_STEP = "queued_for_step"
"""Key of a queued task's metadata for the training step that it is queued for. No given task may
have it."""
QUEUED_ATTEMPTS = "queued_attempts"
"""Key of a queued task's metadata for the number of attempts, if it is not trainer.group_size. No
given task may have it."""


LOWEST_TEMPERATURE = 1e-3
"""Logits divided by less leave the range of float32; 0 is greedy."""
LARGEST_TEMPERATURE = 1000.0
MAX_STOP_STRINGS = 64
MAX_STOP_STRING = 1000
"""Characters of one stop string."""
MAX_GRAMMAR = 100_000
"""Characters of a grammar. The time to compile one grows with them: about a third of a second."""


MAX_TOP_LOGPROBS = 20
"""The number of alternatives per token that a request may ask for."""
Alternatives = list[tuple[int, float]]
"""Tokens with their natural log-probs, the likeliest first."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How completions are sampled. `temperature=0` is greedy: the log-prob is then that of a point
    mass, 0."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """The token that completes one of these ends the completion. The ids keep the token."""
    seed: int = 0
    """The seed of this request alone: the same seed, prompt and weights give the same tokens in
    any batch."""
    grammar: str = ""
    """The grammar of the completion, in llguidance's form of Lark: every token is sampled from
    those that keep the completion the beginning of a text of the grammar, and a stop token only
    where the text is complete. Empty: no restriction. Such a request needs `stop_token_ids`."""
    penalties: Penalties | None = None
    """The changes of the logits before temperature and filters."""
    top_logprobs: int = 0
    """How many of the likeliest tokens a completion has at each of its places."""
    routed_from: int = 0
    """The first token whose routed experts the completion reports, if the engine records them."""


class SamplingOverrides(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One call's changes of the sampling parameters; None keeps the recipe's value. The first four
    determine the distribution: a turn that was sampled with other values than the recipe's is not
    trained."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop_strings: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    penalties: Penalties | None = None

    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an engine. `ids`, `logprobs` and `versions` have one entry per new token."""

    ids: list[int]
    """Includes the stop token, if one was sampled."""
    logprobs: list[float]
    """Natural log of the probability under the distribution that the token was sampled from (after
    temperature and filters)."""
    versions: list[int]
    """Version of the weights that emitted each token."""
    finish_reason: FinishReason
    masks: str = ""
    """A digest of the tokens that the grammar allowed at each place (models/grammar.py); empty
    without one."""
    top_logprobs: list[Alternatives] = []
    """For each token the likeliest tokens of the distribution that it was sampled from, without
    those of probability 0; empty unless the request asks for them."""
    routed_experts: RoutedExperts | None = None
    """The routed experts of prompt and completion without its last token, from `routed_from` on;
    None if the engine does not record them."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar that a completion was sampled under: its log-probs are those of the distribution
    over the allowed tokens, and training uses the same distribution."""

    grammar: str
    """As in SamplingParams."""
    end_ids: tuple[int, ...]
    """The tokens that may end a text of the grammar."""
    masks: str
    """The digest in Completion.masks. The trainer makes the masks again, and leaves the turn out if
    they differ."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the policy. See the module's invariant for `prompt_ids` and `parent`.

    Ids, versions and log-probs may be given as any sequence; they are kept as arrays (`array.array`
    of int32 and of float32), which compare, slice and pickle like lists, whose items are Python
    numbers, and which numpy reads without a copy.
    """

    index: int
    parent: int | None = None
    """Index of the turn that this one extends; None starts a new root."""
    prompt_ids: Sequence[int]
    """Ids added after the parent's completion (the whole prompt for a root)."""
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason
    temperature: float = 1.0
    seed: int = 0
    """The seed of the engine request: with the context and the weights it regenerates the
    completion."""
    overrides: SamplingOverrides | None = None
    """The call's changes of the sampling distribution (temperature, filters). The trainer computes
    only the recipe's distribution, so such a turn is context and is never trained."""
    constraint: Constraint | None = None
    """The grammar that the completion was sampled under, which the trainer also applies."""
    penalties: Penalties | None = None
    """Likewise."""
    routed_experts: RoutedExperts | None = None
    """The experts that the routers of a mixture chose, if the engine recorded them: see the module
    of the type."""
    teacher_logprobs: Sequence[float] | None = None
    """The natural log-prob of each completion token by a teacher, at temperature 1. None if no
    teacher has scored the turn. Kept as an array of float32."""
    images: tuple[ImageSpan, ...] = ()
    """The images of `prompt_ids`, in order; their offsets count from its first id. A completion has
    none, because the ids of images can't be sampled."""
    processor: str = ""
    """The fingerprint of the settings that made the tokens and the pixels of the images (see
    models/vision/processor.py); empty without images."""
    reward: float = 0.0
    """The environment's reward for this turn, penalties included."""
    messages: list[Message] = []
    """The prompt's new part and the policy's answer, as readable text."""
    tools: str = ""
    """The tools of a root turn that the template wrote into the prompt, as a JSON list of
    schemas."""

    def __repr__(self) -> str:
        """Without ids and log-probs, which may be thousands."""
        extends = "" if self.parent is None else f" after turn {self.parent}"
        last_text = self.messages[-1].text if self.messages else ""
        return (
            f"<Turn {self.index}{extends}: {len(self.prompt_ids)} new prompt tokens, "
            f"{len(self.completion_ids)} sampled ({self.finish_reason}), said {shown(last_text)}>"
        )

    def __post_init__(self) -> None:
        for name, code in TURN_COLUMNS.items():
            values = getattr(self, name)
            if not isinstance(values, array):
                column = column_of(f"{name} of turn {self.index}", code, values)
                msgspec.structs.force_setattr(self, name, column)

        scores = self.teacher_logprobs
        if scores is not None and not isinstance(scores, array):
            column = column_of(f"teacher_logprobs of turn {self.index}", "f", scores)
            msgspec.structs.force_setattr(self, "teacher_logprobs", column)


def path_of(turns: Sequence[Turn], leaf: int) -> list[Turn]:
    """The turns from the root to turn `leaf`."""
    path = [turns[leaf]]
    while path[-1].parent is not None:
        path.append(turns[path[-1].parent])
    return path[::-1]


def context_of(turns: Sequence[Turn], index: int) -> list[int]:
    """All ids before the completion of turn `index`, by the module's invariant."""
    turn = turns[index]
    pieces = [turn.prompt_ids]
    while turn.parent is not None:
        turn = turns[turn.parent]
        pieces += [turn.completion_ids, turn.prompt_ids]

    ids = array(TURN_COLUMNS["prompt_ids"])
    for piece in reversed(pieces):
        ids.extend(piece)

    return ids.tolist()


def images_of_context(turns: Sequence[Turn], index: int) -> list[ImageSpan]:
    """The images of `context_of`, in order; their offsets count from the first id of the
    conversation."""
    return images_of_path(path_of(turns, index))


def images_of_path(path: Sequence[Turn]) -> list[ImageSpan]:
    """The images on a path from its root, in order; their offsets count from its first id."""
    spans: list[ImageSpan] = []
    length = 0
    for turn in path:
        spans += [span.shifted(length) for span in turn.images]
        length += len(turn.prompt_ids) + len(turn.completion_ids)
    return spans


class RemoteTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a remote model within an attempt: text alone, which is never trained on."""

    index: int
    """Among the attempt's remote turns."""
    parent: int | None = None
    """The remote turn that this one continues; None begins a conversation."""
    model: str
    """Its name in the recipe."""
    agent: str = ""
    """The agent that made the call, if an attempt has several."""
    messages: list[Message]
    """The new messages since the parent; the last one is the answer."""
    tools: str = ""
    """The tools of a conversation's first turn, as a JSON list of schemas in OpenAI's form."""
    finish_reason: FinishReason = "stop"
    seed: int = 0
    prompt_tokens: int = 0
    """As the server counts them, like the next two."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """By the recipe's prices."""


Status = Literal["completed", "failed", "cancelled"]
"""`cancelled`: ended by the sampler (too old, or its group was full), with the turns recorded until
then."""


REWARD_PARTS = "reward_parts/"
"""Prefix of the names that the parts of a reward have among metrics."""
TIMINGS = "timings/"
"""Prefix of the names that times have among the metrics of a stored row."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task."""

    id: str
    task_id: str
    group_id: str
    """Shared by one policy's trajectories of a task; advantages compare within it, by id alone."""
    attempt: int = 0
    """Member number within the group; part of every random seed."""
    turns: list[Turn] = []
    remote_turns: list[RemoteTurn] = []
    """The turns of remote models."""
    files: dict[str, bytes] = {}
    """The files that the agent kept, by path (`Policy.keep_files`)."""
    texts: dict[str, str] = {}
    """The named texts that it was played with: name -> digest (docs/prompts.md)."""
    reward: float = 0.0
    """The reward of the whole attempt, penalties included. Advantages are computed from it."""
    reward_parts: dict[str, float] = {}
    """The parts whose sum is the reward, by name (`environment`, ...); empty if none were given."""
    success: bool = False
    status: Status = "completed"
    error: str | None = None
    """Why it did not complete. A failed or cancelled trajectory is never trained on."""
    truncated: bool = False
    """The attempt ended by a limit (turns, actions, context) and not by the environment."""
    metrics: dict[str, float] = {}
    """Counts for reports: `num_actions`, `num_invalid_actions`, `num_format_errors`, ..."""
    started_at: float = 0.0
    """Unix time in seconds."""
    duration_s: float = 0.0
    timings: dict[str, float] = {}
    """Durations in seconds, such as `environment_step_s/mean`. No digest covers times."""

    def __repr__(self) -> str:
        """Its outcome, without its turns."""
        worth = f"reward {self.reward:g}, {'success' if self.success else 'no success'}"
        became = worth if self.status == "completed" else f"{self.status}: {shown(self.error)}"
        num = len(self.turns)
        return (
            f"<Trajectory {self.id!r}: {became}, {num} turn{'s' * (num != 1)}, "
            f"{self.num_completion_tokens()} tokens sampled>"
        )

    @property
    def agent(self) -> str:
        """The agent of the trajectory, if the rollout has several; otherwise empty."""
        return self.group_id.rpartition("@")[2].partition(":")[2]

    def context_ids(self, index: int) -> list[int]:
        """All ids that the policy saw before it emitted turn `index`, by the module's invariant."""
        return context_of(self.turns, index)

    def num_completion_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)

    def num_trainable_tokens(self) -> int:
        """The number of completion tokens that were sampled from the recipe's distribution."""
        return sum(len(turn.completion_ids) for turn in self.turns if turn.overrides is None)


def group_of_agent(group_id: str, agent: str) -> str:
    """The group of one agent's trajectories: each of several is compared with itself alone."""
    return f"{group_id}:{agent}" if agent else group_id


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an attempt."""

    reward: float | None
    """The reward of the whole attempt, including penalties. None if a scorer decides."""
    success: bool = False
    reward_parts: dict[str, float] = {}
    """The named parts of the reward, or empty. Raises ValueError if they do not sum to the
    reward."""
    turn_rewards: dict[int, float] = {}
    """The reward of single turns, by turn index."""
    truncated: bool = False
    """Whether a limit ended the attempt."""
    ending: str = ""
    """The observation after the last turn, which is in no prompt. It is stored with the calls."""
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}
    """See Trajectory."""
    agents: dict[str, Outcome] = {}
    """The result of each of several agents, by name. Other agents get the rest of this record."""

    def __post_init__(self) -> None:
        total = sum(self.reward_parts.values())
        reward = self.reward or 0.0
        if self.reward_parts and not math.isclose(total, reward, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(
                f"reward_parts {self.reward_parts} sum to {total:g}, but reward is {reward:g}: "
                "give parts that sum to the reward, or none"
            )


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call within an attempt: of the policy, a tool, the environment or a scorer. The
    trajectory has the content; a call has its time, its duration, and its parent call."""

    id: str
    """`RECORDER-NUMBER`, unique in a store; a recorder belongs to one process."""
    trajectory_id: str
    parent: str | None = None
    """Id of the call in which this one was made. None for the call of the attempt itself; every try
    has one."""
    kind: str
    """`attempt`, `policy`, `tool`, `environment`, `scorer`, or any other word."""
    name: str
    started_at: float  # Unix time in seconds
    ended_at: float | None = None
    """None while it is running, and permanently if its process was killed."""
    status: Status | None = None
    """None until it has ended. `cancelled`: it was stopped before its end."""
    error: str | None = None
    attributes: dict[str, str | int | float | bool] = {}
    """Small facts such as `turn`, never a prompt; the last output of a `process` or an
    environment."""


class TokenMasks(NamedTuple):
    """Which tokens a grammar allowed at each place of a text."""

    table: list[np.ndarray]
    """Masks, [W] uint32 each: a bit for each token of the vocabulary, lowest bit first."""
    rows: np.ndarray
    """[T] int32: the mask of each token; -1 where all tokens were allowed."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One root-to-leaf path of a trajectory, ready for training: T tokens, of which M are trained.

    Arrays may be given as any sequence, and are kept as numpy arrays of the types named here.
    """

    trajectory_id: str
    group_id: str
    ids: np.ndarray
    """[T] int32"""
    loss_mask: np.ndarray
    """[T] bool, True where the policy chose the token. Never True at position 0, which has no
    context to predict it from."""
    logprobs: np.ndarray
    """[T] float32 behaviour log-probs; 0 where `loss_mask` is False."""
    versions: np.ndarray
    """[T] int32; -1 where `loss_mask` is False."""
    advantages: np.ndarray
    """[M] float64, one entry per *trained* token"""
    columns: dict[str, np.ndarray] = {}
    """Further inputs of the update, [M] float32 each: `returns`, `values`, `old_logp`, `age`,
    ..."""
    temperature: float = 1.0
    masks: TokenMasks | None = None
    """The allowed tokens, where a grammar restricted them."""
    penalties: TokenPenalties | None = None
    """Where penalties changed the logits before a token was sampled."""
    images: tuple[ImageSpan, ...] = ()
    """The images of `ids`, in order."""
    processor: str = ""
    """As in a turn."""
    routed_experts: RoutedExperts | None = None
    """T - 1 rows: of every token but the last. The policy's passes replay them."""

    def __post_init__(self) -> None:
        for name, dtype in SAMPLE_TYPES.items():
            msgspec.structs.force_setattr(self, name, np.asarray(getattr(self, name), dtype=dtype))
        columns = {
            name: np.asarray(column, dtype=np.float32) for name, column in self.columns.items()
        }
        msgspec.structs.force_setattr(self, "columns", columns)

    @classmethod
    def given(
        cls,
        name: str,
        group_id: str,
        ids: Sequence[int] | np.ndarray,
        mask: Sequence[bool] | np.ndarray,
        temperature: float = 1.0,
        *,
        images: tuple[ImageSpan, ...] = (),
        processor: str = "",
    ) -> Sample:
        """A sample of tokens that no policy of this run has sampled, trained where `mask` is True:
        demonstrations, and answers from a file. `processor`: the fingerprint, used with images
        only."""
        trained = np.asarray(mask, dtype=np.bool_)
        return cls(
            trajectory_id=name,
            group_id=group_id,
            ids=np.asarray(ids),
            loss_mask=trained,
            logprobs=np.zeros(len(trained)),
            versions=np.where(trained, 0, -1),
            advantages=np.zeros(np.count_nonzero(trained)),
            temperature=temperature,
            images=images,
            processor=processor if images else "",
        )

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


SAMPLE_TYPES: dict[str, Any] = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float64,
}
"""A sample's arrays -> their types."""


class Baselines(msgspec.Struct, frozen=True):
    """Success rates (0..1) of two reference players on one task or a mean over tasks, under the
    agent's own limits. None: unknown."""

    random: float | None
    """A player that chooses uniformly among the valid actions until the limit; None if the actions
    can't be listed (free text)."""
    optimal: float | None
    """The best success of a player that sees the whole state; None if no solver exists."""
