"""Publishes trained models on the Hugging Face hub: `agentevo models --push`.

One commit contains weights, tokenizer, configuration and a model card (model_card.py), so readers
of the repository see all of them or nothing. The files that only training needs (the optimizer, the
run's state) stay here. The checkpoint's digests are checked first. The token is HF_TOKEN, or that
of the hub's own login. It is sent only to the hub. HF_ENDPOINT names another hub. Large files are
sent with Xet if the hub supports it, and else with LFS. A transfer that stalls for STALL_S seconds
is ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from agentevo.errors import ModelError
from agentevo.models import checkpoint_manifest as manifest
from agentevo.models.files.resolve import HUB_NAME, run_checkpoint, split_run, without_hub_bars
from agentevo.runs.folder.model_card import hub_name, model_card, run_of
from agentevo.runs.folder.run_folder import UNSCORED, run_config
from agentevo.runtime.parsing import read_json_object

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
ADAPTER = "adapter_config.json"
BASE = "base_model_name_or_path"
"""A key of an adapter's configuration."""
WEIGHT_ENDINGS = (".safetensors", ".bin", ".index.json")
"""Endings of weight files that a loader would prefer to new files with other names."""
STALL_S = 120.0
"""The longest time in seconds without a byte from or to the hub. The hub's client then tries again
a few times."""
_REMEDIES = {
    401: "the token is not valid: set HF_TOKEN to one that may write, or log in again with "
    "`hf auth login`",
    403: "the token may not write to {repo}: use one that may, or another name",
    404: "it does not accept these files: check that HF_ENDPOINT is a hub for large files",
    413: "a file is larger than the hub's limit: save smaller files, or raise the limit",
    501: "it does not accept these files: check that HF_ENDPOINT is a hub for large files",
    507: "it has no room left: delete something there, or use another account",
}
"""Maps an HTTP status to its remedy."""


def push_to_hub(
    source: str | Path,
    repo: str,
    *,
    private: bool = True,
    note: Callable[[str], None] = lambda line: None,
) -> str:
    """Uploads a checkpoint, an adapter or another model's folder to a repository, and creates the
    repository if needed. Returns the URL of the commit. `source`: RUN (its best checkpoint),
    RUN@last, RUN@STEP, or a folder. `private`: whether a new repository is private.

    Raises ModelError for an invalid model or name or a missing token, before anything is sent. Also
    raises it if the hub can't be reached or refuses. In all these cases nothing was uploaded.
    """
    folder = find_folder(source)
    if not HUB_NAME.fullmatch(repo):
        raise ModelError(f"{repo[:100]!r} is not a repository name: write ORG/NAME")

    manifest.verify_model(folder)
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    token = huggingface_hub.get_token()
    if token is None:
        raise ModelError(
            "the hub requires a token that may write: set HF_TOKEN, or log in with `hf auth "
            "login`; "
            "nothing was uploaded"
        )

    files = files_to_push(folder, repo)
    hub = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    creation_note = ""
    with ExitStack() as stack:
        stack.enter_context(without_hub_bars())
        stack.enter_context(_limited_stalls())
        try:
            try:
                existing_files = {file.rfilename for file in hub.model_info(repo).siblings or ()}
                visibility = "which is there"
            except RepositoryNotFoundError:
                hub.create_repo(repo, private=private)
                existing_files = set[str]()
                visibility = "private" if private else "public"
                creation_note = f"; the repository {repo} was made for it and is empty"

            stale = sorted(name for name in existing_files - {*files} if _is_of_model(name))
            size_mb = sum(map(_size, files.values())) / 1e6
            note(
                f"uploading {len(files)} files of {folder}, {size_mb:,.1f} MB, to {repo}, "
                f"{visibility}"
                + (f"; files of the model there are deleted: {', '.join(stale)}" if stale else "")
            )
            opened = files if _supports_xet(hub, repo) else _open_files(files, stack)
            commit = hub.create_commit(
                repo,
                [
                    *(huggingface_hub.CommitOperationAdd(*item) for item in opened.items()),
                    *map(huggingface_hub.CommitOperationDelete, stale),
                ],
                commit_message=f"Upload {folder.name} with AgentEvo",
            )
        except Exception as error:  # the hub's client raises the errors of all its parts
            raise ModelError(f"{_failure(repo, error, hub.endpoint)}{creation_note}") from error

    return str(commit.commit_url)


