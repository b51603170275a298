"""Models with random weights, small enough for any test, in the architectures whose attention
differs; and an engine that follows a script."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
import warm_processes
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentevo.config import ModelSection, TinyModel
from agentevo.inference.engine import TokenListener
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.compute import cpu_kernels
from agentevo.models.compute.attention import Compute, prepare
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.types import Completion, FinishReason, SamplingParams

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup, and in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["run_fixtures", "server_fixtures"]
if "AGENTEVO_COLD" not in os.environ:
    warm_processes.install()

# The same examples every time, so that nobody's change is refused for what another one left; a
# search for new ones is AGENTEVO_RANDOM=1.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, derandomize="AGENTEVO_RANDOM" not in os.environ
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("any-machine"), max_examples=10
)
hypothesis.settings.load_profile("any-machine")  # `make test` says --hypothesis-profile quick


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-screenshots",
        action="store_true",
        help="tests/agentevo_ui/test_screenshots.py writes its pictures into docs/images",
    )


def pytest_collection(session: pytest.Session) -> None:
    """Thousands of modules and tests are made and stay: nothing of them is garbage."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of SmolLM2 come last and together: one worker reads it, once, and on a new machine it
    is downloaded by then (.ci/run)."""
    items.sort(key=lambda item: item.get_closest_marker("smollm2") is not None)


def pytest_collection_finish() -> None:
    """What is imported by now is searched for garbage no more: half a second each time, which every
    training would begin with (agentevo/heap.py)."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _start_warm_or_cold(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs start by a fork of a process that has everything imported, except in a test that is
    marked `cold_start` and in `make soak`."""
    if request.node.get_closest_marker("cold_start") is None:
        yield
    else:
        with warm_processes.cold_start():
            yield


VOCABULARY = 97
WINDOW = 24


class RandomModel(NamedTuple):
    """One model twice: prepared for AgentEvo, and as transformers runs it alone."""

    model: PreTrainedModel
    alone: PreTrainedModel

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), V] of one whole sequence by transformers' own attention, without a cache."""
        with torch.no_grad():
            return self.alone(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


GPT_OSS = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGURED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "granite-swa": (
        "granite_swa",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW},
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
            "floor_scale": 16,
            "num_local_experts": 4,
        },
    ),
}
"""Models with attention sinks and windows, and with chunks and queries that are scaled by their
position."""
ROW_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "gpt-oss-rows": ("gpt_oss", GPT_OSS),
    "mamba": ("mamba", {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "minimax": (
        "minimax",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
    ),
    "rwkv": ("rwkv", {"attention_hidden_size": 32}),
}
"""Models that compute rows: recurrent states that continue by several tokens or (mamba) only by
one, convolutions, windows (if the recipe chooses rows), ALiBi, states that can't be stacked
(minimax), and states of a kind of their own (rwkv)."""


def _build(name: str) -> PreTrainedModel:  # noqa: PLR0911 (an architecture each)
    # Wide initial weights: with the usual 0.02 attention is all but uniform, and a token that sees
    # too much would hardly show.
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": torch.float32,
    }
    if name.endswith("-wide"):
        name = name[:-5]
        shape["hidden_size"] = 64
        shape["intermediate_size"] = 64

    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16))
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=WINDOW))
    if name == "phi3":
        return Phi3ForCausalLM(Phi3Config(**shape, sliding_window=WINDOW))

    if name == "mixtral":
        return MixtralForCausalLM(
            MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        )

    if name == "qwen3-moe":
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, head_dim=8))

    if name == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
        return Gemma3ForCausalLM(
            Gemma3TextConfig(**shape, **layers, head_dim=8, query_pre_attn_scalar=8)
        )

    if name in CONFIGURED | ROW_ARCHITECTURES:
        model_type, kinds = (CONFIGURED | ROW_ARCHITECTURES)[name]
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**shape | kinds))

    assert name == "gemma2"
    return Gemma2ForCausalLM(
        Gemma2Config(
            **shape,
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=10.0,
        )
    )


@cache
def _random_model(name: str) -> RandomModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(name.encode()))
        model = _build(name).eval()
        with torch.no_grad():
            for parameter in (
                model.parameters()
            ):  # biases and norms start at 0 or 1, where a mistake in them is invisible
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))

    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    compute: Compute = "rows" if name.endswith("-rows") else "auto"
    return RandomModel(prepare(model, compute=compute), alone)


@pytest.fixture(scope="session")
def random_model() -> Callable[[str], RandomModel]:
    """`random_model(name)`: llama (grouped heads, tied embeddings), qwen2 (biases), qwen3 (norms of
    q and k), gemma2 (caps, a window in every other layer), gemma3 (the same with norms and two
    ropes in place of caps), mistral or phi3 (a window), mixtral or qwen3-moe (experts), or one of
    CONFIGURED and ROW_ARCHITECTURES; with -wide behind it, of a shape that the CPU's kernels take.
    The same two objects for every test: who trains the model must copy it."""
    return _random_model


CORPUS = (
    "Take the left coin or the right one. Up Down Left Right",
    "You win. You lose. Go on.",
    "red green blue black white",
)


@pytest.fixture(params=["own kernels", "PyTorch's"])
def with_and_without_kernels(request, monkeypatch) -> None:
    """Runs a test twice: with the kernels for the CPU where there are any, and without."""
    if request.param == "PyTorch's":
        monkeypatch.setattr(cpu_kernels, "_load_kernels", lambda: (None, "left out", ""))


@pytest.fixture
def tiny_policy() -> Callable[..., LoadedModel]:
    """`tiny_policy(seed=0, **shape)`: a fresh prepared tiny policy with a word tokenizer for a few
    words."""

    def make(seed: int = 0, **shape: Any) -> LoadedModel:
        section = ModelSection(
            name="tiny",
            device="cpu",
            tiny=TinyModel(
                **{"hidden_size": 32, "num_layers": 2, "num_heads": 2, "context_length": 256}
                | shape
            ),
        )
        loaded = load_model(section, corpus=lambda: CORPUS, seed=seed)
        prepare(loaded.model)
        return loaded

    return make


@pytest.fixture
def loaded(tiny_policy: Callable[..., LoadedModel]) -> LoadedModel:
    """A fresh tiny policy of the usual shape."""
    return tiny_policy(seed=2)


@pytest.fixture
def chat(loaded: LoadedModel) -> ChatFormat:
    """How conversations read for `loaded`."""
    return ChatFormat(loaded.tokenizer)


class ScriptedEngine:
    """An engine that says what it is told to: per request the next text of `says`, ended by
    `end_id`; a text that ends in `...` is cut off there by the token limit. An exception in the
    list is raised. Remembers every request."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_id: int, says: Iterable[str | BaseException]
    ) -> None:
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._says = iter(says)
        self.version = 3
        self.requests: list[tuple[list[int], SamplingParams, str | None]] = []
        self.released: list[str] = []

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
    ) -> Completion:
        self.requests.append((list(prompt_ids), sampling, session))
        text = next(self._says)
        await asyncio.sleep(0)

        if isinstance(text, BaseException):
            raise text

        ids = self._tokenizer.encode(text.removesuffix("..."), add_special_tokens=False)
        ids += [] if text.endswith("...") else [self._end_id]
        reason: FinishReason = "length" if text.endswith("...") else "stop"
        return Completion(
            ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason=reason,
        )

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def publish(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        deadline_s: float = 1.0,
    ) -> None:
        self.version = version

    def stats(self) -> dict[str, float]:
        return {}


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    """`scripted_engine(tokenizer, end_id, says)`."""
    return ScriptedEngine
