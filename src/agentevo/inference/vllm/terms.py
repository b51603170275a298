"""Translates between AgentEvo's terms and vLLM's: arguments, requests and outputs.

Requests that vLLM would compute differently from the other engines are refused, with the reason.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.config import EngineSection
from agentevo.errors import ConfigError, EngineError, GrammarError
from agentevo.inference.embedded.kv_cache import kv_bytes_per_token
from agentevo.inference.vllm.options import VllmOptions
from agentevo.inference.vllm.weights import WeightLoader
from agentevo.models.compute.adapters import is_adapted
from agentevo.models.compute.positions import context_length
from agentevo.models.vision.parts import has_tower, processor_of
from agentevo.runtime.extras import load_extra
from agentevo.types import MAX_TOP_LOGPROBS, Alternatives, SamplingParams
from agentevo.types.penalties import Penalties

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSIONS = ((0, 32), (0, 33))
"""The vLLM releases that this module supports: at least the first, and below the second. Labels of
weights came after 0.30, and the interfaces that this module calls change between minor releases."""


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports."""
LOWEST = 0.01
"""The lowest temperature above 0 at which vLLM samples: it raises lower ones silently."""
HIGHEST = 2.0
"""The highest temperature at which vLLM samples: it refuses higher temperatures."""
NEVER = -1e9
"""The bias of an id that is no token. It makes the probability 0."""


def check_sampling(sampling: SamplingParams, *, is_drafting: bool = False) -> None:
    """Raises EngineError for settings that vLLM applies in another order than the other engines,
    for settings whose effect it does not fully report, and for those that it does not apply if it
    decodes speculatively (`is_drafting`)."""
    penalties = sampling.penalties
    if is_drafting and (sampling.min_p > 0 or (penalties is not None and penalties.logit_bias)):
        raise EngineError(
            "sampling: vLLM has no min_p and no logit_bias while it decodes speculatively "
            "(engine.options.speculative_config): leave one of them out"
        )

    if sampling.grammar:
        raise GrammarError(
            "vLLM does not report which tokens a grammar allowed, so a turn under one could not "
            "be trained: use engine.type=torch, or leave the grammar out"
        )

    if not (sampling.temperature == 0 or LOWEST <= sampling.temperature <= HIGHEST):
        raise EngineError(
            f"sampling: temperature={sampling.temperature:g}: vLLM samples at 0 and at {LOWEST:g} "
            f"to {HIGHEST:g} only: choose one of these, or engine.type=torch"
        )

    if sampling.min_p > 0 and sampling.top_p < 1:
        raise EngineError(
            "sampling: min_p with top_p: vLLM applies min_p first, and every other engine last, "
            "which gives another distribution: set one of them"
        )

    if penalties is not None and penalties.logit_bias and penalties.repetition != 1:
        raise EngineError(
            "sampling: penalties: vLLM scales a logit for repetition after it adds the bias, and "
            "every other engine before: give logit_bias or repetition"
        )


def load_vllm(start_timeout_s: float = 600.0) -> Any:
    """Imports the package. Raises MissingExtraError if it is missing, and ConfigError for a release
    that this module does not support."""
    for name, value in {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, and may have a GPU
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_timeout_s)),
    }.items():
        os.environ.setdefault(name, value)

    vllm: Any = load_extra("vllm", "vllm", "engine.type=vllm", ", or set engine.type=torch")
    release = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not VERSIONS[0] <= release < VERSIONS[1]:
        supported = " and below ".join(".".join(map(str, version)) for version in VERSIONS)
        raise ConfigError(
            f"engine.type=vllm needs vLLM from {supported}, and {vllm.__version__} is installed: "
            "pip install 'agentevo[vllm]'"
        )

    return vllm


def adapter_of(folder: Path, *, fresh: bool = True) -> Any:
    """vLLM's object for the adapter in that folder. A `fresh` adapter replaces the previous one,
    also in running requests."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, str(folder), load_inplace=fresh)


def output_kind(name: str) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def engine_arguments(
    model: PreTrainedModel, section: EngineSection, options: VllmOptions
) -> dict[str, Any]:
    """The arguments of vLLM's `AsyncEngineArgs` for the section, including those that make its
    log-probs match AgentEvo's."""
    from vllm.platforms import current_platform

    memory: dict[str, Any] = {"gpu_memory_utilization": options.gpu_memory_utilization}
    if options.gpu_memory_utilization is None:
        tokens = section.kv_cache_tokens
        a_token = kv_bytes_per_token(model)
        limit = tokens * a_token if tokens else section.kv_cache_gb * 2**30
        memory = {"kv_cache_memory_bytes": int(limit)}

    steps: dict[str, Any] = {"max_num_batched_tokens": section.prefill_tokens}
    if current_platform.is_cpu():
        # After each chunk of a prompt, vLLM undoes a seeded draw, which it can't do on a CPU: its
        # worker would end. Without chunks, each prompt has to fit into one step.
        longest = options.max_model_len or context_length(model.config)
        most = max(section.prefill_tokens or 4096, longest, section.max_running)
        steps = {"enable_chunked_prefill": False, "max_num_batched_tokens": most}

    adapters: dict[str, Any] = {}
    if is_adapted(model):
        adapted: Any = model
        rank = adapted.peft_config[adapted.active_adapter].r
        room = min(lora_rank for lora_rank in LORA_RANKS if lora_rank >= rank)
        adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}

    eager = options.enforce_eager
    return {
        "dtype": options.dtype or str(model.dtype).removeprefix("torch."),
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": current_platform.is_cpu() if eager is None else eager,
        "max_num_seqs": section.max_running,
        "enable_prefix_caching": section.prefix_sharing,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS,
        "generation_config": "vllm",
        **_vision_arguments(model),
        "load_format": "safetensors",
        "worker_extension_cls": f"{WeightLoader.__module__}.{WeightLoader.__name__}",
        "disable_log_stats": True,
        **memory,
        **steps,
        **adapters,
    }