def find_folder(source: str | Path) -> Path:
    """The folder of the model to upload. Raises ModelError if there is none."""
    folder = Path(source).expanduser()
    if any(os.path.isfile(folder / name) for name in ("config.json", ADAPTER)):
        return folder

    run, which = split_run(folder)
    if run is None:
        raise ModelError(
            f"{str(source)[:200]!r} is neither a run with a checkpoint nor the folder of a model "
            f"or adapter: give RUN, RUN@last, RUN@STEP or such a folder"
        )

    return run_checkpoint(run, which)


def files_to_push(folder: Path, repo: str) -> dict[str, Path | bytes]:
    """Maps a name in the repository to a file or its content."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    files: dict[str, Path | bytes] = {
        name: folder / name
        for name in names
        if name not in manifest.TRAINING_FILES and not name.startswith(".")
    }
    run = run_of(folder)
    if run is not None or CARD not in files:
        files[CARD] = model_card(folder, repo).encode()

    if run is not None and ADAPTER in files:  # names the base model by its public name
        settings = read_json_object(folder / ADAPTER)
        base = hub_name(run_config(run, UNSCORED).model.name)
        settings[BASE] = base or Path(str(settings.get(BASE) or "")).name
        files[ADAPTER] = json.dumps(settings, indent=2).encode()

    return files


def _is_of_model(name: str) -> bool:
    return "/" not in name and (name.endswith(WEIGHT_ENDINGS) or name in ("config.json", ADAPTER))


def _open_files(files: Mapping[str, Path | bytes], stack: ExitStack) -> dict[str, bytes | BinaryIO]:
    """Opens the files until the stack ends. The hub's client never sends open files with Xet."""
    return {
        name: file if isinstance(file, bytes) else stack.enter_context(file.open("rb"))
        for name, file in files.items()
    }


def _size(file: Path | bytes) -> int:
    return len(file) if isinstance(file, bytes) else file.stat().st_size


@contextmanager
def _limited_stalls() -> Iterator[None]:
    """Inside this block, the hub's client waits at most STALL_S seconds for a byte. Outside, it
    waits without limit."""
    from huggingface_hub.utils import get_session

    session = get_session()
    before = session.timeout
    session.timeout = STALL_S
    try:
        yield
    finally:
        session.timeout = before


def _supports_xet(hub: HfApi, repo: str) -> bool:
    """Whether the hub returns the token with which its client uploads by Xet. Without that token,
    the client does not fall back to LFS, but fails after minutes."""
    from huggingface_hub.utils import build_hf_headers, get_session

    url = f"{hub.endpoint}/api/models/{repo}/xet-write-token/main"
    answer = get_session().get(url, headers=build_hf_headers(token=hub.token))
    try:
        body = answer.json()
    except ValueError:
        return False
    return answer.status_code == 200 and isinstance(body, dict) and "casUrl" in body


def _failure(repo: str, error: Exception, endpoint: str) -> str:
    """The message of a failed upload: the failure, its reason and the remedy."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__

    responses = (getattr(cause, "response", None) for cause in causes)
    status = next((answer.status_code for answer in responses if answer is not None), 0)
    reason = " ".join(str(causes[-1]).split())[:300] or type(causes[-1]).__name__
    kinds = {kind.__name__ for cause in causes for kind in type(cause).__mro__}

    retry_advice = "check the network and try again; nothing was uploaded"
    if status or "ValueError" in kinds:  # some refusals are in the body of an answer
        remedy = _REMEDIES.get(status, "check the hub's message, and try again")
        return (
            f"the hub refused {repo} ({reason}): {remedy.format(repo=repo)}; nothing was uploaded"
        )
    if "TimeoutException" in kinds:
        return f"the upload to the hub ({endpoint}) stalled for {STALL_S:g} s: {retry_advice}"
    if kinds & {"RemoteProtocolError", "ReadError", "WriteError"}:
        return f"the hub ({endpoint}) closed the connection ({reason}): {retry_advice}"
    return f"the hub ({endpoint}) can't be reached ({reason}): {retry_advice}"
