"""One tree that says everything about a run: `RunConfig`.

A YAML recipe fills it, dotted `a.b=c` overrides change it, and what comes out is frozen. Every default is the vetted setting and is
documented once, under its field; `agentevo config explain KEY` prints from there. Importing this module imports no torch.

Order of work: YAML -> overrides -> unknown keys refused with the nearest right one -> types -> contradictions. All of it happens before
anything is created. Reading is `config_sources`; explaining keys and problems is `config_keys`.

`environment` is read by the model that the registry has for its `type`, so environments of other packages and of user code (registered
first) have the same checks as ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import pydantic
import yaml
from pydantic import Field, SerializeAsAny, field_validator, model_validator
from pydantic_core import ErrorDetails

from agentevo import config_sources
from agentevo.catalogue.advantages import ADVANTAGES
from agentevo.catalogue.aggregations import AGGREGATIONS
from agentevo.catalogue.kl import KL
from agentevo.catalogue.policy_losses import IMPORTANCE, POLICY_LOSSES, check_importance
from agentevo.catalogue.preference import PREFERENCE_LOSSES
from agentevo.catalogue.preference_presets import PREFERENCE_PRESETS, PreferenceAlgorithm, settle_preference
from agentevo.catalogue.presets import PRESETS, Algorithm, hyper_parameters, settle
from agentevo.config_collect import CollectKeys, collect_contradictions
from agentevo.config_keys import ConfigKeys, Variants
from agentevo.config_preference import check_preference_keys, preference_contradictions
from agentevo.environments import EnvironmentConfig, environments
from agentevo.errors import ConfigError
from agentevo.registry import nearest

Rate = Annotated[float, Field(ge=0, lt=1)]

if TYPE_CHECKING:
    PresetName: TypeAlias = str
    AdvantageName: TypeAlias = str
    PolicyLossName: TypeAlias = str
    AggregationName: TypeAlias = str
    KLName: TypeAlias = str
    ImportanceName: TypeAlias = str
    PreferenceLossName: TypeAlias = str
else:
    PresetName = Literal[(*PRESETS, *PREFERENCE_PRESETS)]
    AdvantageName = Literal[tuple(ADVANTAGES)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]
    AggregationName = Literal[tuple(AGGREGATIONS)]
    KLName = Literal[tuple(KL)]
    ImportanceName = Literal[IMPORTANCE[0].choices]
    PreferenceLossName = Literal[tuple(PREFERENCE_LOSSES)]


class Section(pydantic.BaseModel):
    """Base of every section: unknown keys are refused, values never change."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )


class RunSection(Section):
    """Where the run goes and what drives its random choices."""

    name: str = "run"
    """Name of the run, used in reports and for its folder. In a recipe file the default is the file's name."""
    dir: Path | None = None
    """Folder of the run (config, metrics, report, checkpoints, store). Default: runs/NAME."""
    seed: int = 0
    """Changes every random choice of the run: weights of a tiny policy, tasks, sampling, order."""
    overwrite: bool = False
    """Delete an existing run in the folder first. Without it an existing run is refused, unless it is resumed."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for tensor work. Default: PyTorch's own choice."""

    @field_validator("name")
    @classmethod
    def _a_file_name(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w.+-]*", value):
            raise ValueError(f"got {value!r}; the name becomes a folder: use letters, digits, and `_ . + -` after the first")
        return value

    @field_validator("dir", mode="before")
    @classmethod
    def _expand_home(cls, value: object) -> object:
        if value == "":
            raise ValueError("got an empty path; give a folder, for example runs/my-run")
        return Path(value).expanduser() if isinstance(value, (str, Path)) else value


class TinyModel(Section):
    """Shape of the tiny policy, a Llama made on the spot with random weights (`model.name=tiny`)."""

    hidden_size: int = Field(default=192, ge=16)
    """Width of the residual stream, in units."""
    num_layers: int = Field(default=4, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads; must divide hidden_size."""
    context_length: int = Field(default=2048, ge=32)
    """Longest sequence, in tokens."""
    tokenizer: Literal["word", "byte"] = "word"
    """`word`: one token per word and symbol of the environment's texts; `byte`: 256 bytes, any text."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}: "
                f"choose for example hidden_size={64 * self.num_heads}"
            )
        return self


