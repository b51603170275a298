"""What an audit has found: counts, reasons and violations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

_NUMBER = re.compile(r"\d+(\.\d+)?")


class AuditViolation(msgspec.Struct, frozen=True):
    """Something that the store says and can't be, or should say and doesn't."""

    what: str
    step: int | None = None
    trajectory: str | None = None

    def __str__(self) -> str:
        places = [f"step {self.step}"] if self.step is not None else []
        places += [f"trajectory {self.trajectory}"] if self.trajectory is not None else []
        return ": ".join([*places, self.what])


class Audit(msgspec.Struct, kw_only=True):
    """What the audit found."""

    steps: int = 0
    """Number of committed steps."""
    trained: int = 0
    """Number of trajectories that they were made from."""
    ages: dict[int, int] = {}
    """Age in versions -> trained tokens."""
    masked_tokens: int = 0
    """Tokens of those trajectories that were too old and therefore not trained on."""
    reasons: dict[str, dict[str, list[str]]] = {}
    """`dropped`, `failed` or `cancelled` -> reason -> ids of trajectories for training, in the
    order of writing."""
    waiting: Counter[str] = msgspec.field(default_factory=Counter)
    """`ready` and `reserved` trajectories for training."""
    tasks: dict[str, int] = {}
    """Number of tasks in each state."""
    unfinished: list[str] = []
    """Ids of tasks that are queued or leased."""
    poison: dict[str, str] = {}
    """Ids of tasks that were set aside -> error."""
    failed: dict[str, str] = {}
    """Ids of tasks that failed, with whatever was attempted of them -> error."""
    checkpoints: list[int] = []
    """Steps whose checkpoint is whole and the one that the record names."""
    gone: list[int] = []
    """Steps whose checkpoint is no longer there (checkpoint.keep_last)."""
    remade: list[int] = []
    """Steps whose checkpoint is whole, and was saved after their commit, which head.json says: when
    the run was stopped, or when a resume had found the first one torn and done the step again."""
    unrecorded: list[int] = []
    """Steps with a checkpoint that nothing has a record of: a kill came between. A resume leaves it
    out."""
    emptied: int = 0
    """Trajectories whose tokens `gc` has deleted: their contents can't be proven."""
    without_attempt: list[str] = []
    """Ids of completed tasks that the store has no trajectory of: a kill came before they were
    written."""
    texts: dict[str, dict[str, int]] = {}
    """Name of a text -> digest -> trajectories that were played with it, evaluations included."""
    texts_gone: list[str] = []
    """Digests of those that the run's folder does not hold."""
    unproven_files: list[str] = []
    """Names of files and folders (with a `/`) in the run's folder that no record holds."""
    unproven_tasks: int = 0
    """Tasks that no step's record holds: whether one was deleted, or changed together with its
    digest, is not known."""
    unproven_attempts: int = 0
    """Such attempts."""
    violations: list[AuditViolation] = []

    @property
    def ok(self) -> bool:
        return not self.violations

    def lines(self, *, dropped: bool = False) -> list[tuple[str, str]]:
        """Rows of (what, value) to print, without the violations. With `dropped`, the ids of what
        was not trained on are among them."""
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
                f"{self.steps} committed, from {self.trained} trajectories, each in one step",
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
            rows.append(("tokens deleted", f"{self.emptied} trajectories, by `agentevo store gc`"))
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
        """What could be changed without a violation."""
        counts = {"tasks": self.unproven_tasks, "attempts": self.unproven_attempts}
        rows = [f"{what} without a record: {count}" for what, count in counts.items() if count]
        rows.append("times, leases and the calls of attempts")
        if self.unproven_files:
            rows.append(f"the files {', '.join(self.unproven_files)}")
        if self.texts_gone:
            rows.append(f"texts that are not in the folder: {', '.join(self.texts_gone)}")
        return rows


def _list_texts(digests: Mapping[str, int], gone: Collection[str]) -> str:
    """Which texts of one name there were, most used first."""
    return ", ".join(
        f"{digest} in {count} attempt{'s' * (count != 1)}{' (not kept)' * (digest in gone)}"
        for digest, count in sorted(digests.items(), key=lambda item: (-item[1], item[0]))
    )


def _without_numbers(reason: str) -> str:
    """The first line of a reason: what reasons have in common that differ in versions, seconds and
    lengths."""
    return _NUMBER.sub("N", next(iter(reason.strip().splitlines()), "no reason"))
