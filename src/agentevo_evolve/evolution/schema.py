"""The section `evolve`, which `agentevo evolve` reads in addition to the keys of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.runtime.section import ONE_OR_MANY, Section

OF_SERVERS = ("server", "api_key", "include", "exclude", "outcome")
OF_SERVERS_TASKS = (
    "worlds",
    "max_calls",
    "min_difficulty",
    "max_difficulty",
    "kinds",
    "personas",
    "values",
    "write_scenarios",
)
"""Keys that have no effect for documents."""


class TasksToMake(Section):
    """The tasks of the first round (docs/evolve.md)."""

    train: int = Field(default=200, ge=1, le=100_000)
    """The number of tasks to train on."""
    held_out: int = Field(default=64, ge=1, le=100_000)
    """The number of held-out tasks, which are the same in every stage and round."""
    worlds: int = Field(default=1, ge=1, le=1_000_000)
    """The number of worlds, for a server that makes its state from the task's `world`."""
    per_passage: int = Field(default=2, ge=1, le=100)
    """For documents: the maximum number of tasks of a passage."""
    writer: str | None = None
    """A model that rewords the tasks of a server, and writes the questions about documents: a name
    of remote_models, URL#MODEL, or a local model as in model.name. Default: a grammar writes
    them."""
    write_scenarios: bool = False
    """Whether the writer also proposes the first tasks for a server, with the calls that solve
    them. Each is tried, and what is missing is made without it."""
    max_calls: int = Field(default=4, ge=1, le=12)
    """The maximum number of calls that a task needs."""
    min_difficulty: int = Field(default=1, ge=1, le=5)
    """The lowest difficulty."""
    max_difficulty: int = Field(default=5, ge=1, le=5)
    """The highest difficulty in the first round. Later rounds can have harder tasks."""
    kinds: tuple[Literal["state", "answer", "open"], ...] = ("state", "answer")
    """What decides the reward: the final state, the answer, or the recipe's `rewards` (`open`, for
    results that vary), such as a judge of groups."""
    languages: tuple[str, ...] = ("en",)
    """The languages of the tasks: en, de, zh."""
    personas: tuple[str, ...] = ("",)
    """The personas of the user: hurried, polite, newcomer, or "" for none."""
    values: dict[str, list[Any]] = Field(default_factory=dict)
    """Values of parameters, by name, in addition to those that the server shows."""
    seed: int = Field(default=0, ge=0)
    """The seed of all random choices."""

    @model_validator(mode="after")
    def _check_writer(self) -> Self:
        if self.write_scenarios and self.writer is None:
            raise ValueError("write_scenarios needs a model that writes: give writer")
        return self


class DemonstrationsSection(Section):
    """The demonstrations that the policy is fine-tuned on before it learns from reward."""

    source: Literal["calls", "attempts", "teacher", "none"] = "calls"
    """`calls`: the calls that the tasks were made from, which solve them. `attempts`: the policy's
    own successful attempts (rejection sampling), for a policy that solves some tasks. `teacher`:
    the successful attempts of another model at the same tasks. `none`: no fine-tuning."""
    teacher: str | None = None
    """The model of `teacher`: a name of remote_models, or URL#MODEL."""
    tries: int = Field(default=1, ge=1, le=256)
    """The number of the teacher's attempts at each task. One of the successful ones is used."""
    count: int = Field(default=200, ge=1, le=100_000)
    """The number of conversations of `calls`."""
    steps: int = Field(default=4, ge=1)
    """The number of sampled steps of `attempts`, each of trainer.groups_per_step groups."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe for the fine-tuning, such as {sft: {learning_rate: 1e-4}}."""


class PromptsSection(Section):
    """Better texts for the same weights, after each round's learning from reward: the system
    prompt, the instruction, examples, and descriptions of tools (docs/prompts.md)."""

    attempts: int = Field(default=0, ge=0, le=1_000_000)
    """The maximum number of attempts of a round's search. 0: no search."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe for the search, such as {optimize: {method: gepa, writer: big}}."""


class EvolveSection(Section):
    """Explores the tools, makes tasks, fine-tunes on demonstrations, learns from reward, makes
    harder tasks, and repeats. It ends when rounds bring no gain or the budget is used up."""

    server: str | None = None
    """The URL of an MCP server, or a command that starts one. Default: the recipe's agent.tools."""
    api_key: str | None = None
    """`${env:NAME}`: the environment variable with the key of a `server` at a URL."""
    documents: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], ONE_OR_MANY] = ()
    """Texts, corpora (.jsonl) or folders of them, in place of a server. The tasks are questions
    about them, and the agent gets the tool `search` over them."""
    include: tuple[str, ...] = ()
    """Names or patterns of the tools to use. Default: all."""
    exclude: tuple[str, ...] = ()
    """Names or patterns of tools to leave out. They are neither called nor trained with."""
    outcome: str | None = None
    """A tool of the server that scores the final state of an attempt, in addition to the tasks' own
    checks. The policy does not see it."""
    tasks: TasksToMake = TasksToMake()
    """The tasks to make."""
    demonstrations: DemonstrationsSection = DemonstrationsSection()
    """The demonstrations before learning from reward."""
    rounds: int = Field(default=3, ge=1, le=1000)
    """The number of rounds of learning from reward, each with its own tasks."""
    new_tasks: int = Field(default=100, ge=0, le=100_000)
    """The number of tasks of each further round: harder variants of solved tasks, or new tasks if
    none was solved. 0: keep the tasks."""
    prompts: PromptsSection = PromptsSection()
    """The search for better texts in each round, in turn with the training of the weights."""
    patience: int = Field(default=2, ge=1)
    """The evolution ends after this many rounds in a row without a gain on the held-out tasks."""
    min_gain: float = Field(default=0.0, ge=0, lt=1)
    """The smallest gain that counts, as a share of the held-out tasks. A gain must be larger than
    this."""
    budget: dict[str, float] = Field(default_factory=dict)
    """The limits in `hours`, `tokens` or `cost`. Beyond a limit, no further stage starts."""
    seeds: tuple[int, ...] = ()
    """Run the stages once with each of these seeds, on the same tasks. Default: run.seed."""
    merge: bool | None = None
    """Merge adapters into one plain model at the end. Default: true with model.lora."""
    skip: tuple[str, ...] = ()
    """Stages to skip: try, choose, show, prompts, improve, merge."""

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        shown = self.demonstrations
        if (shown.source == "teacher") != (shown.teacher is not None):
            raise ValueError(
                "demonstrations: source=teacher and teacher=NAME belong together: give both"
            )
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if not self.documents:
            return self

        server_keys = [name for name in OF_SERVERS if name in self.model_fields_set]
        server_keys += [
            f"tasks.{task_key}"
            for task_key in OF_SERVERS_TASKS
            if task_key in self.tasks.model_fields_set
        ]
        if server_keys:
            raise ValueError(
                f"{server_keys[0]} needs a server, but documents are given: leave one out"
            )
        if len(self.tasks.languages) > 1:
            raise ValueError("tasks.languages: give one language for questions about documents")

        return self

    @field_validator("budget")
    @classmethod
    def _check_budgets(cls, value: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(value) - {"hours", "tokens", "cost"})
        if unknown:
            raise ValueError(f"{unknown[0]} is not known: give hours, tokens or cost")
        return value
