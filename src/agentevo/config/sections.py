"""Sections of a recipe that need no module of their own. Every default is a tested setting,
documented under its field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from agentevo.config.parallel import ParallelSection
from agentevo.config.sft import ConversationKeys, FileOrFolder
from agentevo.runtime.credentials import without_password
from agentevo.runtime.section import Section, expand_home
from agentevo.types import (
    LARGEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    MAX_STOP_STRING,
    MAX_STOP_STRINGS,
)

Rate = Annotated[float, Field(ge=0, lt=1)]


class RunSection(Section):
    """Name, folder and seed of the run."""

    name: str = "run"
    """Name of the run, used in reports and for its folder. In a recipe file the default is the
    file's name."""
    dir: Annotated[Path | None, expand_home("give a folder, for example runs/my-run")] = None
    """Folder of the run (config, metrics, report, checkpoints, store). Default: runs/NAME."""
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    """Seed of every random choice of the run: weights of a tiny policy, tasks, sampling, order."""
    overwrite: bool = False
    """Delete an existing run in the folder first, including its data in an external store
    (`store.url`). If false, an existing run is refused, unless it is resumed."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads for tensor work. Default: PyTorch's own choice."""

    @field_validator("name")
    @classmethod
    def _a_file_name(cls, value: str) -> str:
        if len(value.encode()) > 200:
            raise ValueError(
                f"has {len(value.encode()):,} bytes; the name becomes a folder: give at most 200"
            )

        if not re.fullmatch(r"\w[\w.+-]*", value):
            raise ValueError(
                f"got {value!r}; the name becomes a folder: use letters, digits, and `_ . + -` "
                "after the first"
            )

        return value


class SamplingSection(Section):
    """How completions are sampled during training."""

    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE, le=LARGEST_TEMPERATURE)
    """Softmax temperature; the trainer uses the same."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of one turn's completion, in tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling mass. Training needs 1: a truncated distribution makes the importance ratio
    biased."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all. Training needs 0."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens of at least this share of the top probability. Training needs 0."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, in addition to the model's end-of-turn token."""

    @field_validator("stop")
    @classmethod
    def _engines_take_them(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_STRING for text in value):
            raise ValueError(
                f"give at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_STRING} characters"
            )
        return value


MAX_ATTEMPTS_PER_STEP = 2**20
"""All attempts of a step are in memory at its end."""


