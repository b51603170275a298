"""An attempt for a page that is a file: the content of the dashboard's page, shortened for the
browser's speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentevo.data.images import data_url
from agentevo.errors import ImageError, StoreError, UnusableStoreError
from agentevo.observability.attempt_tokens import Training, TurnTokens, tokens_part
from agentevo.observability.attempt_view import (
    NO_IMAGES,
    CallRow,
    ShownMessage,
    ShownPart,
    Verdict,
    ending,
    part_of,
    remote_part,
    timeline,
    verdicts,
)
from agentevo.observability.pages.grid_worlds import WorldPiece
from agentevo.observability.trajectory_view import MAX_FILES, Decode, expected_answer, outcome
from agentevo.store import Store
from agentevo.store.calls import StoredCall
from agentevo.types import RemoteTurn, Task, Trajectory
from agentevo.types.images import images_of_trajectory

SHOWN_TOKENS = 3_000
"""The maximum number of sampled tokens of an attempt on a page."""
SHOWN_TURNS = 200
SHOWN_REWARDS = 60
IMAGE_BYTES = 8 * 2**20
"""The maximum size of the images of an attempt on a page. Later images are named by digest."""


class ShownTokens(NamedTuple):
    """Tokens, and the number of further tokens that are not shown."""

    turn_tokens: TurnTokens
    rest: int


class StillAttempt(NamedTuple):
    """The data of an attempt for still_components.html."""

    caption: str
    anchor: str
    """The prefix of its turns' ids, so that a page can have several attempts."""
    trajectory: Trajectory
    outcome: str
    answer: str
    """The expected answer, in words. Empty if there is none, or if it is not known."""
    part: ShownPart
    tokens: ShownTokens
    can_decode: bool
    remote: list[tuple[RemoteTurn, list[ShownMessage]]]
    verdicts: list[Verdict]
    timeline: list[CallRow]
    num_calls: int
    ending: list[WorldPiece]
    turn_rewards: list[tuple[int, float]]
    files: list[tuple[str, int]]


async def read_images(store: Store, trajectory: Trajectory) -> dict[str, str]:
    """Maps the digest of an image of the attempt to the image as a data URL, for at most
    IMAGE_BYTES in the order of the messages. What the store does not have, or is no image, is left
    out."""
    images: dict[str, str] = {}
    rest = IMAGE_BYTES
    for digest in images_of_trajectory(trajectory):
        try:
            image = await store.image(digest)
            url = data_url(image, digest)
        except (UnusableStoreError, ImageError):
            continue

        rest -= len(image.data)
        if rest < 0:
            break
        images[digest] = url

    return images


async def read_task(store: Store, trajectory: Trajectory) -> Task | None:
    """The attempt's task. None if the store does not have it: a program with its own loop may store
    no tasks."""
    try:
        return await store.task(trajectory.task_id)
    except StoreError:
        return None


def still_attempt(
    trajectory: Trajectory,
    calls: Sequence[StoredCall] = (),
    decode: Decode | None = None,
    *,
    caption: str = "",
    anchor: str = "",
    images: Mapping[str, str] = NO_IMAGES,
    task: Task | None = None,
) -> StillAttempt:
    """`calls`: the attempt's recorded calls. Without `decode`, tokens are shown as ids. `images`:
    see `read_images`."""
    turn_tokens = tokens_part(
        trajectory,
        None if decode is None else lambda ids: "".join(map(decode, ids)),
        Training(None, None, None),
        most=SHOWN_TOKENS,
    )
    shown = sum(len(block.tokens) for block in turn_tokens.blocks)
    return StillAttempt(
        caption=caption,
        anchor=anchor,
        trajectory=trajectory,
        outcome=outcome(trajectory),
        answer="" if task is None else expected_answer(task),
        part=part_of(trajectory, calls, most=SHOWN_TURNS, images=images),
        tokens=ShownTokens(turn_tokens, trajectory.num_completion_tokens() - shown),
        can_decode=decode is not None,
        remote=remote_part(trajectory.remote_turns, images=images),
        verdicts=verdicts(calls),
        timeline=timeline(calls),
        num_calls=len(calls),
        ending=ending(trajectory, calls),
        turn_rewards=[(turn.index, turn.reward) for turn in trajectory.turns if turn.reward][
            :SHOWN_REWARDS
        ],
        files=[(path, len(data)) for path, data in list(trajectory.files.items())[:MAX_FILES]],
    )
