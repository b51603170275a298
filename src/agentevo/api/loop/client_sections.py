"""The training settings that a client may give to a server: the keys of `KEYS`, and nothing that is
code, a file or address of the server, or a value of its environment.

Every key of the sections is in `KEYS` or, with the reason, in `REFUSED` (a test compares them with
the schema): a new key is refused until it is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentevo.config import RunConfig
from agentevo.config.model import CHAT_TEMPLATES, MAX_TEMPLATE
from agentevo.errors import ConfigError, shown
from agentevo.models.files.known_models import known_models
from agentevo.models.files.resolve import HUB
from agentevo.runtime.registry import nearest

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LAYER_NAME = re.compile(r"[\w.-]+")

Check = Callable[[str, Any], None]
"""(key, value) -> raises ConfigError for a value that a client may not give."""


def _any_value(place: str, value: Any) -> None:
    """For keys with numbers, switches, words that the schema lists, and texts that refer to nothing
    outside the recipe."""


def _keys(names: str, **checked: Check | Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), _any_value) | checked


def _check_model_name(place: str, name: Any) -> None:
    if name is None or name in ("tiny", *known_models.names()):
        return

    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{place}: {shown(name)} is not a known model: a server accepts "
            f"{', '.join(known_models.names())}, tiny and org/name, but no path"
        )


def _check_template(place: str, template: Any) -> None:
    if not isinstance(template, str) or template in CHAT_TEMPLATES:
        return
    if "{%" not in template and "{{" not in template:
        raise ConfigError(
            f"{place}: a server does not read files that a client names: give "
            f"{', '.join(CHAT_TEMPLATES)} or the template itself"
        )
    if len(template) > MAX_TEMPLATE:
        raise ConfigError(
            f"{place}: it has {len(template):,} characters: give {MAX_TEMPLATE:,} or fewer"
        )


def _check_layers(place: str, names: Any) -> None:
    """For lists, and mappings by name: PEFT treats names as regular expressions."""
    if names is not None and not isinstance(names, str | list | tuple | Mapping):
        raise ConfigError(f"{place}: {shown(names)}: give names of layers, such as [q_proj]")
    for name in [names] if isinstance(names, str) else names or ():
        if not isinstance(name, str) or not _LAYER_NAME.fullmatch(name):
            raise ConfigError(
                f"{place}: {shown(name)} is not the name of a layer, such as q_proj: a server "
                f"accepts no regular expressions from a client"
            )


def _check_engine(place: str, name: Any) -> None:
    if name not in ENGINES:
        raise ConfigError(
            f"{place}: {shown(name)}: a server takes {' and '.join(ENGINES)}: other engines call "
            f"addresses or start programs that a client names"
        )


ENGINES = ("torch", "vllm")
"""Engines whose weights and options come only from the run."""
_SHAPES = (
    "attention_dropout max_position_embeddings output_router_logits rope_parameters rope_scaling "
    "rope_theta router_aux_loss_coef sliding_window"
)
"""Keys of a model's config.json that name no file and no code."""
_MODEL = _keys(
    "dtype device template",
    name=_check_model_name,
    chat_template=_check_template,
    config_overrides=_keys(_SHAPES),
    tiny=_keys("hidden_size num_layers num_heads context_length tokenizer vision"),
    vision=_keys("images freeze min_pixels max_pixels"),
    lora=_keys(
        "rank alpha dropout layers rslora dora init bias quantize",
        targets=_check_layers,
        exclude=_check_layers,
        rank_pattern=_check_layers,
        alpha_pattern=_check_layers,
        modules_to_save=_check_layers,
    ),
)
_AGENT = _keys("train weights_of version lag remote", model=_MODEL)
KEYS: Mapping[str, Mapping[str, Any]] = {
    "agent": _keys("max_turns timeout_s"),
    "algorithm": _keys(
        "name advantage policy_loss aggregation kl_coef kl kl_in kl_target kl_horizon reference "
        "reference_every reference_decay old_logprobs importance importance_cap importance_floor "
        "importance_age_power train_observations reward_weights entropy_coef entropy_target "
        "drop_zero_variance drop_truncated keep_groups preference_loss pairs pairs_per_group "
        "pair_margin dynamic_sampling rlpr_beta rlpr_decay rlpr_record_from rlpr_start "
        "length_shaping length_max length_buffer length_weight length_rewards epsilon "
        "scale_by_std whiten gamma lam turn_gamma turn_lam turn_baseline turn_weight process_coef "
        "handle_zero_tail clip_low clip_high dual_clip tau_pos tau_neg cap beta fraction low high "
        "coef token_level_loss strict_in_bound skip_length_normalization cap_ratio mode norm "
        "label_smoothing desirable_weight undesirable_weight",
        reference_model=_check_model_name,
    ),
    "checkpoint": _keys("every keep_last keep_best background"),
    "critic": _keys("trunk learning_rate clip coef pretrain_steps"),
    "engine": _keys(
        "kv_cache_gb kv_cache_tokens max_running prefill_tokens prefix_sharing batch_invariant "
        "routed_experts timeout_s",
        type=_check_engine,
        options=_keys(
            "dtype max_model_len tensor_parallel_size gpu_memory_utilization enforce_eager"
        ),
    ),
    "memory": _keys("checkpointing offload_activations offload_optimizer optimizer"),
    "model": _MODEL,
    "process_reward": _keys("beta learning_rate"),
    "reward_model": _keys("coef at", name=_check_model_name),
    "rollout": _keys(
        "staleness policy in_flight sharing max_attempts extra_attempts lease_s poll_s "
        "keep_versions"
    ),
    "run": _keys("seed"),
    "sampling": _keys("temperature max_new_tokens top_p top_k min_p stop"),
    "tracking": _keys(
        "tensorboard report token_numbers project name group tags notes attempts log_model flush_s"
    ),
    "trainer": _keys(
        "steps groups_per_step group_size learning_rate warmup_steps schedule min_lr_ratio "
        "weight_decay betas max_grad_norm minibatches epochs micro_batch_tokens compute "
        "prefix_merging torch_compile routing_replay router_aux_loss_coef"
    ),
}
"""The keys that a client may set, each with the check of its value; `agents` has such keys by
name."""
_ONE_PROCESS = "a server samples and trains in a single process"
_NO_FILE = "a server does not use files that a client names"
_NO_REPLAY = "the program chooses the attempts of its groups"
REFUSED: Mapping[str, str] = {
    "algorithm.advantage_function": "a server runs no code of a client's",
    "algorithm.credit": "a server runs no code of a client's",
    "algorithm.loss_function": "a server runs no code of a client's",
    "algorithm.replay_max_age": _NO_REPLAY,
    "algorithm.replay_per_task": _NO_REPLAY,
    "algorithm.replay_successes": _NO_REPLAY,
    "engine.options.start_timeout_s": "the server says how long an engine may take to start",
    "model.lora.adapter": _NO_FILE,
    "rollout.engine_secret": _ONE_PROCESS,
    "rollout.engine_urls": _ONE_PROCESS,
    "rollout.engines": _ONE_PROCESS,
    "rollout.samplers": _ONE_PROCESS,
    "rollout.transport": _ONE_PROCESS,
    "rollout.weights": _ONE_PROCESS,
    "run.dir": "it keeps the run in its own folder",
    "run.name": "it keeps the run in its own folder",
    "run.overwrite": "a server never replaces an existing model",
    "run.threads": "the server's machine is shared",
    "tracking.backends": "a server sends no data to addresses that a client names: log what "
    "`train` returns in your own program, or ask the server's operator",
    "trainer.optimizer_from": _NO_FILE,
    "trainer.parallel": _ONE_PROCESS,
}
"""Why a client may not set the others. A key of one of `agents` is listed without the agent's
name."""
_NAMED = {"model": "name", "algorithm": "name", "engine": "type"}
"""The key that a section has where it is only a name."""