class ModelSection(Section):
    """The policy that is trained."""

    name: str = "smollm2-135m-instruct"
    """A local folder, a known small model (`agentevo list models`), a Hugging Face hub name, or `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and computation. float32 is right, and fastest, on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA GPU if there is one."""
    tiny: TinyModel = TinyModel()
    """Shape of the tiny policy, used when name is `tiny`."""


class AgentSection(Section):
    """How the environment agent talks to the policy and reads its answers."""

    format: Literal["plain", "answer", "think_answer"] = "answer"
    """`plain`: the whole completion is the action; `answer`: inside <answer>...</answer>; `think_answer`: after <think>...</think>."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward of a turn that breaks the format or holds an invalid action."""
    system_prompt: str | None = None
    """System message. None leaves the chat template's own default."""
    memory: Literal["episode", "turn"] = "episode"
    """What the policy sees: the `episode` so far, or in each `turn` only the rules and the newest observation (for worlds that show their
    whole state: shorter contexts, and much quicker to learn)."""
    max_turns: int = Field(default=10, ge=1)
    """Calls of the policy per episode."""
    actions_per_turn: int = Field(default=1, ge=1)
    """Actions that one turn may hold, separated by action_separator; the rest is ignored."""
    action_separator: str = Field(default="||", min_length=1)
    """What separates several actions in one turn."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest time for one episode, in seconds; then it is recorded as failed."""


class SamplingSection(Section):
    """How completions are drawn while training."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; the trainer uses the same."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Longest completion of one turn, in tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling mass. Training needs 1: a cut distribution makes the importance ratio biased."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all. Training needs 0."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens of at least this share of the top probability. Training needs 0."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, besides the model's own end-of-turn token."""