def _vision_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments for images and the tokenizer, which vLLM's processors of images need."""
    if processor_of(model) is not None:
        return {
            "limit_mm_per_prompt": {"video": 0},
            "mm_processor_cache_gb": 0,
            "mm_device_do_normalize": False,  # the run's processor has normalized the pixels
        }

    hidden = {"language_model_only": True} if has_tower(model) else {}
    return {"skip_tokenizer_init": True, **hidden}


def sampling_params_of(
    sampling: SamplingParams,
    vocabulary: int,
    unused: Sequence[int],
    *,
    streams: bool,
    is_drafting: bool = False,
) -> Any:
    """vLLM's sampling parameters of a request. The end-of-text token ends a request only if the
    request lists it. `logprobs` does not count the sampled token's. `unused`: ids of the model that
    are never sampled, because they are no tokens or stand for images. If vLLM decodes speculatively
    (`is_drafting`), a list of the allowed ids leaves them out, because it has no biases then."""
    penalties = sampling.penalties or Penalties()
    biases = dict(penalties.logit_bias)
    allowed = None
    if is_drafting:
        allowed = sorted(set(range(vocabulary)) - set(unused)) if unused else None
    else:
        biases |= dict.fromkeys(unused, NEVER)
    return load_vllm().SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, vocabulary),
        min_p=sampling.min_p,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed & (2**63 - 1),
        logprobs=sampling.top_logprobs,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=output_kind("DELTA" if streams else "FINAL_ONLY"),
        presence_penalty=penalties.presence,
        frequency_penalty=penalties.frequency,
        repetition_penalty=penalties.repetition,
        logit_bias=biases or None,
        allowed_token_ids=allowed,
    )


def scoring_params() -> Any:
    """vLLM's sampling parameters of a request for the log-probs of its prompt. vLLM samples at
    least one token."""
    return load_vllm().SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=output_kind("FINAL_ONLY"),
    )


@dataclass
class VllmTokens:
    """The tokens that vLLM has sampled for one request so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    """vLLM's `WeightVersionSpan`s, which come with its last output."""
    finish_reason: str | None = None

    def add(self, output: Any, sampling: SamplingParams) -> int:
        """Adds the next tokens of a vLLM output, and returns how many."""
        flat = output.logprobs
        for place, token in enumerate(output.token_ids):
            begin = flat.start_indices[place]
            end = flat.end_indices[place]
            greedy = sampling.temperature == 0
            self.ids.append(token)
            self.logprobs.append(0.0 if greedy else flat.logprobs[begin])

            if sampling.top_logprobs:
                token_logprobs = dict(
                    zip(flat.token_ids[begin:end], flat.logprobs[begin:end], strict=True)
                )
                self.top_logprobs.append(
                    [(token, 0.0)] if greedy else _likeliest(token_logprobs, sampling.top_logprobs)
                )

        self.end(output)
        return len(output.token_ids)

    def end(self, output: Any) -> None:
        """Records the finish reason if a vLLM output is the last one."""
        self.finish_reason = output.finish_reason
        self.spans = output.weight_versions or []

    def cut(self, count: int) -> None:
        """Keeps the first `count` tokens."""
        del self.ids[count:], self.logprobs[count:], self.top_logprobs[count:]

    def versions(self) -> list[int]:
        """The version of each token. Raises EngineError if vLLM has not reported which weights
        sampled it."""
        versions = [int(span.version) for span in self.spans for _ in range(span.start, span.end)]
        if len(versions) < len(self.ids):
            raise EngineError(
                f"vLLM reported the versions of {len(versions)} of {len(self.ids)} tokens, so "
                "none of them can be used: install a release that engine.type=vllm supports"
            )
        return versions[: len(self.ids)]


def _likeliest(logprobs: dict[int, float], count: int) -> Alternatives:
    """The likeliest of one position's log-probs, which always include the sampled token's."""
    ordered = sorted(logprobs.items(), key=lambda item: -item[1])[:count]
    return [(token, logp) for token, logp in ordered if math.isfinite(logp)]
