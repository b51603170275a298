"""The sections of a recipe, but for the algorithm's. Every default is the vetted setting,
documented under its field."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from agentevo.config.lora import LoraSection
from agentevo.config.parallel import ParallelSection
from agentevo.config.section import Section, expand_home
from agentevo.config.sft import ConversationKeys, FileOrFolder
from agentevo.credentials import without_password
from agentevo.device_names import DeviceName
from agentevo.errors import shown
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
    """Changes every random choice of the run: weights of a tiny policy, tasks, sampling, order."""
    overwrite: bool = False
    """Delete an existing run in the folder first, with what it has in a store outside of it
    (`store.url`). Without it an existing run is refused, unless it is resumed."""
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


MAX_TINY_PARAMETERS = 1_000_000_000
"""A larger policy with random weights is a typing error."""


class TinyModel(Section):
    """Shape of the tiny policy, a Llama made on the spot with random weights
    (`model.name=tiny`)."""

    hidden_size: int = Field(default=192, ge=16)
    """Width of the residual stream, in units."""
    num_layers: int = Field(default=4, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads; must divide hidden_size."""
    context_length: int = Field(default=2048, ge=32)
    """Longest sequence, in tokens."""
    tokenizer: Literal["word", "byte"] = "word"
    """`word`: one token per word and symbol of the environment's texts; `byte`: 256 bytes, any
    text."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads "
                f"{self.num_heads}: "
                f"choose for example hidden_size={64 * self.num_heads}"
            )

        if self.num_parameters > MAX_TINY_PARAMETERS:
            raise ValueError(
                f"hidden_size={self.hidden_size} and num_layers={self.num_layers} make "
                f"{self.num_parameters:,} parameters, and a tiny policy has at most "
                f"{MAX_TINY_PARAMETERS:,}: choose smaller ones, or a pretrained model"
            )

        return self

    @property
    def intermediate_size(self) -> int:
        """Width of the blocks' inner layers, in units."""
        return -(-self.hidden_size // 12) * 32

    @property
    def num_parameters(self) -> int:
        """Weights of the blocks; the weights of the vocabulary's tokens are added to these."""
        per_unit = 4 * self.hidden_size + 3 * self.intermediate_size + 2
        return self.num_layers * self.hidden_size * per_unit


PLAIN = "plain"
CHAT_TEMPLATES = ("hermes", PLAIN)
"""Chat templates that AgentEvo ships, by name (models/chat_templates)."""
MAX_TEMPLATE = 2**20
"""Bytes of a chat template's file."""


class ModelSection(Section):
    """The policy that is trained."""

    name: str = "smollm2-135m-instruct"
    """A local folder, a known small model (`agentevo list models`), a Hugging Face hub name, one of
    ModelScope (`modelscope:OWNER/NAME@REVISION`), or `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and computation. float32 is right, and fastest, on a CPU."""
    chat_template: str | None = None
    """In place of the tokenizer's own: `hermes` (ChatML with tools, for models whose template has
    no place for tools), `plain` (questions and answers as plain text, for base models, which have
    no template), a Jinja file, which is read into the run's config.yaml, or the template itself. It
    is saved with the checkpoints."""
    device: DeviceName = "auto"
    """What computes: a GPU by NVIDIA or by AMD (`cuda`), Huawei's Ascend (`npu`), Intel's GPU
    (`xpu`), Apple's (`mps`), or the `cpu`. `auto` takes the first of cuda, npu and xpu that is
    there, else the CPU."""
    config_overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """Keys of the model's config.json with other values, for example `{rope_scaling: {rope_type:
    yarn, factor: 4.0, original_max_position_embeddings: 8192}, max_position_embeddings: 32768}`.
    Keys that its class of transformers has not are refused; they are saved with the checkpoints."""
    tiny: TinyModel = TinyModel()
    """Shape of the tiny policy, used when name is `tiny`."""
    lora: LoraSection = LoraSection()
    """Adapters in place of full fine-tuning."""

    @field_validator("chat_template")
    @classmethod
    def _template_is_read(cls, value: str | None) -> str | None:
        if value is None or value in CHAT_TEMPLATES:
            return value
        is_text = "{%" in value or "{{" in value
        template = value if is_text else _template_of(os.path.expanduser(value))
        if "${" in template:
            raise ValueError("the template has ${ in it, which a recipe would fill in: write $ {")
        return template

    @model_validator(mode="after")
    def _lora_fits(self) -> Self:
        if self.config_overrides and self.name == "tiny":
            raise ValueError("config_overrides is for models that are loaded: give tiny.* keys")

        if self.lora.enabled and self.name == "tiny":
            raise ValueError(
                "lora needs a base that knows something, and the tiny policy's weights are "
                "random: set lora.rank=0, or another name"
            )

        return self


class SamplingSection(Section):
    """How completions are drawn while training."""

    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE, le=LARGEST_TEMPERATURE)
    """Softmax temperature; the trainer uses the same."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Longest completion of one turn, in tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling mass. Training needs 1: a cut distribution makes the importance ratio
    biased."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all. Training needs 0."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens of at least this share of the top probability. Training needs 0."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, besides the model's own end-of-turn token."""

    @field_validator("stop")
    @classmethod
    def _engines_take_them(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_STRING for text in value):
            raise ValueError(
                f"give at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_STRING} characters"
            )
        return value


