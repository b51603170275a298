"""The findings of an audit: counts, reasons and violations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from agentevo.store.records import StoredTrajectory
from agentevo.types.images import images_of_trajectory

_NUMBER = re.compile(r"\d+(\.\d+)?")


class AuditViolation(msgspec.Struct, frozen=True):
    """A false or missing statement in the store."""

    what: str
    step: int | None = None
    trajectory: str | None = None

    def __str__(self) -> str:
        places = [f"step {self.step}"] if self.step is not None else []
        places += [f"trajectory {self.trajectory}"] if self.trajectory is not None else []
        return ": ".join([*places, self.what])


class Audit(msgspec.Struct, kw_only=True):
    """The findings of an audit."""

    steps: int = 0
    """The number of committed steps."""
    trained: int = 0
    """The number of trajectories that the steps were made from."""
    replayed: int = 0
    """How often a step trained again on a success of an earlier step."""
    ages: dict[int, int] = {}
    """Maps an age in versions to the number of trained tokens."""
    masked_tokens: int = 0
    """The number of tokens in those trajectories that were too old and therefore not trained on."""
    reasons: dict[str, dict[str, list[str]]] = {}
    """Maps `dropped`, `failed` or `cancelled` to a mapping from a reason to the ids of training
    trajectories, in the order of writing."""
    waiting: Counter[str] = msgspec.field(default_factory=Counter)
    """The numbers of `ready` and `reserved` training trajectories."""
    tasks: dict[str, int] = {}
    """The number of tasks in each state."""
    unfinished: list[str] = []
    """The ids of tasks that are queued or leased."""
    poison: dict[str, str] = {}
    """Maps the ids of poison tasks to their errors."""
    failed: dict[str, str] = {}
    """Maps the ids of failed tasks to their errors."""
    checkpoints: list[int] = []
    """The steps whose checkpoint is complete and matches the record."""
    gone: list[int] = []
    """The steps whose checkpoint is deleted (checkpoint.keep_last)."""
    remade: list[int] = []
    """The steps whose complete checkpoint was saved after their commit, according to head.json. It
    was saved when the run was stopped, or when a resume found an incomplete checkpoint and repeated
    the step."""
    unrecorded: list[int] = []
    """The steps with a checkpoint without a record, because the run was killed before it wrote the
    record. A resume ignores it."""
    emptied: int = 0
    """The number of trajectories whose tokens `gc` deleted. Their contents can't be proven."""
    without_attempt: list[str] = []
    """The ids of completed tasks without a trajectory in the store, because the run was killed
    before it wrote them."""
    texts: dict[str, dict[str, int]] = {}
    """Maps the name of a text to a mapping from its digest to the number of trajectories that were
    played with it, including evaluations."""
    texts_gone: list[str] = []
    """The digests of texts that are missing in the run's folder."""
    images: dict[str, str] = {}
    """Maps the digest of an image to the first task or trajectory that names it."""
    stored_images: int = 0
    unproven_files: list[str] = []
    """The names of files and folders (with a `/`) in the run's folder without a record."""
    unproven_tasks: int = 0
    """The number of tasks without a record in any step. A deletion, or a change together with the
    digest, would go unnoticed."""
    unproven_attempts: int = 0
    """The number of attempts without a record in any step."""
    violations: list[AuditViolation] = []

    def add(self, what: str, step: int | None = None, trajectory: str | None = None) -> None:
        """Adds a violation."""
        self.violations.append(AuditViolation(what, step, trajectory))

    def note(self, stored: StoredTrajectory) -> None:
        """Counts the named texts of one trajectory by digest, and notes its images."""
        images = images_of_trajectory(stored.trajectory)
        self.note_images(images, f"trajectory {stored.trajectory.id}")
        for name, digest in stored.trajectory.texts.items():
            digests = self.texts.setdefault(name, {})
            digests[digest] = digests.get(digest, 0) + 1

    def note_images(self, digests: Iterable[str], owner: str) -> None:
        """Notes the images that a row names."""
        for digest in digests:
            self.images.setdefault(digest, owner)

    @property
    def ok(self) -> bool:
        return not self.violations

    def lines(self, *, dropped: bool = False) -> list[tuple[str, str]]:
        """Rows of (name, value) to print, without the violations. With `dropped`, they include the
        ids of untrained trajectories."""
        total = sum(self.ages.values())
        ages = ", ".join(
            f"{count / total:.1%} of age {age}" for age, count in sorted(self.ages.items())
        )
        named = {"whole": self.checkpoints, "no longer there": self.gone}
        named |= {"whole, saved after their step's commit": self.remade} if self.remade else {}
        named |= {"without a record": self.unrecorded} if self.unrecorded else {}
        rows = [
            (
                "steps",
                f"{self.steps} committed, from {self.trained} trajectories, each in one step"
                + (f"; {self.replayed} replays of their successes" if self.replayed else ""),
            ),
            (
                "tokens",
                f"{total:,} trained on{': ' if ages else ''}{ages}; {self.masked_tokens:,} masked",
            ),
            ("checkpoints", ", ".join(f"{len(steps)} {word}" for word, steps in named.items())),
            (
                "tasks",
                ", ".join(f"{count} {state}" for state, count in self.tasks.items() if count)
                or "none",
            ),
        ]
        if any(self.waiting.values()):
            rows.append(
                (
                    "not yet trained on",
                    ", ".join(f"{count} {state}" for state, count in self.waiting.items()),
                )
            )

        if self.emptied:
            rows.append(
                ("tokens deleted", f"{self.emptied} trajectories, by `agentevo store RUN gc`")
            )
        if self.stored_images:
            rows.append(("images", f"{self.stored_images} stored, {len(self.images)} named"))
        if self.without_attempt:
            rows.append(("without an attempt", f"{len(self.without_attempt)} completed tasks"))

        rows += [
            (f"text {name}", _list_texts(digests, self.texts_gone))
            for name, digests in sorted(self.texts.items())
        ]
        rows += [
            (f"task {name}", f"set aside as poison: {error}") for name, error in self.poison.items()
        ]
        rows += [(f"task {name}", f"failed: {error}") for name, error in self.failed.items()]
        for kind, reasons in self.reasons.items():
            counts: Counter[str] = Counter()
            for reason, ids in reasons.items():
                counts[_without_numbers(reason)] += len(ids)
            rows += [(kind, f"{count} {reason}") for reason, count in counts.most_common()]

        rows += [("not vouched for", what) for what in self._unproven()]
        if dropped:
            rows += [
                (name, f"{kind}: {why}")
                for kind, reasons in self.reasons.items()
                for why, ids in reasons.items()
                for name in ids
            ]

        return rows

    def _unproven(self) -> list[str]:
        """Rows for data that could be changed without a violation."""
        counts = {"tasks": self.unproven_tasks, "attempts": self.unproven_attempts}
        rows = [f"{what} without a record: {count}" for what, count in counts.items() if count]
        rows.append("times, leases and the calls of attempts")
        if self.unproven_files:
            rows.append(f"the files {', '.join(self.unproven_files)}")
        if self.texts_gone:
            rows.append(f"texts that are not in the folder: {', '.join(self.texts_gone)}")
        return rows


def _list_texts(digests: Mapping[str, int], gone: Collection[str]) -> str:
    """The texts with one name, the most used first."""
    return ", ".join(
        f"{digest} in {count} attempt{'s' * (count != 1)}{' (not kept)' * (digest in gone)}"
        for digest, count in sorted(digests.items(), key=lambda item: (-item[1], item[0]))
    )


def _without_numbers(reason: str) -> str:
    """The first line of a reason, without numbers. It groups reasons that differ in versions,
    seconds or lengths."""
    return _NUMBER.sub("N", next(iter(reason.strip().splitlines()), "no reason"))
