"""Every architecture that transformers has as a causal language model, computed by AgentEvo and by
transformers: exact with its figures and the way it computes, or refused with the words.

    .venv/bin/python benchmarks/architectures.py --write     # the page and ways.json, 10 minutes
    .venv/bin/python benchmarks/architectures.py llama "llama, RoPE yarn"

Of each a tiny model with random weights is made (tiny_configs.py), and compared with transformers'
own eager attention on every sequence alone, in float64 throughout:

    training   log-probs of packed sequences that share beginnings, some longer than the window
    gradient   of a weighted sum of them, in all weights
    engine     log-probs as drawn, of requests in company, shared prefixes and turns of a session
    LoRA       the training column again, with adapters on all linear layers

A figure is the largest absolute difference of log-probs in nats, for gradients |g - g64| / |g64|.
AgentEvo computes in float32, and what eager attention in float32 differs by is beside it. Where a
figure is above its limit, or something fails in another way than by a refusal of `prepare`, that is
a defect, and the command ends with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentevo.config import EngineSection, LoraSection
from agentevo.errors import ModelError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.adapters import add_adapter
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.rows import row_settings
from agentevo.models.compute.trial import REMEDY
from agentevo.models.known_ways import FILE as WAYS
from agentevo.training.batching import row_groups
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample, SamplingParams
from tiny_configs import VARIANTS, tiny_config

MOST_PARAMETERS = 30_000_000
MOST_CHARACTERS = 300
PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
INTRODUCTION = """# Architectures

This page shows which model architectures you can train: every causal language model that
transformers loads. There are two ways to compute, and the losses, adapters, checkpoints and
everything else are the same over both:

- **tree**: AgentEvo's attention. All sequences are packed into one row of tokens, prefixes that
  they share are computed once, and a plan says which token may attend to which. For models whose
  layers are attention and feed-forward, with sliding windows, chunks (Llama 4) and attention sinks
  (gpt-oss, MiMo V2 Flash, Granite SWA).
