"""The sections of a recipe, except the algorithm's. Every default is a tested setting, documented
under its field."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from agentevo.config.parallel import ParallelSection
from agentevo.config.sft import ConversationKeys, FileOrFolder
from agentevo.config.template_variables import TemplateVariables
from agentevo.config.vision import VISION_PARTS, VisionSection
from agentevo.errors import shown
from agentevo.runtime.credentials import without_password
from agentevo.runtime.device_names import DeviceName
from agentevo.runtime.section import Section, Texts, expand_home
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


ALL_LINEAR = "all-linear"
Rank = Annotated[int, Field(ge=1)]


class LoraSection(Section):
    """LoRA adapters (arXiv 2106.09685) by PEFT (`pip install 'agentevo[lora]'`): y = W x + scale *
    B A x with W frozen and A, B trained. Keys mean the same as in PEFT. Off while rank is 0 and
    adapter is null. Learning rates are usually about ten times those of full fine-tuning."""

    rank: int = Field(default=0, ge=0)
    """Rows of A and columns of B (PEFT's r). 0 trains the whole model."""
    alpha: int | None = Field(default=None, ge=1)
    """scale = alpha / rank (PEFT's lora_alpha). Default: twice the rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is zeroed in supervised training (cold_start). RL and
    evaluation use no dropout: their log-probs are those that tokens were sampled with."""
    targets: Texts = Field(default=(ALL_LINEAR,), min_length=1)
    """Names of the layers that get an adapter, such as [q_proj, v_proj] (PEFT's target_modules);
    `all-linear`: every linear layer except the output layer. In a model that sees, a name reaches
    layers of the language model, or, if it has none of that name, of tower and projector. `tower`
    and `projector`: every linear layer there, for example [all-linear, projector]."""
    exclude: Texts = ()
    """Names of layers that get no adapter, although targets includes them (PEFT's
    exclude_modules)."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Decoder layers that get adapters, from 0 (PEFT's layers_to_transform). Empty: all. Needs
    the names of layers in targets."""
    rank_pattern: dict[str, Rank] = Field(default={})
    """Other ranks for some layers: name (or regular expression) -> rank."""
    alpha_pattern: dict[str, Rank] = Field(default={})
    """Other alphas for some layers: name (or regular expression) -> alpha."""
    rslora: bool = False
    """scale = alpha / sqrt(rank) (arXiv 2312.03732)."""
    dora: bool = False
    """Train the magnitude of each output separately from its direction (arXiv 2402.09353). Steps
    are slower; generation costs the same."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Initial values of A and B. At first, the policy always equals the base. `default`: A
    uniform, B zero; `gaussian`: A normal, B zero; `orthogonal`: both random with B A = 0 (even
    ranks)."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which bias vectors of the base are trained as well: none, all, or those of layers with
    adapters."""
    modules_to_save: Texts = ()
    """Names of modules that are trained in full and saved with the adapter."""
    adapter: Annotated[Path | None, expand_home("give the folder of a saved adapter, or null")] = (
        None
    )
    """Folder of a saved adapter (adapter_config.json) to start from, instead of a new one. It
    brings its own rank and other settings."""
    quantize: Literal["none", "8bit", "4bit"] = "none"
    """Keep the base in 8 or 4 bits (QLoRA, arXiv 2305.14314) by bitsandbytes: less memory, more
    time. Also on a CPU. In 8 bits, the rounding of a token's activations depends on the other
    tokens in the computation, so sampled and recomputed log-probs differ (by tenths of a nat), and
    the default of `algorithm.importance` is token_tis. In 4 bits they agree up to the dtype's
    rounding."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        fields = type(self).model_fields
        option_keys = [key for key in fields if key not in ("rank", "adapter", "quantize")]
        chosen = [
            key
            for key in option_keys
            if getattr(self, key) != fields[key].get_default(call_default_factory=True)
        ]
        if self.adapter is not None and (self.rank or chosen):
            idle_keys = ", ".join([*(["rank"] if self.rank else []), *chosen])
            raise ValueError(
                f"adapter={self.adapter} brings its own settings, so {idle_keys} would do nothing: "
                "remove it, or remove adapter"
            )

        if not self.enabled and (chosen or self.quantize != "none"):
            idle_keys = ", ".join([*chosen, *(["quantize"] if self.quantize != "none" else [])])
            raise ValueError(
                f"{idle_keys} is for adapters, but there are none while rank is 0: set rank=16, or "
                "remove it"
            )

        if ALL_LINEAR in self.targets and not {ALL_LINEAR, *VISION_PARTS} >= set(self.targets):
            raise ValueError(
                f"targets: {ALL_LINEAR} includes the others: give it alone, or names only"
            )

        if self.layers and ALL_LINEAR in self.targets:
            raise ValueError(
                "layers needs targets by name: set "
                "targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
            )

        if self.init == "orthogonal" and any(
            rank % 2 for rank in (self.rank, *self.rank_pattern.values())
        ):
            raise ValueError(
                "init=orthogonal needs even ranks: raise odd ones by 1, or set init=default"
            )

        return self

    @property
    def enabled(self) -> bool:
        """Whether adapters are trained instead of the whole model."""
        return self.rank > 0 or self.adapter is not None


MAX_TINY_PARAMETERS = 1_000_000_000
"""A larger policy with random weights is probably a typing error."""


class TinyModel(Section):
    """Shape of the tiny policy, a model with random weights that each run creates
    (`model.name=tiny`): a Llama, or a Qwen2-VL with `vision`."""

    hidden_size: int = Field(default=192, ge=16)
    """Width of the residual stream, in units."""
    num_layers: int = Field(default=4, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads; must divide hidden_size."""
    context_length: int = Field(default=2048, ge=32)
    """Maximum length of a sequence, in tokens."""
    tokenizer: Literal["word", "byte"] = "word"
    """`word`: one token per word and symbol of the environment's texts; `byte`: one token per byte,
    for any text."""

    vision: bool = False
    """Whether the policy sees. Each square of 16 x 16 pixels of an image is a token, and images of
    more than 65,536 pixels are scaled down."""

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
                f"{MAX_TINY_PARAMETERS:,}: choose smaller values, or a pretrained model"
            )

        return self

    @property
    def intermediate_size(self) -> int:
        """Width of the blocks' inner layers, in units."""
        return -(-self.hidden_size // 12) * 32

    @property
    def num_parameters(self) -> int:
        """Number of weights in the blocks, without the token embeddings."""
        per_unit = 4 * self.hidden_size + 3 * self.intermediate_size + 2
        return self.num_layers * self.hidden_size * per_unit


PLAIN = "plain"
CHAT_TEMPLATES = ("hermes", PLAIN, "deepseek_v32", "deepseek_v4")
"""Chat templates that AgentEvo ships, by name (models/chat/templates)."""
MAX_TEMPLATE = 2**20
"""Bytes of a chat template's file."""


class ModelSection(Section):
    """The policy that is trained."""

    name: str = "smollm2-135m-instruct"
    """A local folder, a known small model (`agentevo list models`), a Hugging Face hub name, a
    ModelScope name (`modelscope:OWNER/NAME@REVISION`), or `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and computation. On a CPU, float32 is the best choice and the
    fastest."""
    chat_template: str | None = None
    """Chat template that replaces the tokenizer's: `hermes` (ChatML with tools, for models whose
    template does not support tools), `plain` (questions and answers as plain text, for base models
    without a template), a Jinja file, which is copied into the run's config.yaml, or the template
    itself. It is saved with the checkpoints."""
    template: TemplateVariables = Field(default_factory=dict)
    """Values for variables of the chat template, for example `{enable_thinking: false}` or
    `{reasoning_effort: low}`. Every rendering uses them; a request to the gateway can replace them
    with `chat_template_kwargs`. Variables that the template does not read are refused. They are
    saved with the checkpoints, as a part of the template."""
    device: DeviceName = "auto"
    """The device: an NVIDIA or AMD GPU (`cuda`), a Huawei Ascend (`npu`), an Intel GPU (`xpu`), an
    Apple GPU (`mps`), or the `cpu`. `auto` uses the first available of cuda, npu and xpu, else the
    CPU."""
    config_overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """New values for keys of the model's config.json, for example `{rope_scaling: {rope_type: yarn,
    factor: 4.0, original_max_position_embeddings: 8192}, max_position_embeddings: 32768}`. Keys
    that the model's transformers class does not have are refused. The values are saved with the
    checkpoints."""
    tiny: TinyModel = TinyModel()
    """Shape of the tiny policy, used when name is `tiny`."""
    lora: LoraSection = LoraSection()
    """LoRA adapters instead of full fine-tuning."""
    vision: VisionSection = VisionSection()
    """For models that see: which parts are trained, and the size of images."""

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
            raise ValueError("config_overrides works only with pretrained models: set tiny.* keys")

        if self.vision.chosen and self.name == "tiny" and not self.tiny.vision:
            raise ValueError(
                "vision is for models that see, and the tiny policy reads text only: set "
                "tiny.vision=true, or another name"
            )

        if self.lora.enabled and self.name == "tiny":
            raise ValueError(
                "lora needs a pretrained base model, and the tiny policy's weights are random: "
                "set lora.rank=0, or another name"
            )

        return self


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
    depend on it."""
    optimizer_from: Path | None = None
    """Folder of a checkpoint whose optimizer state (AdamW's moments) this run continues with. The
    learning rate starts its own schedule. Set model.name to the same checkpoint, whose weights the
    run starts from. Default: a new optimizer."""
    compute: Literal["auto", "tree", "rows"] = "auto"
    """How the model is computed. `tree`: AgentEvo's attention over packed sequences that share
    prefixes. `rows`: the model's own forward pass, a sequence per row. `auto`: tree, or rows for
    models that the tree would compute differently from transformers. docs/architectures.md"""
    prefix_merging: bool = True
    """Compute a common prefix of several samples only once. The result does not depend on it. If
    false, every sample is computed in full, as in most trainers; this is slower, and useful for
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


def _template_of(path: str) -> str:
    """The template in a file. Raises ValueError if it can't be a chat template."""
    template_names = ", ".join(CHAT_TEMPLATES)
    if not os.path.isfile(path):  # pathlib's raises for what can be no path
        raise ValueError(
            f"{shown(path)} is not a file: give a Jinja file, or a template's name "
            f"({template_names})"
        )

    try:
        with open(path, "rb") as file:
            text = file.read(MAX_TEMPLATE + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{shown(path)} can't be read: {error}") from error

    if len(text) > MAX_TEMPLATE or ("{%" not in text and "{{" not in text):
        raise ValueError(
            f"{shown(path)} is not a Jinja template: give one that writes the messages"
        )

    return text
