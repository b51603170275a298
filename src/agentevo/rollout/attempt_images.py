"""The images of tasks and attempts: an attempt can show those of its task from the beginning, and
those that it has shown are in the store before its trajectory is. Text alone costs no call of the
store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agentevo.agents.policy import Policy
from agentevo.config import RunConfig
from agentevo.errors import ConfigError
from agentevo.inference.engine import why_text_only
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.store import Store
from agentevo.types import Task, Trajectory
from agentevo.types.images import ImageFile, images_of_task, images_of_trajectory


def what_shows_images(config: RunConfig, task_images: Mapping[str, ImageFile]) -> str:
    """What is known before the first attempt to show images: tasks that name `task_images`, or the
    options of the environment. Empty if nothing is."""
    if task_images:
        return "tasks: some have images"
    if config.environment is not None and config.environment.shows_images:
        return "environment: its observations have images"
    return ""


def check_sees(
    config: RunConfig, task_images: Mapping[str, ImageFile], chats: Iterable[ChatFormat]
) -> None:
    """Raises ConfigError if attempts are known to show images, and no model of these chats sees or
    the engine refuses images."""
    shown = what_shows_images(config, task_images)
    if not shown:
        return

    if any(chat.processor is not None for chat in chats):
        if why := why_text_only(config.engine):
            raise ConfigError(f"{shown}, and {why}")
        return

    if not config.model.vision.images:
        raise ConfigError(
            f"{shown}, and model.vision.images=false shows none to the model: remove that key, or "
            "leave images out"
        )

    raise ConfigError(
        f"{shown}, and model.name={config.model.name} reads text only: choose a model that sees, "
        "such as Qwen/Qwen2.5-VL-3B-Instruct or HuggingFaceTB/SmolVLM-256M-Instruct, or leave "
        "images out"
    )


class AttemptImages:
    """The images of the attempts at one task."""

    def __init__(self, store: Store | None, given: Mapping[str, ImageFile], task: Task) -> None:
        """`given`: images that this process has; the others come from the store, if there is
        one."""
        self._store = store
        self._given = given
        self._task = task

    async def give(self, policies: Iterable[Policy]) -> None:
        """Puts the images of the task at the disposal of these policies. Raises UnusableStoreError
        for an image that the store does not have."""
        policies = list(policies)
        store = self._store
        for digest in images_of_task(self._task):
            image = self._given.get(digest)
            if image is None and store is not None:
                image = await with_retries(
                    lambda: store.image(digest),  # noqa: B023 (awaited before the next)
                    what="image",
                )

            if image is not None:
                for policy in policies:
                    policy.conversation.images.add(image)

    async def keep(self, policies: Iterable[Policy], trajectories: Iterable[Trajectory]) -> None:
        """Stores the images that these trajectories name, from the policies of their attempts."""
        named = {name for trajectory in trajectories for name in images_of_trajectory(trajectory)}
        if not named or self._store is None:
            return

        # A thread that an attempt left behind may still add images.
        files = {
            name: policy.images[name]
            for policy in policies
            for name in named
            if name in policy.images
        }
        await put_images(self._store, files.values())


async def put_images(
    store: Store, images: Iterable[ImageFile], *, within_s: float = STORE_RETRY_S
) -> None:
    """Stores images, and waits `within_s` seconds for an unavailable database."""
    files = list(images)
    if files:
        await with_retries(lambda: store.put_images(files), within_s=within_s, what="put_images")


async def put_images_of_tasks(
    store: Store,
    tasks: Sequence[Task],
    given: Mapping[str, ImageFile],
    *,
    within_s: float = STORE_RETRY_S,
) -> None:
    """Stores those of the images that the tasks name, before the tasks are added."""
    named = dict.fromkeys(name for task in tasks for name in images_of_task(task))
    images = [given[name] for name in named if name in given]
    await put_images(store, images, within_s=within_s)