class AlgorithmKeys(Section):
    """Advantages, policy loss, KL and aggregation, or a preference loss: a preset, and what is chosen otherwise."""

    name: PresetName = "grpo"
    """A preset: a named combination of advantage, policy_loss, aggregation and their hyper-parameters; or of a preference loss and its."""
    advantage: AdvantageName | None = None
    """How much better an attempt was than expected. Default: the preset's."""
    policy_loss: PolicyLossName | None = None
    """The loss of a token, given its advantage. Default: the preset's."""
    aggregation: AggregationName | None = None
    """How token losses become one number. Default: the preset's."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy. 0 keeps no reference copy."""
    kl: KLName = "k3"
    """Estimate of that KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or taken off the reward of each token before the advantages are computed."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL per token, in nats, towards which kl_coef is steered from step to step. None keeps kl_coef as it is."""
    kl_horizon: int = Field(default=10000, ge=1)
    """Sequences over which a KL that is 20% or more off its target changes the weight by 20%."""
    reference: Literal["frozen", "synced", "ema"] = "frozen"
    """The reference policy: as it was at the start of RL, the policy of up to reference_every steps ago, or a running average."""
    reference_every: int = Field(default=10, ge=1)
    """RL steps after which a synced reference becomes the policy as it is then."""
    reference_decay: float = Field(default=0.99, ge=0, le=1)
    """Share of an ema reference that a step leaves as it was."""
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    """What the policy's ratio is taken against: the log-probs that the engine sampled with, or the trainer's own at the start of the step
    (one more pass; what an engine that computes otherwise needs, together with importance)."""
    importance: ImportanceName = "none"
    """Weight of each token for having been sampled by another policy, from recomputed over rollout log-probs: per token or per sequence
    (their product, or its geometric mean); tis cuts the weight at importance_cap, mis leaves out what is outside floor and cap."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Largest such weight."""
    importance_floor: float = Field(default=0.0, ge=0)
    """Smallest such weight that mis keeps."""
    reward_weights: dict[str, float] = {}
    """Weight of each named part of the reward with advantage gdpo; 1 for parts that are not named."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy worth keeping, in nats a token: the bonus weighs entropy_coef at entropy 0, less the nearer the policy's mean entropy is to
    the target, and nothing above it. None weighs it always the same."""
    drop_zero_variance: bool = True
    """Leave out groups whose members all have the same reward, if the advantage compares within groups: it is 0 for them. Kept, they still
    get the KL and entropy terms."""
    drop_truncated: bool = False
    """Leave out attempts that a limit ended, for their reward says little (overlong filtering, DAPO, arXiv 2503.14476)."""
    keep_groups: float = Field(default=1.0, gt=0, le=1)
    """Share of a step's groups that is trained on: those with the largest spread of rewards (StarPO-S, arXiv 2504.20073, uses 0.25)."""

    preference_loss: PreferenceLossName | None = None
    """The loss on chosen and rejected answers, with a preset that trains by one. Default: the preset's."""
    pairs: Literal["best_worst", "all", "demonstrations"] | None = None
    """What a group's pairs are: its best attempts against its worst, every two attempts with different rewards, or what the environment's
    solver would have done against each attempt. Default: demonstrations with spin, best_worst with other losses of pairs."""
    pairs_per_group: int | None = Field(default=None, ge=1)
    """Most pairs of one group (with rft: answers), those with the largest difference of rewards first. Default: 1; as many as there are
    with pairs=all and pairs=demonstrations."""
    pair_margin: float = Field(default=0.0, ge=0)
    """Least difference of the two rewards of a pair, which must differ in any case."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_preset(cls, given: Any) -> Any:
        """What the preset says of keys that are not given."""
        name = str(given.get("name", "grpo")) if isinstance(given, dict) else ""
        preset = PRESETS.get(name) or PREFERENCE_PRESETS.get(name)
        return {**preset.keys, **given} if preset is not None else given

    @model_validator(mode="after")
    def _pieces_fit(self) -> Self:
        preference = self.preference()
        check_preference_keys(self, preference)
        if preference is None:
            check_importance(self.settled().policy_loss, self.importance, self.importance_cap, self.importance_floor)
        return self

    def settled(self) -> Algorithm:
        """Every piece by name, with all its hyper-parameters; of an algorithm that is no preference algorithm."""
        return settle(self.name, self._hyper(), advantage=self.advantage, policy_loss=self.policy_loss, aggregation=self.aggregation)

    def preference(self) -> PreferenceAlgorithm | None:
        """The preference loss and what it is fed with; None where advantages and a policy loss are what is trained by."""
        if self.name not in PREFERENCE_PRESETS:
            return None
        return settle_preference(self.name, self._hyper(), preference_loss=self.preference_loss, pairs=self.pairs)

    @property
    def within_group(self) -> bool:
        """Whether the members of a group are compared: then one alone, or several with the same reward, teach nothing."""
        preference = self.preference()
        return preference.within_group if preference is not None else ADVANTAGES[self.settled().advantage].within_group

    @property
    def needs(self) -> tuple[str, ...]:
        """What the advantage can't do without (`Piece.needs`); nothing where answers are compared."""
        return ADVANTAGES[self.settled().advantage].needs if self.preference() is None else ()

    def _hyper(self) -> dict[str, Any]:
        return {name: value for name in hyper_parameters() if (value := getattr(self, name)) is not None}


if TYPE_CHECKING:

    class AlgorithmSection(CollectKeys, AlgorithmKeys):
        """AlgorithmKeys, CollectKeys, and below them every hyper-parameter of any piece; None is the default of the chosen one."""

        def __init__(self, **keys: Any) -> None: ...

else:
    AlgorithmSection = pydantic.create_model(
        "AlgorithmSection",
        __base__=(CollectKeys, AlgorithmKeys),  # in the order of inheritance, so that `name` stays the first key
        __doc__=AlgorithmKeys.__doc__,
        **{name: (kind | None, Field(default=None, description=meaning)) for name, (kind, meaning) in hyper_parameters().items()},
    )