class TrainerSection(Section):
    """How trajectories become updates: steps, batches, AdamW."""

    steps: int = Field(default=40, ge=0)
    """RL steps. Each samples groups and updates the policy."""
    groups_per_step: int = Field(default=4, ge=1, le=MAX_ATTEMPTS_PER_STEP)
    """Tasks sampled per step."""
    group_size: int = Field(default=8, ge=1, le=MAX_ATTEMPTS_PER_STEP)
    """Attempts per task. They form the group whose members are compared."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=2, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, down to min_lr_ratio at the last step."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a share of the peak, for linear and cosine."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay, applied to matrices only."""
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch over one batch of trajectories."""
    epochs: int = Field(default=1, ge=0)
    """Passes over each batch of trajectories. 0 disables training: attempts are sampled, scored and
    stored, for `data.best_of` and `data.pairs_from` of another run."""
    micro_batch_tokens: int = Field(default=16384, ge=64)
    """Maximum number of distinct tokens in one forward and backward pass. The result does not
    depend on it, except for the loss of `router_aux_loss_coef`."""
    optimizer_from: Path | None = None
    """Folder of a checkpoint whose optimizer state (AdamW's moments) this run continues with. The
    learning rate starts its own schedule. Set model.name to the same checkpoint, whose weights the
    run starts from. Default: a new optimizer."""
    compute: Literal["auto", "tree", "rows"] = "auto"
    """How the model is computed. `tree`: AgentEvo's attention over packed sequences that share
    prefixes. `rows`: the model's own forward pass, a sequence per row. `auto`: tree, or rows for
    models that the tree would compute differently from transformers. docs/architectures.md"""
    prefix_merging: bool = True
    """Compute a common prefix of several samples only once. The result does not depend on it,
    except for the loss of `router_aux_loss_coef`, because it changes the micro-batches. If false,
    every sample is computed in full, as in most trainers; this is slower, and useful for
    comparison."""
    torch_compile: bool = True
    """On a GPU, fuse the kernels of decoder layers with torch.compile: steps are faster and use
    less memory. The first step compiles for tens of seconds. No effect on a CPU, or for layers with
    experts, adapters, `trainer.parallel` or memory.offload_activations."""
    routing_replay: Literal["none", "rollout", "update"] = "none"
    """Which experts of a mixture the trainer's passes use: the router's current choice (`none`),
    the experts that the engine chose when it sampled each token (`rollout`, the R3 of arXiv
    2510.11370), or those of the pass that computes the old log-probs (`update`, verl's R2; needs
    algorithm.old_logprobs=recomputed). docs/training.md"""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Coefficient of a load-balancing loss of the routers of a mixture of experts, which keeps
    experts in use. 0 adds none, whatever the model's config.json says. docs/training.md"""
    parallel: ParallelSection = ParallelSection()
    """How the training processes share the work."""

    @model_validator(mode="after")
    def _fits_in_memory(self) -> Self:
        attempts = self.groups_per_step * self.group_size
        if attempts > MAX_ATTEMPTS_PER_STEP:
            raise ValueError(
                f"groups_per_step={self.groups_per_step} and group_size={self.group_size} make "
                f"{attempts:,} attempts a step, which are all in memory at its end: choose "
                f"smaller values, {MAX_ATTEMPTS_PER_STEP:,} attempts at most"
            )

        return self


class CriticSection(Section):
    """The critic, trained if the advantage needs values (gae, turn_gae, bi_level_gae)."""

    trunk: Literal["own", "shared"] = "own"
    """`own`: a second model, at first a copy of the policy; `shared`: a head on the policy's last
    hidden states."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic's AdamW (with a shared trunk: of the head's)."""
    clip: float | None = Field(default=0.2, gt=0)
    """Clip range of the value loss: how far a value can move from its value at the step's start
    before the loss becomes pessimistic. None does not clip."""
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss in the policy's loss, with a shared trunk."""
    pretrain_steps: int = Field(default=0, ge=0)
    """RL steps at the beginning that train only the critic, on plain returns (value pretraining,
    VC-PPO, arXiv 2503.01491)."""


class ProcessRewardSection(Section):
    """PRIME's process reward, learned online from outcomes if the advantage needs it (prime)."""

    beta: float = Field(default=0.05, gt=0)
    """Token reward per nat of log-ratio."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW for the process reward."""


class RewardModelSection(Section):
    """A reward model for single tokens, in addition to the environment's rewards. Off if name is
    None."""

    name: str | None = None
    """A token-classification model with one output and the policy's tokenizer: a local folder or a
    Hugging Face hub name."""
    coef: float = Field(default=1.0)
    """Factor of its output."""
    at: Literal["all", "last"] = "all"
    """Which tokens it scores: every trained token, or the last token of each sample."""


class DataSection(ConversationKeys, Section):
    """Given training data instead of sampled attempts. `agentevo train` trains on `pairs` or
    `pairs_from` by a preference loss (algorithm.name=dpo and similar presets). It samples only in
    evaluations. Each step uses trainer.groups_per_step lines or groups, and the order is shuffled
    again in each pass. The other keys are the conversations of `agentevo sft`."""

    pairs: FileOrFolder = None
    """A JSONL file, each line {"prompt": [messages], "chosen": ..., "rejected": ...} or {"prompt":
    [messages], "completion": ..., "label": true}. An answer is a text or a list of messages. The
    file is searched next to the recipe, then in the current folder."""
    pairs_from: FileOrFolder = None
    """Folder of a run. Pairs are made from its stored training groups."""

    @property
    def given(self) -> bool:
        """Whether preferences are given."""
        return self.pairs is not None or self.pairs_from is not None


class ColdStartSection(Section):
    """Supervised training on demonstrations by the environment's solver, before RL. Off if episodes
    is 0."""

    episodes: int = Field(default=0, ge=0)
    """Number of demonstration episodes. The solver plays them on separate seeds."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the demonstrations."""
    until_loss: float = Field(default=0.0, ge=0)
    """End after the first pass whose mean loss per token, in nats, is at most this, so that RL
    begins at the same place whatever the seed. 0: every pass is made."""
    batch_episodes: int = Field(default=32, ge=1)
    """Episodes per optimizer step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate. The first tenth of the steps is linear warm-up, then a cosine to zero."""
    random_action_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrated actions that are random instead of the solver's. They are trained on,
    too."""


class EvaluationSection(Section):
    """Held-out tasks, before RL, during it and after it."""

    tasks: int = Field(default=64, ge=1)
    """Held-out tasks, with seeds that training never uses."""
    every: int = Field(default=10, ge=0)
    """Interval of evaluations, in steps; 0 evaluates only before and after training."""
    samples: int = Field(default=1, ge=0)
    """Sampled attempts per task, in addition to the greedy attempt, in the evaluations before and
    after training; 0 for none."""
    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE, le=LARGEST_TEMPERATURE)
    """Softmax temperature of the sampled attempts."""
    stop_after: int = Field(default=0, ge=0)
    """Early stopping: end the run, as finished, after this many evaluations in a row without an
    improvement over the best one before them (including the evaluation before the first step). The
    measure is the greedy held-out success, or in `agentevo sft` without an environment the held-out
    loss. 0 disables it. A run that is resumed with another value continues."""

    @model_validator(mode="after")
    def _something_says_when_to_stop(self) -> Self:
        if self.stop_after and not self.every:
            raise ValueError(
                f"stop_after={self.stop_after} counts evaluations, and with every=0 there are "
                "none during the run: set evaluation.every above 0, or stop_after=0"
            )

        return self


class EngineSection(Section):
    """The inference engine."""

    type: str = "torch"
    """Which engine: `torch`, the embedded one, `vllm`, `sglang`, or one that another package
    registers (`agentevo list engines`, docs/engines.md). Default on a CUDA GPU: vllm or sglang, if
    it is installed; the run prints which."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options of that engine; `torch` has none (docs/engines.md)."""
    kv_cache_gb: float = Field(default=4.0, gt=0)
    """Key-value cache of all sequences together, in GiB. Requests beyond it wait in a queue."""
    kv_cache_tokens: int | None = Field(default=None, ge=128)
    """The same limit in tokens. It replaces kv_cache_gb if set."""
    max_running: int = Field(default=256, ge=1)
    """Maximum number of sequences that are computed at once."""
    prefill_tokens: int | None = Field(default=None, ge=16)
    """Maximum number of prompt tokens that are computed in one step. Default: 512 on a CPU, since
    more would overflow its caches, and 4096 on a GPU."""
    prefix_sharing: bool = True
    """Compute a common prompt once for all requests that share it."""
    batch_invariant: bool = False
    """Refuse a model, device or dtype for which the last digits of a completion could depend on the
    rest of its batch. In float32 on an x86 CPU they never do, with either value
    (docs/engines.md)."""
    routed_experts: bool = False
    """Record the chosen experts of a mixture for every token, and store them with the turns.
    Default: true with trainer.routing_replay=rollout, which needs it. Without replay, the run
    reports how many choices differ in training (docs/training.md)."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of one completion, in seconds, without the time that the engine sleeps."""


class ProfileSection(Section):
    """Time and memory profile of a few steps: a trace for https://ui.perfetto.dev and a table, in
    `profile/` in the run's folder (docs/observability.md). `profile=true` is short for
    profile.enabled=true. Profiled steps are slower; results are the same."""

    enabled: bool = False
    """Profile some steps of the run."""
    after: int = Field(default=2, ge=0)
    """Warm-up steps before the profile, counted from the start or resumption of the run."""
    steps: int = Field(default=1, ge=1)
    """Number of profiled steps, in one trace. Evaluations and checkpoints that follow them are
    included."""
    nsight: bool = False
    """Mark these steps for NVIDIA Nsight Systems instead, with phases and operators as NVTX ranges:
    `nsys profile --capture-range=cudaProfilerApi agentevo train ...`. Needs a CUDA GPU, and writes
    nothing into the run's folder."""


class CheckpointSection(Section):
    """Which checkpoints of the policy are saved and kept."""

    every: int = Field(default=10, ge=0)
    """Interval of checkpoints, in steps; 0 saves only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk."""
    keep_best: bool = True
    """Also save when an evaluation is the best so far, and keep that checkpoint in addition to the
    newest ones, unless `every` is 0. A run's folder, used as a model, is its best checkpoint;
    RUN@best, RUN@last and RUN@STEP name single checkpoints."""
    background: bool = False
    """Write the files in the background during the next step, from a copy of weights and optimizer
    in CPU memory. The step waits only for the copy, and for the previous checkpoint if that is
    still being written."""


class StoreSection(Section):
    """Where trajectories are stored. `store: sqlite:///runs/x.sqlite` is short for store.url."""

    url: str | None = None
    """sqlite:///PATH, postgresql://USER@HOST/DATABASE?schema=NAME or mongodb://HOST/DATABASE. Write
    a password as USER:${env:NAME}@HOST, with the environment variable NAME that holds it. Default:
    store.sqlite in the run's folder."""

    @field_validator("url")
    @classmethod
    def _names_a_store(cls, value: str | None) -> str | None:
        if value is not None and (
            ("://" not in value and not value.startswith("${env:"))
            or (value.startswith("sqlite:") and not re.match("sqlite:///.*[^/]", value))
        ):
            raise ValueError(
                f"got {without_password(value)!r}; write it as sqlite:///PATH, "
                "postgresql://USER@HOST/DATABASE?schema=NAME or mongodb://HOST/DATABASE"
            )

        return value
