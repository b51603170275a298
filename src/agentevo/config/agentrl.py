"""AgentRL's scripts as recipes: its flags, and the helper models of its agent_config.yml.

    tree, remarks = recipe_of(read_script(text, name), folder)

What a flag means here is the key that stands for it, with its value; what there is no counterpart
for is said in a remark, as is what a person has to do. A key or a password that stands in a file is
never written out: the recipe names the environment variable that has to hold it.

Facts: AgentRL's configs.py and example scripts (OpenBMB/AgentCPM, January 2026).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentevo.config.agentrl_helpers import PLACEHOLDER, read_helpers
from agentevo.config.mcp_manager import PATH
from agentevo.errors import ConfigError
from agentevo.parsing import parse_json
from agentevo.registry import nearest

PASSWORD = "STORE_PASSWORD"
"""Environment variable that recipes name for the password in a script."""
TOKEN = "MCP_AUTH_TOKEN"
"""Environment variable that recipes name for the token in a script."""
_PASSWORD = re.compile(r"(?<=://)([^:/@]*):([^@/]+)@")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_TRUE = {"true", "1", "yes", "y", "t", "on"}
_FALSE = {"false", "0", "no", "n", "f", "off"}
_LOSSES = {"MINIRL": "minirl", "GRPO": "grpo", "GSPO": "gspo"}
_DEFAULTS = {
    "agent.max_turns": 25,
    "trainer.group_size": 8,
    "trainer.learning_rate": 1e-6,
    "sampling.max_new_tokens": 8196,
}
"""AgentRL's, where ours are others: they are written out."""

_NO_PART = {
    **dict.fromkeys(
        (
            "trainer",
            "cpu_ram_efficient_loading",
            "attention_implementation",
            "model_name",
            "trust_remote_code",
            "shift_labels",
            "remove_unused_columns",
            "accelerator_config",
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_prefetch_factor",
            "pad_to_multiple_of",
            "pad_to_maximum",
            "dynamic_batching",
            "log_entropy",
            "top_k",
            "bypass_causal_mask_check",
            "enable_loss_parallel",
            "loss_seq_chunk_size",
            "logging_steps",
            "save_only_model",
            "tool_call_parser",
            "max_pixels",
            "max_concurrent_samples_per_process",
            "target_concurrency",
            "inf_mem_ratio",
            "oss_connection_string",
            "enable_oss",
            "tune_vision",
            "remove_experience",
            "skip_non_positive_advantage",
            "compress_history",
            "minimal_advantage",
            "max_prompt_tokens",
            "new_context",
        ),
        "",
    ),
    "tp_size": "trainer.parallel.tensor splits the model, under torchrun (docs/parallel.md)",
    "pp_size": "trainer.parallel.pipeline splits the model, under torchrun (docs/parallel.md)",
    "ep_size": "trainer.parallel.expert splits the model, under torchrun (docs/parallel.md)",
    "cp_size": "trainer.parallel.context splits sequences, under torchrun (docs/parallel.md)",
    **dict.fromkeys(
        ("inf_tp_size", "inf_ep_size"),
        "engine.options splits the engine's model, with engine.type=vllm or sglang",
    ),
    "max_tokens": "no sample is too long to be trained: memory is bounded by "
    "trainer.micro_batch_tokens",
    "num_train_epochs": "the run ends after trainer.steps",
    "balance_sample": "algorithm.drop_zero_variance, algorithm.keep_groups choose groups here",
    "resample_error_records": "an attempt that fails is no score here, and is replaced",
    "sync_sampling": "rollout.staleness says how old tokens may be; 0, the default, is sync",
    "retrained_interval": "each attempt is trained on once",
    "out_of_date_decay": "algorithm.importance_age_power lets weights decay with age, and "
    "rollout.staleness bounds it",
    "min_turns": "no attempt is left out for its turns",
    "efficient_rewarding": "it changes no advantage there either",
    "reserve_context_error_count": "attempts cut off are trained, or left out by "
    "algorithm.drop_truncated",
    "enable_repetition_compress": "agent.max_repeats ends such an attempt",
    "drop_zero_advantage": "tokens without an advantage have no gradient anyway",
    "activation_offloading": "memory.offload_activations=true, on a GPU",
    "adv_scaling": "it scales the loss, which AdamW undoes but for max_grad_norm",
}
"""Flag -> why nothing stands for it; an empty reason is the machinery's, not worth a remark."""