MAX_ATTEMPTS_PER_STEP = 2**20
"""A step's attempts are all in memory at its end."""


class TrainerSection(Section):
    """How trajectories become updates: steps, batches, AdamW."""

    steps: int = Field(default=40, ge=0)
    """RL steps: each samples groups and updates the policy."""
    groups_per_step: int = Field(default=4, ge=1, le=MAX_ATTEMPTS_PER_STEP)
    """Tasks sampled per step."""
    group_size: int = Field(default=8, ge=1, le=MAX_ATTEMPTS_PER_STEP)
    """Attempts per task: the group whose members are compared."""
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
    """Passes over each batch of trajectories. 0 trains on none: attempts are sampled, scored and
    kept, for `data.best_of` and `data.pairs_from` of another run."""
    micro_batch_tokens: int = Field(default=16384, ge=64)
    """Most distinct tokens in one forward and backward pass; the result does not depend on it."""
    optimizer_from: Path | None = None
    """Folder of a checkpoint whose optimizer this run goes on with (AdamW's moments; the learning
    rate begins its own schedule). Its weights are what the run starts from, by model.name. Default:
    a fresh optimizer."""
    prefix_merging: bool = True
    """Compute what several samples begin with once for all of them; the result does not depend on
    it. Off, every sample is computed whole, as most trainers do: slower, for comparison."""
    torch_compile: bool = True
    """On a GPU, make fewer and larger kernels of decoder layers by torch.compile: faster steps that
    keep less; the first step compiles, for tens of seconds. It does nothing on a CPU, and for
    layers with experts, adapters, `trainer.parallel` and memory.offload_activations, which stay as
    they are."""
    routing_replay: Literal["none", "rollout", "update"] = "none"
    """Which experts of a mixture the policy's passes go through: the router's choice of the moment
    (`none`), those that the engine chose for each token when it was drawn (`rollout`, the R3 of
    arXiv 2510.11370), or those of the pass that computes the old log-probs (`update`, verl's R2;
    needs algorithm.old_logprobs=recomputed). docs/training.md"""
    parallel: ParallelSection = ParallelSection()
    """How these processes share the work."""

    @model_validator(mode="after")
    def _fits_in_memory(self) -> Self:
        attempts = self.groups_per_step * self.group_size
        if attempts > MAX_ATTEMPTS_PER_STEP:
            raise ValueError(
                f"groups_per_step={self.groups_per_step} and group_size={self.group_size} make "
                f"{attempts:,} attempts a step, which are all in memory at its end: choose smaller "
                f"ones, {MAX_ATTEMPTS_PER_STEP:,} attempts at most"
            )

        return self


class CriticSection(Section):
    """The critic, trained where the advantage needs values (gae, turn_gae, bi_level_gae)."""

    trunk: Literal["own", "shared"] = "own"
    """`own`: a second model, at first a copy of the policy; `shared`: a head on the policy's last
    hidden states."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic's AdamW (with a shared trunk: of the head's)."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was at the step's start before the loss turns
    pessimistic. None does not clip."""
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss in the policy's, with a shared trunk."""
    pretrain_steps: int = Field(default=0, ge=0)
    """RL steps at the beginning that teach only the critic, from plain returns (value pretraining,
    VC-PPO, arXiv 2503.01491)."""


class ProcessRewardSection(Section):
    """PRIME's process reward, learnt online from outcomes where the advantage needs it (prime)."""

    beta: float = Field(default=0.05, gt=0)
    """Reward of a token per nat of log-ratio."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of its AdamW."""


class RewardModelSection(Section):
    """A reward model for single tokens, beside the environment's rewards. Off while name is
    None."""

    name: str | None = None
    """A token-classification model with one output and the policy's tokenizer: a local folder or a
    Hugging Face hub name."""
    coef: float = Field(default=1.0)
    """What its output is multiplied by."""
    at: Literal["all", "last"] = "all"
    """Which tokens it scores: every trained token, or the last one of each sample."""


class DataSection(ConversationKeys, Section):
    """Training data that is given instead of sampled. `pairs` and `pairs_from` are answers that
    `agentevo train` trains on by a preference loss (algorithm.name=dpo and its like) in place of
    sampled ones: nothing is sampled but in evaluations; each step takes trainer.groups_per_step
    lines or groups, in an order shuffled anew each time round. The other keys are the conversations
    of `agentevo sft`."""

    pairs: FileOrFolder = None
    """A JSONL file, each line {"prompt": [messages], "chosen": ..., "rejected": ...} or {"prompt":
    [messages], "completion": ..., "label": true}, an answer being a text or a list of messages. It
    is looked for beside the recipe, then in the current folder."""
    pairs_from: FileOrFolder = None
    """Folder of a run whose stored training groups are made into pairs."""

    @property
    def given(self) -> bool:
        """Whether preferences are given."""
        return self.pairs is not None or self.pairs_from is not None