class TrainerSection(Section):
    """How trajectories become updates: steps, batches, AdamW."""

    steps: int = Field(default=40, ge=0)
    """RL steps: each samples groups and updates the policy."""
    groups_per_step: int = Field(default=4, ge=1)
    """Tasks sampled per step."""
    group_size: int = Field(default=8, ge=1)
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
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch of trajectories."""
    micro_batch_tokens: int = Field(default=16384, ge=64)
    """Most distinct tokens in one forward and backward pass; the result does not depend on it."""


class CriticSection(Section):
    """The critic, trained where the advantage needs values (gae, turn_gae, bi_level_gae)."""

    trunk: Literal["own", "shared"] = "own"
    """`own`: a second model, at first a copy of the policy; `shared`: a head on the policy's last hidden states."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic's AdamW (with a shared trunk: of the head's)."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was at the step's start before the loss turns pessimistic. None does not clip."""
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss in the policy's, with a shared trunk."""
    pretrain_steps: int = Field(default=0, ge=0)
    """RL steps at the beginning that teach only the critic, from plain returns (value pretraining, VC-PPO, arXiv 2503.01491)."""


class ProcessRewardSection(Section):
    """PRIME's process reward, learnt online from outcomes where the advantage needs it (prime)."""

    beta: float = Field(default=0.05, gt=0)
    """Reward of a token per nat of log-ratio."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of its AdamW."""


class RewardModelSection(Section):
    """A reward model for single tokens, beside the environment's rewards. Off while name is None."""

    name: str | None = None
    """A token-classification model with one output and the policy's tokenizer: a local folder or a Hugging Face hub name."""
    coef: float = Field(default=1.0)
    """What its output is multiplied by."""
    at: Literal["all", "last"] = "all"
    """Every trained token, or the last one of each sample."""


class DataSection(Section):
    """Answers to train on by a preference loss (algorithm.name=dpo and its like) in place of sampled ones: nothing is sampled but in
    evaluations. Each step takes trainer.groups_per_step lines or groups, in an order shuffled anew each time round. Off while both are
    null."""

    pairs: Path | None = None
    """A JSONL file, each line {"prompt": [messages], "chosen": ..., "rejected": ...} or {"prompt": [messages], "completion": ...,
    "label": true}, an answer being a text or a list of messages."""
    pairs_from: Path | None = None
    """Folder of a run whose stored training groups are made to pairs."""

    @field_validator("pairs", "pairs_from", mode="before")
    @classmethod
    def _expand_home(cls, value: object) -> object:
        if value == "":
            raise ValueError("got an empty path; give a file or folder, or null")
        return Path(value).expanduser() if isinstance(value, (str, Path)) else value

    @property
    def given(self) -> bool:
        return self.pairs is not None or self.pairs_from is not None


class ColdStartSection(Section):
    """Supervised training on demonstrations of the environment's own solver, before RL. Off while episodes is 0."""

    episodes: int = Field(default=0, ge=0)
    """Demonstration episodes, played by the solver on seeds of their own."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the demonstrations."""
    batch_episodes: int = Field(default=32, ge=1)
    """Episodes per optimizer step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate; a tenth of the steps warms up, then cosine to zero."""
    random_action_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrated actions drawn at random instead of by the solver (taught all the same)."""


class EvaluationSection(Section):
    """Held-out tasks, before RL, during it and after it."""

    tasks: int = Field(default=64, ge=1)
    """Held-out tasks, with seeds that training never uses."""
    every: int = Field(default=10, ge=0)
    """Evaluate after this many, in steps; 0 evaluates only before and after."""
    samples: int = Field(default=1, ge=0)
    """Sampled attempts per task beside the greedy one, in the evaluations before and after; 0 for none."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampled attempts."""


class EngineSection(Section):
    """The embedded inference engine."""

    kv_cache_gb: float = Field(default=4.0, gt=0)
    """Key-value memory of all sequences together, in GiB; requests beyond it wait in a queue."""
    kv_cache_tokens: int | None = Field(default=None, ge=128)
    """The same limit in tokens; when set, it counts instead of kv_cache_gb."""
    max_running: int = Field(default=256, ge=1)
    """Most sequences computed at once."""
    prefill_tokens: int | None = Field(default=None, ge=16)
    """Most prompt tokens computed in one step. Default: 512 on a CPU, whose caches more would overflow, and 4096 on a GPU."""
    prefix_sharing: bool = True
    """Compute a common prompt once for all requests that share it."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one completion, in seconds."""


class CheckpointSection(Section):
    """What is kept of the policy."""

    every: int = Field(default=10, ge=0)
    """Save after this many, in steps; 0 saves only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk; the best one stays besides."""


class StoreSection(Section):
    """Where trajectories go."""

    url: str | None = None
    """sqlite:///PATH. Default: store.sqlite in the run's folder."""

    @field_validator("url")
    @classmethod
    def _has_a_scheme(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError(f"got {value!r}; write it as sqlite:///PATH")
        return value


class TrackingSection(Section):
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/ in the run's folder."""
    report: bool = True
    """Write report.html and plots/ at the end."""


class RunConfig(Section):
    """Everything about one run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: SerializeAsAny[EnvironmentConfig] | None = None
    """The world, chosen by `type` (`agentevo list environments`), with its difficulty options. A recipe must have one; only a run of an
    agent function on given tasks (Python API) has none."""
    agent: AgentSection = AgentSection()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    critic: CriticSection = CriticSection()
    process_reward: ProcessRewardSection = ProcessRewardSection()
    reward_model: RewardModelSection = RewardModelSection()
    data: DataSection = DataSection()
    cold_start: ColdStartSection = ColdStartSection()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    store: StoreSection = StoreSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.dir if self.run.dir is not None else Path("runs") / self.run.name

    @property
    def store_url(self) -> str:
        return self.store.url or f"sqlite:///{self.run_dir / 'store.sqlite'}"

    @property
    def max_actions(self) -> int:
        """Actions that one episode can really take: the environment's limit or the agent's, whichever is smaller."""
        by_agent = self.agent.max_turns * self.agent.actions_per_turn
        return by_agent if self.environment is None else min(self.environment.max_actions, by_agent)

    @property
    def length_max(self) -> int:
        """Trained tokens at which an attempt counts as too long."""
        return self.algorithm.length_max or self.sampling.max_new_tokens * self.agent.max_turns


def _contradictions(config: RunConfig) -> list[str]:
    """Values that are each right but can't hold together, as 'what: remedy'."""
    preference = config.algorithm.preference()
    found = preference_contradictions(config)
    if preference is None:
        found += _algorithm_contradictions(config.algorithm)
    sampling, trainer = config.sampling, config.trainer
    if trainer.steps > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0):
        found.append(
            "sampling.top_p, top_k and min_p cut the distribution that the trainer's importance ratio assumes whole: "
            "set top_p=1 top_k=0 min_p=0 (or trainer.steps=0 to evaluate only)"
        )
    if trainer.steps > 0 and trainer.group_size == 1 and not config.data.given:
        if config.algorithm.within_group:
            found.append(
                f"algorithm.name={config.algorithm.name} compares the members of a group, but trainer.group_size is 1: set it to 2 or more"
            )
        elif config.algorithm.keep_groups < 1:
            found.append("algorithm.keep_groups ranks groups by their spread of rewards, but trainer.group_size is 1: set it to 2 or more")
    found += collect_contradictions(config)
    if config.environment is not None and config.agent.format_penalty > 0 and "maxrl" in (config.algorithm.advantage, config.algorithm.name):
        found.append(
            "algorithm.advantage=maxrl divides by the mean reward, so no reward may be below 0, but agent.format_penalty is "
            f"{config.agent.format_penalty:g}: set it to 0"
        )
    if config.run.overwrite and Path.cwd().is_relative_to(config.run_dir.resolve()):
        found.append(f"run.overwrite would delete {config.run_dir.resolve()}, where you are: give the run a folder of its own with run.dir")
    if trainer.minibatches > trainer.groups_per_step:
        found.append(
            f"trainer.minibatches={trainer.minibatches} is more than trainer.groups_per_step={trainer.groups_per_step}: "
            "a group is never split, so set trainer.minibatches no higher than trainer.groups_per_step"
        )
    tiny = config.model.tiny
    if config.model.name != "tiny" and tiny != TinyModel():
        found.append(f"model.tiny is set but model.name is {config.model.name!r}: set model.name=tiny or remove model.tiny")
    if config.model.name == "tiny" and sampling.max_new_tokens >= tiny.context_length:
        found.append(
            f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.tiny.context_length={tiny.context_length}: lower the former or raise the latter"
        )
    if config.engine.kv_cache_tokens is not None and sampling.max_new_tokens > config.engine.kv_cache_tokens:
        found.append(
            f"sampling.max_new_tokens={sampling.max_new_tokens} does not fit engine.kv_cache_tokens={config.engine.kv_cache_tokens}: "
            "lower the former or raise the latter"
        )
    return found


def _algorithm_contradictions(section: AlgorithmSection) -> list[str]:
    found = []
    if section.kl_target is not None and section.kl_coef == 0:
        found.append("algorithm.kl_target steers a KL whose weight algorithm.kl_coef is 0: set it (0.001, say) or drop the target")
    if section.entropy_target is not None and section.entropy_coef == 0:
        found.append("algorithm.entropy_target aims a bonus whose weight algorithm.entropy_coef is 0: set it (0.1, say) or drop the target")
    if section.kl_coef == 0 and section.kl_in == "reward":
        found.append("algorithm.kl_in=reward, but its weight algorithm.kl_coef is 0: set it (0.001, say) or drop kl_in")
    if section.kl_in == "reward" and section.kl.endswith("+"):
        found.append(
            f"algorithm.kl={section.kl} is made for its gradient, which a reward has not: choose kl={section.kl[:-1]} or kl_in=loss"
        )
    if section.kl_in == "reward" and section.settled().advantage == "gdpo":
        found.append("algorithm.advantage=gdpo compares the reward's named parts, in which a KL has no place: choose kl_in=loss")
    if section.importance != "none" and section.old_logprobs == "rollout":
        found.append(
            f"algorithm.importance={section.importance} weighs recomputed against rollout log-probs, but old_logprobs is rollout: "
            "set old_logprobs=recomputed, or importance=none"
        )
    return found


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a recipe, applies `a.b=c` overrides, checks everything. Raises `ConfigError` with one line per problem."""
    path = config_sources.find_recipe(str(recipe))
    return build_config(config_sources.read_yaml(path), overrides, where=str(path), name=path.stem)


def build_config(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "config", name: str = "run", needs_environment: bool = True
) -> RunConfig:
    """Like `load_config`, from a mapping. `where` begins each line about a problem, `name` is the default of `run.name`."""
    keys = config_keys()
    plain = config_sources.merge(dict(tree), overrides, where=where, is_text=keys.is_text)
    if plain.pop("sweep", None) is not None:
        raise ConfigError(
            f"{config_sources.written_in('sweep:', overrides, where)}: sweep: these are several runs, which only `agentevo train` takes "
            "(--dry-run lists them): add sweep=null for the recipe without its variants"
        )
    run = plain.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", name)
    chosen = _chosen_type(plain.get("environment"))
    lines = keys.misplaced_booleans(plain, chosen=chosen)
    environment, errors, refusal = _read_environment(plain.get("environment"))
    if refusal:
        lines.append(refusal)
    if needs_environment and plain.get("environment", False) in (False, None):
        lines.append(f"environment.type: missing; choose one of {', '.join(environments.names())}")
        plain.pop("environment", None)
    elif isinstance(plain.get("environment"), dict):
        plain["environment"] = environment
    try:
        config = RunConfig.model_validate(plain)
    except pydantic.ValidationError as error:
        errors.extend(error.errors())
    lines.extend(keys.problem(error, chosen=chosen) for error in errors)
    if lines:
        raise ConfigError("\n".join(f"{config_sources.written_in(line, overrides, where)}: {line}" for line in dict.fromkeys(lines)))
    return config


def config_keys() -> ConfigKeys:
    """Every key of `RunConfig` with every registered environment's options, explained."""
    return ConfigKeys(RunConfig, environment_variants())


def environment_variants() -> Variants:
    """The models of the polymorphic section `environment`."""
    return {"environment": {name: environments.get(name).Config for name in environments.names()}}


def _chosen_type(environment: object) -> dict[str, str]:
    kind = environment.get("type") if isinstance(environment, dict) else None
    return {"environment": str(kind)} if kind in environments.names() else {}


def _read_environment(given: object) -> tuple[EnvironmentConfig | None, list[ErrorDetails], str | None]:
    """The environment's options checked by the model that its `type` names, or what is wrong with them, or with the type."""
    if not isinstance(given, dict):
        return None, [], None
    kind, known = given.get("type"), environments.names()
    if kind not in known:
        guess = nearest(kind, known) if isinstance(kind, str) else None
        what = "missing" if "type" not in given else f"got {kind!r}"
        hint = f" did you mean {guess}?" if guess else ""
        return None, [], f"environment.type: {what};{hint} choose one of {', '.join(known)}"
    try:
        return environments.get(kind).Config.model_validate(given), [], None
    except pydantic.ValidationError as error:
        return None, [{**problem, "loc": ("environment", *problem["loc"])} for problem in error.errors()], None


def to_yaml(config: RunConfig) -> str:
    """The whole resolved tree; loading it gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
