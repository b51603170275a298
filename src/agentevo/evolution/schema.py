"""The section `evolve`, which `agentevo evolve` reads in addition to the keys of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.config.section import ONE_OR_MANY, Section

OF_SERVERS = ("server", "api_key", "include", "exclude", "outcome")
OF_SERVERS_TASKS = (
    "worlds",
    "max_calls",
    "min_difficulty",
    "max_difficulty",
    "kinds",
    "personas",
    "values",
)
"""Keys that mean nothing for documents."""


class TasksToMake(Section):
    """The tasks of the first round (docs/evolve.md)."""

    train: int = Field(default=200, ge=1, le=100_000)
    """Tasks to train on."""
    held_out: int = Field(default=64, ge=1, le=100_000)
    """Held-out tasks, the same in every stage and round."""
    worlds: int = Field(default=1, ge=1, le=1_000_000)
    """For a server that makes its state from `world` of the task: how many worlds there are."""
    per_passage: int = Field(default=2, ge=1, le=100)
    """Of documents: tasks of a passage at most."""
    writer: str | None = None
    """A model that says the tasks of a server in its own words, and that asks questions about
    documents: a name of remote_models, URL#MODEL, or as in model.name a model that is computed
    here. Default: a grammar's words."""
    max_calls: int = Field(default=4, ge=1, le=12)
    """Calls that a task needs at most."""
    min_difficulty: int = Field(default=1, ge=1, le=5)
    """The easiest tasks."""
    max_difficulty: int = Field(default=5, ge=1, le=5)
    """The hardest tasks of the first round; later ones may be harder."""
    kinds: tuple[Literal["state", "answer", "open"], ...] = ("state", "answer")
    """What decides: the state that calls leave, what is said, or (`open`, for what varies) the
    recipe's `rewards`, such as a judge of groups."""
    languages: tuple[str, ...] = ("en",)
    """Languages of the tasks: en, de, zh."""
    personas: tuple[str, ...] = ("",)
    """Who asks: hurried, polite, newcomer, or "" for nobody in particular."""
    values: dict[str, list[Any]] = Field(default_factory=dict)
    """Values of parameters, by name, beside those that the server shows."""
    seed: int = Field(default=0, ge=0)
    """Of all draws."""


class DemonstrationsSection(Section):
    """What the policy reads before it learns from reward."""

    source: Literal["calls", "attempts", "teacher", "none"] = "calls"
    """`calls`: the calls by which tasks were made, which solve them. `attempts`: the policy's own
    attempts that succeeded (rejection sampling), for one that solves some. `teacher`: those of
    another model, which plays the same tasks. `none`: no fine-tuning."""
    teacher: str | None = None
    """Who plays for `teacher`: a name of remote_models, or URL#MODEL."""
    tries: int = Field(default=1, ge=1, le=256)
    """Attempts of the teacher at each task; of those that succeeded one is shown."""
    count: int = Field(default=200, ge=1, le=100_000)
    """Conversations of `calls`."""
    steps: int = Field(default=4, ge=1)
    """Steps of `attempts` that are sampled, of trainer.groups_per_step groups."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What the fine-tuning changes in the recipe, such as {sft: {learning_rate: 1e-4}}."""


class PromptsSection(Section):
    """Better texts for the same weights, after each round's learning from reward: the system
    prompt, the instruction, examples, and descriptions of tools (docs/prompts.md)."""

    attempts: int = Field(default=0, ge=0, le=1_000_000)
    """Most attempts of a round's search. 0: texts stay as they are."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What the search changes in the recipe, such as {optimize: {method: gepa, writer: big}}."""


class EvolveSection(Section):
    """Discover, make tasks, demonstrate, fine-tune, learn from reward, make tasks at the edge of
    what is solved, and again, until rounds bring nothing or a budget is used."""

    server: str | None = None
    """URL of an MCP server, or a command that starts one. Default: the recipe's agent.tools."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds the key for a `server` at a URL."""
    documents: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], ONE_OR_MANY] = ()
    """Texts, corpora (.jsonl) or folders of them, in place of a server: the tasks are questions
    that they answer, and the agent gets the tool `search` over them."""
    include: tuple[str, ...] = ()
    """Names or patterns of the tools that are used. Default: all."""
    exclude: tuple[str, ...] = ()
    """Names or patterns of those that are not: neither called nor trained with."""
    outcome: str | None = None
    """A tool of the server that says what an attempt is worth by its state, beside the tasks' own
    checks; the policy does not see it."""
    tasks: TasksToMake = TasksToMake()
    """The tasks that are made."""
    demonstrations: DemonstrationsSection = DemonstrationsSection()
    """What is read before learning from reward."""
    rounds: int = Field(default=3, ge=1, le=1000)
    """Rounds of learning from reward, each with tasks of its own."""
    new_tasks: int = Field(default=100, ge=0, le=100_000)
    """Tasks that each further round gets: harder variants of those that were solved, or where none
    were new ones. 0: the tasks stay."""
    prompts: PromptsSection = PromptsSection()
    """Texts that are searched for in each round, by turns with the weights."""
    patience: int = Field(default=2, ge=1)
    """Rounds in a row without a gain on the held-out tasks that end it."""
    min_gain: float = Field(default=0.0, ge=0, lt=1)
    """What counts as a gain: more than this, as a share of the held-out tasks."""
    budget: dict[str, float] = Field(default_factory=dict)
    """`hours`, `tokens` or `cost` after which no stage begins."""
    seeds: tuple[int, ...] = ()
    """Runs the stages once with each of these, on the same tasks. Default: run.seed."""
    merge: bool | None = None
    """Whether adapters are merged into one plain model at the end. Default: with model.lora."""
    skip: tuple[str, ...] = ()
    """Stages that are left out: try, choose, show, prompts, improve, merge."""

    @model_validator(mode="after")
    def _a_teacher_where_there_is_one(self) -> Self:
        shown = self.demonstrations
        if (shown.source == "teacher") != (shown.teacher is not None):
            raise ValueError(
                "demonstrations: source=teacher and teacher=NAME belong together: give both"
            )
        return self

    @model_validator(mode="after")
    def _a_server_or_documents(self) -> Self:
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
                f"{server_keys[0]} is for a server, and documents are given: leave one out"
            )
        if len(self.tasks.languages) > 1:
            raise ValueError("tasks.languages: questions about documents are asked in one language")

        return self

    @field_validator("budget")
    @classmethod
    def _known_budgets(cls, value: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(value) - {"hours", "tokens", "cost"})
        if unknown:
            raise ValueError(f"there is no {unknown[0]}: give hours, tokens or cost")
        return value
