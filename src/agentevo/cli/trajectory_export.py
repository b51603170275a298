"""`agentevo trajectories export`: the attempts of a run as files for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Overwrite, RunDir, Wait, check_new_file, path_word
from agentevo.cli.row_account import tell_of_rows
from agentevo.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from agentevo.data import RowReport
    from agentevo.runs.sft_export import Read
    from agentevo.store import Store

_HERE = "trajectories export"
_NO_CHOICE = ("train", None, None)
"""The defaults of split, reward and model."""


Out = Annotated[
    Path,
    typer.Argument(
        parser=path_word,
        metavar="OUT.jsonl[.gz]",
        help="The file to write, one trajectory per line.",
    ),
]
Sft = Annotated[
    bool,
    typer.Option(
        "--sft",
        help="Write the successful attempts of a run or of an evaluation (`agentevo eval "
        "--out`) as conversations for `agentevo sft`.",
    ),
]
Pairs = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="Write pairs of a better and a worse attempt for `agentevo rm` and data.pairs: "
        "the best and the worst of each group.",
    ),
]
Margin = Annotated[
    float,
    typer.Option(
        metavar="REWARD", min=0, help="With --pairs: the rewards differ by more than this."
    ),
]
Split = Annotated[
    str,
    typer.Option(metavar="SPLIT", help="With --sft: attempts of training or of evaluations."),
]
MinReward = Annotated[
    float | None,
    typer.Option(
        metavar="REWARD", help="With --sft: the lowest reward. Default: successful attempts only."
    ),
]
PerTask = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="With --sft: the maximum number of attempts at one task, best first. With --pairs: "
        "the maximum number of pairs of one group.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --sft: the model whose replies to train on, `policy` or a remote model. "
        "Default: the remote model in attempts that use one, else the policy.",
    ),
]


def export(
    run_dir: RunDir,
    out: Out,
    sft: Sft = False,
    split: Split = "train",
    min_reward: MinReward = None,
    per_task: PerTask = None,
    model: Model = None,
    pairs: Pairs = False,
    margin: Margin = 0.0,
    overwrite: Overwrite = False,
    wait: Wait = None,
) -> None:
    """Export a run's trajectories with token ids and log-probs, its successful conversations
    (--sft), or preference pairs (--pairs)."""
    if pairs:
        if sft or (split, min_reward, model) != _NO_CHOICE:
            raise ConfigError(
                f"{_HERE}: --pairs compares the attempts of a group: give --per-task and --margin "
                "with it, and no other option"
            )

        check_new_file(out, overwrite=overwrite)
        _export_pairs(run_dir, out, margin, per_task or 1, wait)
        return

    if margin:
        raise ConfigError(f"{_HERE}: --margin is for pairs: add --pairs")

    if sft:
        check_new_file(out, overwrite=overwrite)
        _export_sft(run_dir, out, split, min_reward, per_task, model, wait)
        return

    if split != "train" or (min_reward, per_task, model) != (None, None, None):
        raise ConfigError(
            f"{_HERE}: --split, --min-reward, --per-task and --model choose "
            "conversations: add --sft"
        )

    check_new_file(out, overwrite=overwrite)

    from agentevo.runs.folder import read_store
    from agentevo.store import export_jsonl

    count = read_store(run_dir, lambda store: export_jsonl(store, out), wait_s=wait)
    print(f"{count} trajectories written to {out}")


def _export_sft(
    run_dir: Path,
    out: Path,
    split: str,
    min_reward: float | None,
    per_task: int | None,
    model: str | None,
    wait: float | None,
) -> None:
    from agentevo.store.records import SPLITS

    if split not in SPLITS:
        raise ConfigError(f"--split {split}: there are {', '.join(SPLITS)}")

    from agentevo.evaluation.results import SETTINGS
    from agentevo.runs.folder import read_store, remote_model_names
    from agentevo.runs.sft_export import POLICY, export_sft

    if (run_dir / SETTINGS).is_file():
        _export_played(run_dir, out, min_reward, per_task, model)
        return

    model_names = [POLICY, *remote_model_names(run_dir)]
    if model is not None and model not in model_names:
        raise UnknownNameError(f"--model {model}: the run has {', '.join(model_names)}")

    read = _reader(run_dir)

    async def work(store: Store) -> RowReport:
        return await export_sft(
            store,
            out,
            read,
            split=split,
            min_reward=min_reward,
            per_task=per_task,
            model=model,
        )

    tell_of_rows(read_store(run_dir, work, wait_s=wait), out)


def _export_played(
    folder: Path, out: Path, min_reward: float | None, per_task: int | None, model: str | None
) -> None:
    """Exports the attempts in a folder of `agentevo eval --out`."""
    from agentevo.evaluation.results import ResultsFolder
    from agentevo.runs.folder import tokenizer_in
    from agentevo.runs.sft_export import export_played

    results = ResultsFolder(folder)
    played = dict(results.settings().get("played_models") or {})
    if len(played) != 1:
        raise ConfigError(
            f"{folder}: it has attempts of {len(played)} models ({', '.join(played)}): evaluate "
            "only the one whose replies you want"
        )

    weights = str(*played.values())
    has_tokenizer = (Path(weights) / "tokenizer_config.json").is_file()
    read = _reader_of(tokenizer_in(weights) if has_tokenizer else None)
    done = export_played(
        list(results.trajectories().values()),
        out,
        read,
        min_reward=min_reward,
        per_task=per_task,
        model=model,
    )
    tell_of_rows(done, out)


def _export_pairs(
    run_dir: Path, out: Path, margin: float, per_group: int, wait: float | None
) -> None:
    from agentevo.runs.folder import read_store
    from agentevo.runs.pair_export import export_pairs

    read = _reader(run_dir)

    async def work(store: Store) -> RowReport:
        return await export_pairs(store, out, read, margin=margin, per_group=per_group)

    tell_of_rows(read_store(run_dir, work, wait_s=wait), out, "pairs")


def _reader(run_dir: Path) -> Read:
    """The function that parses the policy's text in the notation of its model family."""
    from agentevo.runs.folder import saved_tokenizer

    return _reader_of(saved_tokenizer(run_dir))


def _reader_of(tokenizer: Any | None) -> Read:
    from agentevo.runs.sft_export import answer_reader

    if tokenizer is None:
        return answer_reader(None)
    from agentevo.models.chat import ChatFormat

    return answer_reader(ChatFormat(tokenizer))
