"""Tasks from rows (`tasks` in a recipe). Every process of a run reads the same tasks. The reader
leaves out an unusable row and reports its place and the reason, or it refuses the whole file. A
held-out task that is also a task to train on is such an unusable row. RUN/tasks.json records the
tasks that a run began with. A run can't continue with other tasks, even if they have the same
paths.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from agentevo.agents.agent import make_player
from agentevo.agents.attempt_files import given_files
from agentevo.agents.tools.state_checks import state_checks
from agentevo.config import RunConfig
from agentevo.config.agents import AgentSection, CodeAgentSection
from agentevo.config.self_play import PROPOSES
from agentevo.config.tasks import TaskFields, TasksSection
from agentevo.data import RowError, RowReport, check_source
from agentevo.data.conversation import check_no_media, check_text
from agentevo.data.message_images import ImageCollector, folder_of, place_images
from agentevo.data.messages import messages_of
from agentevo.data.rows import read_rows
from agentevo.data.spooled_images import SpooledImages
from agentevo.data.task_forms import AGENT_NAME, PlainRow, plain_row
from agentevo.errors import BadRequestError, ConfigError, describe_error, shown
from agentevo.rewards.answer_texts import ANSWER_SCHEMA, check_place
from agentevo.runtime.files import create_atomic
from agentevo.runtime.parsing import read_json_object
from agentevo.runtime.paths import short
from agentevo.types import QUERY_MESSAGES, QUEUED_ATTEMPTS, QUEUED_FOR_STEP, Task
from agentevo.types.images import ImageFile

ID_KEYS = ("id", "task_id")
SCORER_KEYS = ("scorer",)
RESERVED_KEYS = {
    QUERY_MESSAGES: "a query that is a list of messages",
    QUEUED_FOR_STEP: "the step that a task is queued for",
    QUEUED_ATTEMPTS: "the number of attempts at a queued task",
    PROPOSES: "the step that a proposer is asked for",
}
TASKS_FILE = "tasks.json"
BAD_ROWS = "bad_rows.jsonl"


class TaskList(list[Task]):
    """Tasks that a program gives, with the images that they name."""

    def __init__(self, tasks: Iterable[Task] = (), images: Mapping[str, ImageFile] | None = None):
        super().__init__(tasks)
        self.images: Mapping[str, ImageFile] = {} if images is None else images
        """Maps a digest to the image."""


def images_of_list(tasks: Sequence[Task] | None) -> Mapping[str, ImageFile]:
    """The images of a TaskList. Empty for other lists."""
    return tasks.images if isinstance(tasks, TaskList) else {}


@dataclass(frozen=True)
class GivenTasks:
    """The tasks that were read, with the reports on their rows."""

    train: list[Task]
    held_out: list[Task]
    """Empty if the recipe names no held-out tasks."""
    reports: list[RowReport]
    sizes: tuple[int, ...] = ()
    """The number of tasks to train on from each source, in the order of the sources."""
    held_out_sizes: tuple[int, ...] = ()
    """The number of held-out tasks from each source, in the order of the sources."""
    images: Mapping[str, ImageFile] = field(default_factory=dict)
    """Maps a digest to an image that tasks name, for `Store.put_images` before the tasks are
    added."""

    @property
    def digest(self) -> str:
        """The digest of all tasks, in order."""
        return hashlib.sha256(msgspec.json.encode([self.train, self.held_out])).hexdigest()


def read_tasks(
    section: TasksSection,
    agent: AgentSection | None = None,
    *,
    train_key: str = "tasks.train",
) -> GivenTasks:
    """Reads tasks that the agent in the section `agent` can use, with the images of their rows.
    `train_key`: the name of the training tasks in messages. Raises ConfigError for sources that
    can't be read, for sources without a usable row, and for a bad row if the recipe does not allow
    bad rows."""
    for key, sources in ((train_key, section.train), ("tasks.eval", section.eval)):
        for source in sources:
            check_source(source, key)

    reports = [RowReport(train_key), RowReport("tasks.eval")]
    images = ImageCollector(files=SpooledImages())
    read = partial(_read_source, section.fields, {}, isinstance(agent, CodeAgentSection), images)
    by_source = [read(reports[0], source) for source in section.train]
    train = [task for tasks in by_source for task in tasks]
    held_by_source = [read(reports[1], source) for source in section.eval]
    held_out = [task for tasks in held_by_source for task in tasks]
    reports = [report for report in reports if report.rows]
    lines = [line for report in reports for line in report.lines()]
    no_train = not train and section.self_play is None
    if no_train or (section.eval and not held_out):
        which = train_key if no_train else "tasks.eval"
        raise ConfigError("\n".join([f"{which}: no row is a task", *lines]))

    if any(report.bad for report in reports) and not section.allow_bad_rows:
        raise ConfigError("\n".join(["tasks: tasks.allow_bad_rows is false", *lines]))

    empty = [s for s, tasks in zip(section.train, by_source, strict=True) if not tasks]
    if section.weights and empty:
        raise ConfigError("\n".join([f"tasks.weights: no row of {empty[0]} is a task", *lines]))

    sizes, held_sizes = (tuple(map(len, pools)) for pools in (by_source, held_by_source))
    return GivenTasks(train, held_out, reports, sizes, held_sizes, images.files)


def _read_source(
    fields: TaskFields,
    taken: dict[str, str],
    has_files: bool,
    images: ImageCollector,
    report: RowReport,
    source: str,
) -> list[Task]:
    """`taken`: maps an id to the place where the task with that id was read. `has_files`: whether
    the agent receives a task's files. `images`: reads the images of rows."""
    images.folder = folder_of(source)
    tasks = []
    for row in read_rows(source):
        report.rows += 1
        try:
            task = task_of(row.value, fields, images=images)
            if task.id in taken:
                raise RowError(
                    "duplicate_task",
                    f"{task.id!r} is already the id of the task of {taken[task.id]}",
                )
            if has_files:
                _check_files(task)
        except RowError as error:
            report.add(row.where, error)
            continue

        taken[task.id] = row.where
        tasks.append(task)
        if task.answer in (None, []):
            report.unanswered.append(row.where)

    return tasks