- **rows**: the model's own forward pass, with a sequence per row. For all other models: recurrent
  layers, convolutions, sparse attention, models without transformers' attention interface.
  **rows, shared**: a prefix that sequences share is computed once as well. Their passes continue
  from its state (recurrent states, convolutions' inputs, keys and values), and the gradient flows
  back through it.

Every model is checked when it is loaded. `prepare` runs a short text through the model twice, as
transformers does and as the tree does (`models/compute/trial.py`). If the results differ, the model
computes rows, and the run says so with the reason. A second trial shows whether its passes continue
from a state with the right log-probs and gradients (`models/compute/rows.py`). A model in which a
token sees later tokens is refused. `trainer.compute` (`auto`, `tree`, `rows`) makes the choice
yourself: with `tree`, a model that the tree can't compute is refused. `agentevo list models` shows
the way of each known model and of each model type, without loading one.

What rows cost: if states are not shared, prefixes are computed once per sample. That also holds for
prefixes that save fewer than 128 tokens, and for all prefixes with `memory.checkpointing`,
`memory.offload_activations` or `trainer.parallel.shard`. `trainer.parallel.tensor`, `context`,
`expert` and `pipeline`, `trainer.routing_replay`, `engine.routed_experts` and
`engine.batch_invariant` need the tree. [Engines](engines.md#models-that-compute-rows) says how the
embedded engine generates with such a model.

`python benchmarks/architectures.py --write` made the tables with transformers {version}, on tiny
models with random weights in float32 on a CPU: {counts}

## How to read the figures

A figure is the largest difference of a log-prob, in nats, from transformers' eager attention on
each sequence alone in float64:

- **way**: tree or rows, with shared prefixes of any length
- **training**: in a training pass over several sequences
- **engine**: in the engine, for tokens as drawn
- **gradient**: |g - g64| / |g64| for the gradient g of the packed pass
- **LoRA**: in a training pass with LoRA on all linear layers
- **eager**, **its gradient**: transformers' own difference in float32, for comparison

## Long contexts with RoPE scaling

Two RoPE types choose their frequencies by the longest sequence of a pass:

- `dynamic` does so beyond `max_position_embeddings`. No sequence here is longer.
- `longrope` (Phi-3-128k, Phi-3.5, Phi-4-mini) does so beyond `original_max_position_embeddings`.
  That length is the model's context in AgentEvo, and longer requests, rows and samples are refused.

To train a `longrope` model with long contexts, copy `long_factor` over `short_factor` (and
`long_mscale` over `short_mscale`, if the model has them) in the RoPE parameters of its
`config.json`. The model then has one set of frequencies at any length, here and in every engine
that serves it later (`models/compute/positions.py`).

## Sparse attention with equal scores

DeepSeek V3.2 and GLM MoE DSA attend to the `index_topk` keys with the highest index scores. If the
scores at the limit are equal up to rounding, a training pass may choose another key than the engine
did, and the log-prob of that one token differs. Scores of exactly 0 are frequent with few index
heads: in a tiny model with 32 heads, 2 of 380 tokens differed, by 0.8 nats, and with 128 heads none
(`tests/runs/orchestration/test_rows_run.py`). The metric `actor/logprob_diff_max` shows such
tokens, and `algorithm.importance` weights them.

For mixture-of-experts models whose routing can be replayed, see [Training](training.md).
"""
VISION_HEADING = "## Models that see"
"""The last section of the page, which vision_architectures.py writes."""
LIMIT = 1e-4
"""Nats."""
GRADIENT_LIMIT = 1e-4
NO_FLOAT64 = {"xglm": "its code does not run in float64, with which the figures are compared"}


class Float64(TorchFunctionMode):
    """Norms and softmaxes that models compute in float32 are computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


@dataclass
class Row:
    """What came out for one model."""

    name: str
    class_name: str = ""
    way: str = "tree"
    refusal: str = ""
    defect: str = ""
    missing: str = ""
    """Why there is no tiny model."""
    figures: dict[str, float] = field(default_factory=dict)
    lora_refusal: str = ""

    @property
    def verdict(self) -> str:
        if self.missing:
            return "not tried"
        return "defect" if self.defect else "refused" if self.refusal else "exact"


def tiny_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """Random weights; biases and norms, which begin at 0 or 1, are moved away from there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        size = sum(p.numel() for p in model.parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size:,} parameters")

        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))

    return model.float().eval()


def all_names() -> list[str]:
    """Model types, and what some of them can be set to."""
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def check(name: str) -> Row:
    row = Row(name, missing=NO_FLOAT64.get(name, ""))
    if row.missing:
        return row

    try:
        model = tiny_model(tiny_config(name))
    except Exception as error:  # noqa: BLE001
        row.missing = _one_line(error)
        return row

    row.class_name = type(model).__name__
    try:
        prepared = prepare(copy.deepcopy(model))
    except ModelError as error:
        row.refusal = _one_line(error, kind=False)
        return row
    except Exception as error:  # noqa: BLE001
        row.defect = _one_line(error)
        return row

    settings = row_settings(prepared)
    row.way = "tree" if settings is None else "rows, shared" if settings.shares else "rows"
    try:
        row.figures = _figures(model, prepared)
        row.figures |= _lora_figures(model)
    except ModelError as error:
        if not row.figures:
            row.defect = _one_line(error)
        row.lora_refusal = _one_line(error, kind=False)
    except Exception as error:  # noqa: BLE001
        row.defect = _one_line(error)

    lora_limit = max(LIMIT, 4 * row.figures.get("eager", 0.0))  # some are inexact in float32
    limits = {
        "training": LIMIT,
        "engine": LIMIT,
        "gradient": GRADIENT_LIMIT,
        "lora": lora_limit,
    }
    wrong = [key for key, limit in limits.items() if not row.figures.get(key, 0.0) <= limit]
    row.defect = row.defect or ", ".join(f"{key} {row.figures[key]:.1e}" for key in wrong)
    return row


def _sequences() -> list[list[int]]:
    """Some share their beginnings; the longest are longer than the window, one is a single step."""
    draw = random.Random(1)
    trunk = [draw.randrange(6, 97) for _ in range(40)]
    tails = [[draw.randrange(6, 97) for _ in range(size)] for size in (30, 17, 3, 45, 9)]
    return [trunk + tails[0], trunk + tails[1], trunk[:20] + tails[2], tails[3], tails[4]]


def _samples() -> list[Sample]:
    return [
        Sample.given(str(number), "", ids, [False] + [True] * (len(ids) - 1))
        for number, ids in enumerate(_sequences())
    ]


def _alone(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[T - 1] log-probs of a sequence's tokens, by transformers; differentiable."""
    run: Any = model
    logits = run(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def _weights(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).double().flatten()
            for p in model.parameters()
            if p.requires_grad
        ]
    )


def _by_transformers(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logp = torch.cat([_alone(model, ids) for ids in _sequences()])
    (logp * _weights(len(logp)).to(logp.dtype)).sum().backward()
    return logp.detach().double(), _gradient(model)


def _by_us(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    batch = pack(_samples(), torch.device("cpu"))
    logp, _ = token_logprobs(model, batch)
    order = torch.argsort(batch.samples * 10_000 + batch.places)
    (logp[order] * _weights(len(logp)).to(logp.dtype)).sum().backward()
    return logp[order].detach().double(), _gradient(model)


def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy; grouped products of experts have no float64."""
    exact: Any = copy.deepcopy(model).double()
    inner = exact.get_base_model() if hasattr(exact, "get_base_model") else exact
    inner.set_experts_implementation("eager")
    return exact


def _figures(model: PreTrainedModel, prepared: PreTrainedModel) -> dict[str, float]:
    exact = _in_float64(model)
    with Float64():
        logp, gradient = _by_transformers(exact)

    ours, our_gradient = _by_us(prepared)
    eager, eager_gradient = _by_transformers(model)
    return {
        "training": _largest(ours, logp),
        "gradient": _relative(our_gradient, gradient),
        "engine": _engine_difference(prepared, exact),
        "eager": _largest(eager, logp),
        "eager gradient": _relative(eager_gradient, gradient),
    }


def _lora_figures(model: PreTrainedModel) -> dict[str, float]:
    adapted = add_adapter(copy.deepcopy(model), LoraSection(rank=4), seed=3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    exact = _in_float64(adapted)
    ours, our_gradient = _by_us(prepare(adapted))
    with Float64():
        logp, gradient = _by_transformers(exact)

    return {"lora": _largest(ours, logp), "lora gradient": _relative(our_gradient, gradient)}


def _engine_difference(prepared: PreTrainedModel, exact: PreTrainedModel) -> float:
    """Largest difference of a log-prob as drawn: a group, some of its own, then second turns."""
    engine = TorchEngine(prepared, config=EngineSection(kv_cache_tokens=4096, prefill_tokens=48))
    longest = _sequences()[0]
    prompts = [longest[:40]] * 3 + [longest[:60], longest[:20]] + _sequences()[3:]
    done: list[tuple[list[int], Any]] = []

    async def talk(number: int, prompt: list[int]) -> None:
        for turn in range(2):
            sampling = SamplingParams(temperature=1.0, max_new_tokens=9, seed=10 * number + turn)
            completion = await engine.generate(
                prompt, sampling, session=str(number), deadline_s=120
            )
            done.append((prompt, completion))
            prompt = [*prompt, *completion.ids, 7 + number, 8 + turn]

    async def all_of_them() -> None:
        await asyncio.gather(*(talk(number, prompt) for number, prompt in enumerate(prompts)))

    asyncio.run(all_of_them())
    worst = 0.0
    with torch.no_grad(), Float64():
        for prompt, completion in done:
            wanted = _alone(exact, [*prompt, *completion.ids])[len(prompt) - 1 :]
            worst = max(worst, _largest(torch.tensor(completion.logprobs).double(), wanted))

    return worst


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _one_line(error: BaseException, kind: bool = True) -> str:
    return " ".join(f"{type(error).__name__ + ': ' if kind else ''}{error}".split())


def page(rows: Sequence[Row]) -> str:
    """docs/architectures.md."""
    by_verdict = {
        verdict: [row for row in rows if row.verdict == verdict]
        for verdict in ("exact", "refused", "not tried", "defect")
    }
    counts = ", ".join(f"{len(part)} {verdict}" for verdict, part in by_verdict.items() if part)
    exact_ways = [row.way for row in by_verdict["exact"]]
    shared = exact_ways.count("rows, shared")
    counts += (
        f".\n{shared + exact_ways.count('rows')} of the exact ones compute rows, {shared} of them"
    )
    counts += " shared prefixes once."
    lines = [
        INTRODUCTION.format(version=transformers.__version__, counts=counts),
        "## Exact",
        "",
        "| model type | class | way | training | engine | gradient | LoRA | eager | its gradient |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_exact_line, by_verdict["exact"]),
        "",
        "## Refused",
        "",
        "The last column is the reason that `prepare` gives, without class name and advice.",
        "",
        "| model type | class | words |",
        "|---|---|---|",
        *(f"| {r.name} | {r.class_name} | {_words(r)} |" for r in by_verdict["refused"]),
        "",
        "## Not tried",
        "",
        "| model type | why no tiny model can be made |",
        "|---|---|",
        *(f"| {r.name} | {_cell(r.missing)} |" for r in by_verdict["not tried"]),
    ]
    if by_verdict["defect"]:
        lines += ["", "## Defects", "", "| model type | what is wrong |", "|---|---|"]
        lines += [f"| {r.name} | {_cell(r.defect)} |" for r in by_verdict["defect"]]

    return "\n".join(lines) + "\n"


def ways(rows: Sequence[Row]) -> dict[str, list[str]]:
    """src/agentevo/models/ways.json: the model types of each way, without their variants."""
    exact = [row for row in rows if row.verdict == "exact" and "," not in row.name]
    return {
        way: [row.name for row in exact if row.way.partition(",")[0] == way]
        for way in ("tree", "rows")
    }


def _exact_line(row: Row) -> str:
    figures = [f"{row.figures[key]:.0e}" for key in ("training", "engine", "gradient")]
    lora = f"{row.figures['lora']:.0e}" if "lora" in row.figures else _cell(row.lora_refusal)
    eager = [f"{row.figures[key]:.0e}" for key in ("eager", "eager gradient")]
    return f"| {' | '.join([row.name, row.class_name, row.way, *figures, lora, *eager])} |"


def _words(row: Row) -> str:
    words = row.refusal.removeprefix(row.class_name).removeprefix(":").strip()
    return _cell(words.removesuffix(REMEDY).strip().rstrip(":"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:MOST_CHARACTERS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="model types and variants; all without")
    parser.add_argument("--write", action="store_true", help="write the page and ways.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    row_groups.SMALLEST_SAVING = 1  # the texts are short

    rows = []
    for name in options.names or all_names():
        row = check(name)
        rows.append(row)
        figures = "  ".join(f"{key} {value:.1e}" for key, value in row.figures.items())
        reason = row.defect or row.refusal or row.missing or row.lora_refusal
        print(f"{row.verdict:9} {name} ({row.way}): {figures} {reason}".rstrip(), flush=True)

    if options.write:
        _, heading, seeing = PAGE.read_text(encoding="utf-8").partition(VISION_HEADING)
        text = "\n".join([page(rows), heading + seeing]) if heading else page(rows)
        PAGE.write_text(text, encoding="utf-8")
        WAYS.write_text(json.dumps(ways(rows), indent=1) + "\n", encoding="utf-8")

    sys.exit(any(row.verdict == "defect" for row in rows))


if __name__ == "__main__":
    main()