def read_script(text: str, run_name: str) -> dict[str, str]:
    """The flags of the command in a script that starts AgentRL's main.py, by their names, with
    `$RUN_NAME` and what the script sets put in. Raises ConfigError."""
    known = {"RUN_NAME": run_name, **_assigned(text)}
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    line = next((one for one in text.splitlines() if "--" in one and "main.py" in one), None)
    if line is None:
        line = next((one for one in text.splitlines() if one.lstrip().startswith("--")), None)

    if line is None:
        raise ConfigError(
            "there is no command with AgentRL's main.py in it: give the script that starts it, "
            "such as minirl_example.sh, or a file with its flags"
        )

    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"the command can't be read as a shell's: {error}") from error

    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word in (">", ">>", "2>", "|", "&", "&&", ";", "2>&1"):
            break

        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            flags[name] = _with(value, known) if has_value else "true"
            name = "" if has_value else name
        elif name:
            flags[name] = _with(word, known)
            name = ""

    return flags


def recipe_of(
    flags: Mapping[str, str], folder: Path, agent_config: Path | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The recipe, with paths as they are from `folder`, and remarks for people. `agent_config`: in
    place of the one that the flags name. Raises ConfigError with a line for each flag that can't be
    translated."""
    tree = _Tree()
    reader = _Reader(flags, tree)
    for flag, translate in _FLAGS.items():
        if flag in flags:
            reader.read(flag, translate)

    tree.put("agent.type", "tool_agent")
    tree.put("agent.final", "answer_tag")
    for key, value in _DEFAULTS.items():
        tree.default(key, value)

    reader.groups()
    reader.loss()
    reader.tools()
    _context(flags, tree)

    named = flags.get("agent_config_path")
    if agent_config is not None or named is not None:
        read_helpers(agent_config or folder / str(named), tree.put, reader.remarks)
    else:
        tree.put("rewards", [{"name": "agentcpm", "place": "answer"}])
        reader.remarks.append("no agent_config_path: the judge of `rewards` needs remote_models")

    if flags.get("new_context") == "discard_all" and (models := tree.get("agent.browse.models")):
        tree.put("agent.context.summary_model", models[0])
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))

    return tree.values, reader.remarks


class _Tree:
    """Nested mappings, written by dotted keys."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        *sections, name = key.split(".")
        place = self.values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value

    def get(self, key: str) -> Any:
        place: Any = self.values
        for name in key.split("."):
            place = place.get(name) if isinstance(place, dict) else None
        return place

    def default(self, key: str, value: Any) -> None:
        if self.get(key) is None:
            self.put(key, value)


class _Reader:
    """Flags with their problems and remarks."""

    def __init__(self, flags: Mapping[str, str], tree: _Tree) -> None:
        self.flags = flags
        self.tree = tree

        self.remarks: list[str] = []
        self.problems: list[str] = []
        known = {*_FLAGS, *_NO_PART, *_OTHERS}
        for flag, value in flags.items():
            if flag in _LAUNCHER:
                continue

            if flag not in known:
                guess = nearest(flag, sorted(known))
                hint = f" (did you mean --{guess}?)" if guess else ""
                self.remarks.append(
                    f"--{flag} is no flag of AgentRL's that is known: left out{hint}"
                )
            elif _NO_PART.get(flag) and value not in ("1", "none", "false"):
                self.remarks.append(f"--{flag} {value}: {_NO_PART[flag]}")
            elif flag not in _NO_PART and (found := PLACEHOLDER.search(value)):
                self.problems.append(f"--{flag}: {found[0]} is to be filled in")

    def read(self, flag: str, translate: Callable[[_Tree, str], None]) -> None:
        """Puts what a flag means into the tree."""
        try:
            translate(self.tree, self.flags[flag])
        except ValueError as error:
            self.problems.append(f"--{flag}: got {self.flags[flag]!r}; {error}")

    def number(self, flag: str, default: int) -> int:
        """A flag that is a whole number."""
        try:
            return int(self.flags.get(flag, default))
        except ValueError:
            return default

    def groups(self) -> None:
        """Attempts of one step, as groups."""
        rows = self.number("gradient_accumulation_steps", 1)
        rows *= self.number("per_device_train_batch_size", 1)

        split = 1
        for flag in ("tp_size", "pp_size", "cp_size"):
            split *= self.number(flag, 1)

        processes = self.number("num_processes", split)
        rows *= max(1, processes // max(1, split))
        size = self.tree.get("trainer.group_size")
        self.tree.put("trainer.groups_per_step", max(1, round(rows / size)))

    def loss(self) -> None:
        """The preset, with the switches that it has."""
        name = self.flags.get("loss_calculater", "GRPO")
        if name == "CrossEntropy" or _is_true(self.flags.get("enable_sampling", "true")) is False:
            self.problems.append(
                "--loss_calculater CrossEntropy, --enable_sampling false: this is supervised "
                "training: `agentevo sft` with data.train (docs/sft.md)"
            )

        if name not in _LOSSES:
            if name != "CrossEntropy":
                self.problems.append(
                    f"--loss_calculater: got {name!r}; choose one of {', '.join(_LOSSES)}"
                )
            return

        put = self.tree.put
        put("algorithm.name", _LOSSES[name])
        if name != "MINIRL":
            if name == "GRPO":
                whole = _is_true(self.flags.get("token_level_loss", "true")) is not False
                by_sum = _is_true(self.flags.get("skip_length_normalization", "false"))
                row = "seq-mean-token-sum" if by_sum else "seq-mean-token-mean"
                put("algorithm.aggregation", "token-mean" if whole else row)
                # Leave-one-out without a standard deviation.
                put("algorithm.advantage", "rloo")

            return

        switches = {"token_level_loss": True, "strict_in_bound": False}
        switches["skip_length_normalization"] = False
        for flag, default in switches.items():
            value = _is_true(self.flags.get(flag, str(default)))
            if value is None:
                self.problems.append(f"--{flag}: got {self.flags[flag]!r}; needs true or false")
            put(f"algorithm.{flag}", value)

        row = "sum" if self.tree.get("algorithm.skip_length_normalization") else "mean"
        is_whole = self.tree.get("algorithm.token_level_loss")
        put("algorithm.aggregation", "token-mean" if is_whole else f"seq-mean-token-{row}")
        put("algorithm.advantage", "rloo")

        for flag, key in _BAND.items():
            if flag in self.flags:
                self.read(flag, _number(f"algorithm.{key}"))

    def tools(self) -> None:
        """The manager's tools."""
        url = self.flags.get("mcp_manager_url", f"http://localhost:9876{PATH}").rstrip("/")
        if url.endswith(PATH):
            entry: dict[str, Any] = {"type": "mcp_manager", "url": url, "timeout_s": 150}
            if self.flags.get("mcp_server_name", "all") != "all":
                entry["servers"] = [self.flags["mcp_server_name"]]
        else:
            entry = {"type": "mcp", "name": "manager", "url": url, "transport": "sse"}

        if self.flags.get("mcp_auth_token", "None") != "None":
            entry["api_key"] = f"${{env:{TOKEN}}}"
            self.remarks.append(f"--mcp_auth_token: put it into the environment variable {TOKEN}")

        self.tree.put("agent.tools", [entry])
        store = self.flags.get("db_connection_string")
        if store and (found := _PASSWORD.search(store)):
            hidden = _PASSWORD.sub(rf"{found[1]}:${{env:{PASSWORD}}}@".replace("\\", r"\\"), store)
            self.tree.put("store.url", hidden)
            self.remarks.append(
                f"--db_connection_string: put its password into the environment variable {PASSWORD}"
            )
        elif store:
            self.tree.put("store.url", store)


def _context(flags: Mapping[str, str], tree: _Tree) -> None:
    """What is done with a long history; the margin of 1,024 tokens is AgentRL's."""
    strategy = {"discard_all_tools": "discard_results", "discard_all": "summary"}.get(
        flags.get("new_context", "")
    )
    if strategy is not None:
        tree.put("agent.context.strategy", strategy)
        limit = flags.get("max_prompt_tokens", "")
        if limit.isdigit() and int(limit) > 1024:
            tree.put("agent.context.max_tokens", int(limit) - 1024)


def _assigned(text: str) -> dict[str, str]:
    """NAME=VALUE lines of a script; values that a shell would have to compute are left out."""
    found = re.findall(r"^\s*(?:export\s+)?([A-Z_][A-Z0-9_]*)=(\S*)", text, re.MULTILINE)
    plain = {name: value.strip("\"'") for name, value in found}
    return {name: value for name, value in plain.items() if not re.search(r"[$`]", value)}


def _with(value: str, known: Mapping[str, str]) -> str:
    def put_in(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return known.get(name, os.environ.get(name, found[2] or found[0]))

    return _VARIABLE.sub(put_in, value)


def _is_true(text: str) -> bool | None:
    """None for what is neither true nor false."""
    word = text.strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _text(key: str) -> Callable[[_Tree, str], None]:
    return lambda tree, value: tree.put(key, value)


def _number(key: str) -> Callable[[_Tree, str], None]:
    def put(tree: _Tree, value: str) -> None:
        try:
            number = float(value)
        except ValueError:
            raise ValueError("needs a number") from None
        tree.put(key, int(number) if number.is_integer() and "e" not in value.lower() else number)

    return put


def _sampling(tree: _Tree, value: str) -> None:
    given = parse_json(value)  # a ParseError is a ValueError
    if not isinstance(given, dict):
        raise ValueError('needs a JSON object, such as {"temperature": 1}')

    for name in ("temperature", "top_p", "min_p"):
        if name in given:
            tree.put(f"sampling.{name}", given[name])

    if given.get("top_k", -1) > 0:
        tree.put("sampling.top_k", given["top_k"])


def _adam(tree: _Tree, value: str) -> None:
    given = dict(one.split("=", 1) for one in value.split(",") if "=" in one)
    if "beta1" in given and "beta2" in given:
        try:
            tree.put("trainer.betas", [float(given["beta1"]), float(given["beta2"])])
        except ValueError:
            raise ValueError("needs numbers, such as beta1=0.9,beta2=0.98") from None


def _evaluation(tree: _Tree, value: str) -> None:
    if value == "no":
        tree.put("evaluation.every", 0)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("needs a whole number") from None


def _schedule(tree: _Tree, value: str) -> None:
    tree.put("trainer.schedule", value.removesuffix("_with_warmup"))


def _positive(key: str) -> Callable[[_Tree, str], None]:
    def put(tree: _Tree, value: str) -> None:
        if _whole(value) > 0:
            tree.put(key, _whole(value))

    return put


def _no_penalty(tree: _Tree, value: str) -> None:
    if value not in ("None", "0", "0.0"):
        raise ValueError("the trainer needs the whole distribution: leave it out")


def _once(tree: _Tree, value: str) -> None:
    if _whole(value) > 1:
        tree.put("trainer.epochs", _whole(value))


def _trackers(tree: _Tree, value: str) -> None:
    """Those that are trackers here, too; TensorBoard is always one."""
    named = value.replace(",", " ").split()
    backends = [name for name in named if name in ("mlflow", "swanlab", "trackio", "wandb")]
    if backends:
        tree.put("tracking.backends", backends)


def _half(tree: _Tree, value: str) -> None:
    if _is_true(value):
        tree.put("model.dtype", "bfloat16")


_FLAGS: dict[str, Callable[[_Tree, str], None]] = {
    "run_name": _text("run.name"),
    "output_dir": _text("run.dir"),
    "report_to": _trackers,
    "seed": _number("run.seed"),
    "model_name_or_path": _text("model.name"),
    "bf16": _half,
    "train_file": _text("tasks.train"),
    "max_steps": _number("trainer.steps"),
    "num_generations": _number("trainer.group_size"),
    "learning_rate": _number("trainer.learning_rate"),
    "lr_scheduler_type": _schedule,
    "warmup_steps": _number("trainer.warmup_steps"),
    "weight_decay": _number("trainer.weight_decay"),
    "optim_args": _adam,
    "max_grad_norm": _number("trainer.max_grad_norm"),
    "max_trained_count": _once,
    "save_steps": _number("checkpoint.every"),
    "eval_steps": _number("evaluation.every"),
    "eval_strategy": _evaluation,
    "max_new_tokens": _number("sampling.max_new_tokens"),
    "preferred_sampling_params": _sampling,
    "presence_penalty": _no_penalty,
    "frequency_penalty": _no_penalty,
    "max_turns": _number("agent.max_turns"),
    "repetition_early_stop_times": _positive("agent.max_repeats"),
}
"""Flag -> what it puts where. A later one has the last word."""
_BAND = {
    "epsilon": "clip_low",
    "epsilon_higher": "clip_high",
    "importance_weight_cap_ratio": "cap_ratio",
}
_OTHERS = {
    "loss_calculater",
    "token_level_loss",
    "strict_in_bound",
    "skip_length_normalization",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "enable_sampling",
    "mcp_manager_url",
    "mcp_server_name",
    "mcp_auth_token",
    "db_connection_string",
    "agent_config_path",
    *_BAND,
}
"""Flags that are read together with others."""
_LAUNCHER = {
    "config_file",
    "num_processes",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "num_machines",
}
"""Accelerate's."""