def _check_files(task: Task) -> None:
    try:
        given_files(task)
    except ConfigError as error:
        raise RowError("unknown_form", str(error)) from error


def task_of(
    row: Any,
    fields: TaskFields,
    form: str = "auto",
    remedy: str = "set tasks.fields.{}",
    images: ImageCollector | None = None,
) -> Task:
    """Converts a row to a task. `form`: which form's column names apply (data/task_forms.py) if
    `fields` does not name the columns. `remedy`: what a message proposes if the row lacks a field.
    `images`: reads the row's images; without it, a row with images is refused. Raises RowError."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError("unknown_form", f"a {type(row).__name__}: a task is an object with keys")

    check_text(row)
    check_no_media(row, may_have_images=images is not None)
    for key, meaning in RESERVED_KEYS.items():
        if key in row:
            raise RowError(
                "unknown_form", f"the key {key} is reserved for {meaning}: rename the column"
            )

    is_named = fields.query is not None or fields.answer is not None
    columns, query_keys, answer_keys = PlainRow(dict(row)) if is_named else plain_row(row, form)
    query = _pop_value(columns, fields.query, query_keys, "query", remedy, needed=True)
    answer = _pop_value(columns, fields.answer, answer_keys, "answer", remedy)
    name = _pop_value(columns, fields.id, ID_KEYS, "id", remedy)
    scorer = _pop_value(columns, fields.scorer, SCORER_KEYS, "scorer", remedy)

    content = row
    if images is not None:
        query_of_row = query
        query = place_images(query, columns, images)
        if query is not query_of_row:  # named by the digests of its images, not by their form
            content = {"query": query, "answer": answer, **columns}

    metadata = columns
    if isinstance(query, list):
        metadata = {**columns, QUERY_MESSAGES: query}
        query = _last_text(query)

    if not isinstance(query, str) or not query.strip():
        raise RowError("empty", f"the query is {query!r}: it must be a text that is not empty")

    _check_metadata(metadata)
    if isinstance(name, (dict, list, bool)) or name == "":
        raise RowError("unknown_form", f"the id is {name!r}: it must be a text or a number")

    return Task(
        id=content_id(content) if name is None else str(name),
        query=query,
        answer=_to_json_data({"answer": answer})["answer"],
        scorer=_scorer(scorer),
        metadata=_to_json_data(metadata),
    )


def _scorer(value: Any) -> str | None:
    """The name of a scorer, or the names of several scorers in one text."""
    if value is None:
        return None

    names = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(names, list) and bool(names)
    if is_list and all(isinstance(name, str) and name.strip() for name in names):
        names = [name.strip() for name in names]
        if len(set(names)) == len(names):
            return ",".join(names)

    raise RowError(
        "unknown_form", f"the scorer is {value!r}: it must be a name, or a list of different ones"
    )


def _check_metadata(metadata: dict[str, Any]) -> None:
    """Raises RowError if the place of the answer, the name of the agent, or the checks of the state
    are malformed."""
    place = metadata.get(ANSWER_SCHEMA)
    agent = metadata.get(AGENT_NAME)
    try:
        if place is not None:
            check_place(place if isinstance(place, str) else repr(place))
    except ValueError as error:
        raise RowError("unknown_form", f"{ANSWER_SCHEMA}: {error}") from error

    if agent is not None and not (isinstance(agent, str) and agent.strip()):
        raise RowError("unknown_form", f"the {AGENT_NAME} is {agent!r}: it must be a name")

    try:
        state_checks(metadata)
    except ValueError as error:
        raise RowError("unknown_form", str(error)) from error


def content_id(row: Any) -> str:
    """The id of a row without an id of its own. It depends only on the row's content."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pop_value(
    row: dict[str, Any],
    key: str | None,
    names: tuple[str, ...],
    what: str,
    remedy: str,
    *,
    needed: bool = False,
) -> Any:
    """Removes a value from the row and returns it. The value is that of the named key, or of the
    first of `names` that the row has. A null is skipped if another of the keys has a value. `what`:
    the task's field that the value becomes."""
    present = [name for name in ([key] if key is not None else names) if name in row]
    if present:
        return row.pop(next((name for name in present if row[name] is not None), present[0]))

    if needed or key is not None:
        missing = key if key is not None else f"one of {', '.join(names)}"
        raise RowError(
            "unknown_form",
            f"no {what}: it has no key {missing}, only {', '.join(map(str, row)) or 'none'}: "
            f"{remedy.format(what)}",
        )

    return None