def check_sections(sections: Mapping[str, Any]) -> None:
    """Raises ConfigError for keys that a client may not set, independent of the server's state."""
    for place, text in _texts("", sections):
        if "${" in text:
            raise ConfigError(
                f"{place}: a server does not resolve ${{...}} from a client: give the value itself"
            )

    for name, section in sections.items():
        if name == "agents" and isinstance(section, Mapping):
            for agent, its in section.items():
                _check(f"agents.{agent}", its, _AGENT)
        elif name in KEYS:
            _check(name, section, KEYS[name])
        else:
            raise ConfigError(
                f"{name}: a server takes {', '.join(sorted({*KEYS, 'agents'} - {'run'}))} and "
                "run.seed: it keeps the run in its own folder, and runs no code of a client's"
            )


def _check(place: str, value: Any, keys: Mapping[str, Any] | Check) -> None:
    if not isinstance(keys, Mapping):
        keys(place, value)
        return

    key = place.rpartition(".")[2]
    if isinstance(value, str) and key in _NAMED:
        value = {_NAMED[key]: value}
    for name, item in value.items() if isinstance(value, Mapping) else ():
        if name not in keys:
            raise ConfigError(f"{place}.{name}: {_refusal(place, str(name), keys)}")
        _check(f"{place}.{name}", item, keys[name])


def _refusal(place: str, name: str, keys: Mapping[str, Any]) -> str:
    """Why a client may not set this key."""
    if place == "agent":
        return (
            "the agent is the client's own function: a server accepts only "
            f"agent.{' and agent.'.join(keys)}"
        )

    reason = REFUSED.get(re.sub(r"^agents\.[^.]*\.", "", f"{place}.{name}"))
    if reason is not None:
        return reason

    guess = nearest(name, list(keys))
    hint = f": did you mean {place}.{guess}?" if guess else f", such as {', '.join(keys)}"
    return f"not a key that a client may set{hint}"


def brings_template(config: RunConfig) -> bool:
    """Whether a chat template of such a run may come from a stranger: from the client, or from a
    model of the hub."""
    agents = [agent.model for agent in config.agents.values()]
    return any(
        model.name not in ("tiny", *known_models.names())
        or model.chat_template not in (None, *CHAT_TEMPLATES)
        for model in (config.model, *agents)
        if model is not None
    )


def only_from_the_hub(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Checked sections in which org/name means the hub's model, and never a folder of that name in
    the server's current folder."""
    keys = {**KEYS, "agents": dict.fromkeys(sections.get("agents") or (), _AGENT)}
    return {name: _with_hub_names(name, section, keys[name]) for name, section in sections.items()}


def _with_hub_names(key: str, value: Any, keys: Mapping[str, Any] | Check | None) -> Any:
    if isinstance(keys, Mapping) and isinstance(value, Mapping):
        return {name: _with_hub_names(name, item, keys.get(name)) for name, item in value.items()}
    if isinstance(keys, Mapping):
        keys = keys.get(_NAMED.get(key, "name"))
    is_model = keys is _check_model_name and isinstance(value, str)
    return f"{HUB}{value}" if is_model and _HUB_NAME.fullmatch(value) else value


def _texts(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """(place, text) of every key and text within a value."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield place or "a section", str(key)
            yield from _texts(f"{place}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(place, item)