class ColdStartSection(Section):
    """Supervised training on demonstrations of the environment's own solver, before RL. Off while
    episodes is 0."""

    episodes: int = Field(default=0, ge=0)
    """Demonstration episodes, played by the solver on seeds of their own."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the demonstrations."""
    batch_episodes: int = Field(default=32, ge=1)
    """Episodes per optimizer step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate; a tenth of the steps warms up, then cosine to zero."""
    random_action_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrated actions drawn at random instead of by the solver (taught all the
    same)."""


class EvaluationSection(Section):
    """Held-out tasks, before RL, during it and after it."""

    tasks: int = Field(default=64, ge=1)
    """Held-out tasks, with seeds that training never uses."""
    every: int = Field(default=10, ge=0)
    """Evaluate after this many, in steps; 0 evaluates only before and after."""
    samples: int = Field(default=1, ge=0)
    """Sampled attempts per task beside the greedy one, in the evaluations before and after; 0 for
    none."""
    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE, le=LARGEST_TEMPERATURE)
    """Softmax temperature of the sampled attempts."""
    stop_after: int = Field(default=0, ge=0)
    """End the run, as finished, when this many evaluations in a row were no better than the best
    one before them, that before the first step included: by the greedy held-out success, or in
    `agentevo sft` without an environment by the held-out loss. 0 never does. Resumed with another
    value, the run goes on."""

    @model_validator(mode="after")
    def _something_says_when_to_stop(self) -> Self:
        if self.stop_after and not self.every:
            raise ValueError(
                f"stop_after={self.stop_after} counts evaluations, and every=0 makes none during "
                "the run: set evaluation.every above 0, or stop_after=0"
            )

        return self


class EngineSection(Section):
    """The inference engine."""

    type: str = "torch"
    """Which engine: `torch`, the embedded one, `vllm`, `sglang`, or one that another package
    registers (`agentevo list engines`, docs/engines.md). On a CUDA GPU a run takes vllm or sglang
    where it is installed and nothing here is said, and says so."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """What that engine is told besides; `torch` takes none (docs/engines.md)."""
    kv_cache_gb: float = Field(default=4.0, gt=0)
    """Key-value memory of all sequences together, in GiB; requests beyond it wait in a queue."""
    kv_cache_tokens: int | None = Field(default=None, ge=128)
    """The same limit in tokens; when set, it counts instead of kv_cache_gb."""
    max_running: int = Field(default=256, ge=1)
    """Most sequences computed at once."""
    prefill_tokens: int | None = Field(default=None, ge=16)
    """Most prompt tokens computed in one step. Default: 512 on a CPU, whose caches more would
    overflow, and 4096 on a GPU."""
    prefix_sharing: bool = True
    """Compute a common prompt once for all requests that share it."""
    batch_invariant: bool = False
    """Refuse a model, device or dtype for which the last digits of a completion may depend on what
    is computed beside it. In float32 on an x86 CPU they never do, whether or not this is set
    (docs/engines.md)."""
    routed_experts: bool = False
    """Record which experts of a mixture are chosen for every token, and store them with the turns.
    Default: true with trainer.routing_replay=rollout, which needs it. Without replay it tells how
    many choices differ in training (docs/training.md)."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one completion, in seconds. What the engine sleeps meanwhile does not
    count."""


class CheckpointSection(Section):
    """Which checkpoints of the policy are saved and kept."""

    every: int = Field(default=10, ge=0)
    """Save after this many, in steps; 0 saves only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk."""
    keep_best: bool = True
    """Save also when an evaluation is the best so far, and keep that checkpoint beside the newest
    ones, unless `every` is 0. The best one is what a run's folder means as a model; RUN@best,
    RUN@last and RUN@STEP name single ones."""
    background: bool = False
    """Write the files while the next step goes on, from a copy of weights and optimizer in the
    CPU's memory. The step waits for the copy alone, and for the checkpoint before it if that is
    still being written."""


class StoreSection(Section):
    """Where trajectories go. `store: sqlite:///runs/x.sqlite` is short for its url."""

    url: str | None = None
    """sqlite:///PATH, postgresql://USER@HOST/DATABASE?schema=NAME or mongodb://HOST/DATABASE.
    A password is written as USER:${env:NAME}@HOST: the environment variable NAME has it. Default:
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


def _template_of(path: str) -> str:
    """Raises ValueError for a file that can't be a chat template."""
    template_names = ", ".join(CHAT_TEMPLATES)
    if not os.path.isfile(path):  # pathlib's raises for what can be no path
        raise ValueError(
            f"{shown(path)} is no file: give a Jinja file, or a template's name ({template_names})"
        )

    try:
        with open(path, "rb") as file:
            text = file.read(MAX_TEMPLATE + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{shown(path)} can't be read: {error}") from error

    if len(text) > MAX_TEMPLATE or ("{%" not in text and "{{" not in text):
        raise ValueError(f"{shown(path)} is no Jinja template: give one that writes the messages")

    return text