def _last_text(messages: list[Any]) -> str:
    """The text of the user's last message in a list of chat messages. Raises RowError if the list
    is not a chat that ends with such a message."""
    try:
        chat = messages_of(messages)
    except BadRequestError as error:
        raise RowError(
            "unknown_form", f"the query is a list, but no chat messages ({error})"
        ) from error

    texts = [message.text for message in chat if message.role == "user"]
    if not texts or chat[-1].role == "assistant":
        raise RowError("wrong_roles", "the chat must end with a message of the user, as text")

    return texts[-1]


def _to_json_data(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata as JSON can represent it, because the store keeps tasks as JSON (Parquet has
    dates, bytes and more)."""
    plain: dict[str, Any] = json.loads(json.dumps(metadata, default=str))
    return plain


def check_and_report(config: RunConfig, tasks: GivenTasks, note: Callable[[str], None]) -> None:
    """Checks at a trainer's start that the tasks are those that the run began with. Reports the
    rows that are left out, and lists all of them in RUN/bad_rows.jsonl."""
    check_same_tasks(config, tasks)
    (config.run_dir / BAD_ROWS).unlink(missing_ok=True)
    for report in tasks.reports:
        if report.bad:
            report.write(config.run_dir / BAD_ROWS)
        for line in report.lines():
            note(line)


def check_same_tasks(config: RunConfig, tasks: GivenTasks) -> None:
    """Records the tasks in the run's folder, or compares them with an existing record. Raises
    ConfigError if the tasks and the record differ."""
    record = config.run_dir / TASKS_FILE
    now = {"digest": tasks.digest, "train": len(tasks.train), "eval": len(tasks.held_out)}
    if not record.is_file():
        create_atomic(record, json.dumps(now))

    before = read_json_object(record)
    if before.keys() != now.keys():
        raise ConfigError(f"{record}: is damaged: it has other keys: restore or delete it")

    if before != now:
        source = ", ".join((*config.tasks.train, *config.tasks.eval)) or "what the agent plays"
        raise ConfigError(
            f"tasks: the run in {short(config.run_dir)} began with {before['train']} "
            "tasks to train on "
            f"and {before['eval']} held-out ones, and they are others now ({now['train']} and "
            f"{now['eval']}): restore {source}, or give another run.dir"
        )


def tasks_of_agent(section: AgentSection) -> GivenTasks:
    """The tasks that the agent of that section provides, for example from a dataset with its own
    environment: a registered class with `brings_tasks = True` has a method `tasks()`. It returns
    the tasks to train on and the held-out tasks, as lists of `agentevo.Task` or of mappings like
    the rows of a task file. Without held-out tasks, some of the tasks to train on are held out.
    Every process of a run calls the method, so it must return the same tasks every time. Raises
    ConfigError if it raises, or returns anything else."""
    player = make_player(section)
    where = f"agent.type: {section.type}: {type(player).__name__}.tasks()"
    try:
        train, held_out = player.tasks()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where}: {describe_error(error)}: it must return the tasks to train on and the "
            "held-out ones"
        ) from error

    train_tasks = checked_tasks(train, where)
    held_out_tasks = checked_tasks(held_out, where)
    check_unique([*train_tasks, *held_out_tasks], where)
    images = SpooledImages()
    images.update(train_tasks.images)
    images.update(held_out_tasks.images)
    return GivenTasks(train_tasks, held_out_tasks, [], images=images)


def checked_tasks(rows: Any, where: str) -> TaskList:
    """Tasks as records; a mapping is read like a row of a file, with its images. `where` is the
    name of the list in messages. Raises ConfigError for anything else than a list of tasks."""
    if isinstance(rows, TaskList):
        return rows
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise ConfigError(f"{where}: {shown(rows)}: give a list of tasks")

    images = ImageCollector(files=SpooledImages())
    tasks = TaskList()
    for index, row in enumerate(rows):
        try:
            if isinstance(row, Task):
                tasks.append(row)
                continue
            plain = dict(row) if isinstance(row, Mapping) else row
            tasks.append(task_of(plain, TaskFields(), images=images))
        except RowError as error:
            raise ConfigError(f"{where}[{index}]: {error}") from error

    tasks.images = images.files
    return tasks


def check_unique(tasks: Sequence[Task], where: str) -> None:
    """Raises ConfigError for an id that several tasks have."""
    counts = Counter(task.id for task in tasks)
    repeated = next((name for name, times in counts.items() if times > 1), None)
    if repeated is not None:
        raise ConfigError(
            f"{where}: the id {repeated!r} is there {counts[repeated]} times: give each task an id "
            "of its own"
        )
