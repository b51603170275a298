"""Publishing a checkpoint: against a server on loopback that speaks the hub's API."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentevo.cli.main import main
from agentevo.config import build_config, to_yaml
from agentevo.errors import ModelError
from agentevo.models import checkpoint_manifest as manifest
from agentevo.models.checkpoint_manifest import TornError
from agentevo.runs.folder.hub_upload import files_to_push, push_to_hub
from agentevo.runs.folder.model_card import model_card

TOKEN = "hf_secret_of_the_test"
FILES = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors": "weights" * 100,
    "trainer.pt": "optimizer",
    "state.json": "{}",
}
SUMMARY = {
    "name": "lake",
    "seed": 3,
    "steps": 20,
    "wall_s": 61.0,
    "eval": {"before": 0.125, "after": 0.5, "n": 64, "random": 0.02, "optimal": 1.0},
    "tokens": {"generated": 10, "trained": 1234},
}


class Hub:
    """The Hugging Face hub's API for uploads: weights go to its LFS store, and one commit names
    them beside the small files."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.num_commits = 0
        self.refuses: dict[str, int] = {}
        """Path's beginning -> status; 0 breaks the connection off, -1 never answers."""
        self.batch_error = ""
        """What LFS says of each file in place of a place for it."""
        self.released = threading.Event()
        """Ends the requests that are never answered."""
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_PUT(self) -> None:
                self._answer()

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, answer, code = hub.answer(self.command, self.path, body, self.headers)
                if status <= 0:
                    hub.released.wait(-300.0 * status)
                    self.close_connection = True
                    return

                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                if code:
                    self.send_header("x-error-code", code)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any, str]:
        path = path.partition("?")[0]
        for beginning, status in self.refuses.items():
            if path.startswith(beginning):
                return status, {"error": "refused"}, ""

        if method == "PUT":
            self._objects[path.rpartition("/")[2]] = body
            return 200, {}, ""
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}, ""

        asked = json.loads(body) if body and "/commit/" not in path else {}
        if path == "/api/repos/create":
            return 200, self._create(asked), ""
        if path == "/api/validate-yaml":
            yaml.safe_load(asked["content"].split("---")[1])
            return 200, {"errors": [], "warnings": []}, ""
        if path.endswith("/objects/batch"):
            return 200, {"objects": [self._upload(one) for one in asked["objects"]]}, ""
        return self._answer_of_repo(path, asked, body)

    def _answer_of_repo(self, path: str, asked: Any, body: bytes) -> tuple[int, Any, str]:
        repo = "/".join(path.split("/")[3:5])
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}, "RepoNotFound"
        if "/xet-write-token/" in path:
            return 404, {"error": "Not found"}, ""
        if "/preupload/" in path:
            return 200, {"files": [_mode(file) for file in asked["files"]]}, ""
        if "/commit/" in path:
            self._commit(repo, [json.loads(line) for line in body.splitlines()])
            url = f"{self.url}/{repo}/commit/{self.num_commits}"
            return 200, {"commitUrl": url, "commitOid": str(self.num_commits)}, ""

        siblings = [{"rfilename": name} for name in self.repos[repo]]
        return 200, {"id": repo, "sha": "0", "siblings": siblings, "tags": []}, ""

    def _create(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        self.repos[name] = {}
        self.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
        return {"url": f"{self.url}/{name}", "name": name, "id": name}

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.batch_error:
            return {**asked, "error": {"code": 422, "message": self.batch_error}}
        href = f"{self.url}/lfs/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": href}}}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = self.repos[repo]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self._objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                files[value["path"]] = content
            elif line["key"] == "deletedFile":
                del files[value["path"]]

        self.num_commits += 1


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield served
    served.released.set()
    served.server.shutdown()
    served.server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with checkpoints of the steps 10 and 20, the first of them the best."""
    folder = tmp_path / "lake"
    tree = {
        "environment": {"type": "frozen_lake"},
        "model": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "remote_models": {"judge": {"base_url": "http://10.0.0.7/v1", "model": "m"}},
        "algorithm": {"name": "dapo"},
        "trainer": {"steps": 20, "optimizer_from": "/home/me/old/step-000001"},
    }
    config = build_config(tree, [f"run.dir={folder}", "run.name=lake"])
    for step, value in ((10, 0.75), (20, 0.5)):
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        for name, content in FILES.items():
            (checkpoint / name).write_text(f"{content} {step}" if "{" not in content else content)
        manifest.seal(checkpoint, step, value)

    (folder / "config.yaml").write_text("# agentevo train\n" + to_yaml(config))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    index = {"steps": [10, 20], "best": {"step": 10, "value": 0.75}}
    (folder / "checkpoints" / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.slow
def test_a_checkpoint_is_published_in_one_commit_with_a_card(hub, run, capsys):
    assert main(["models", str(run), "--push", "me/lake"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{hub.url}/me/lake/commit/1\n" and "me/lake, private" in told.err
    assert hub.num_commits == 1 and hub.private == {"me/lake": True}

    files = hub.repos["me/lake"]
    assert set(files) == {"config.json", "tokenizer.json", "model.safetensors", "README.md"}
    assert files["model.safetensors"].endswith(b" 10"), "the best one"

    card = files["README.md"].decode()
    facts = yaml.safe_load(card.split("---")[1])
    assert facts["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert facts["library_name"] == "transformers" and "dapo" in facts["tags"]
    for words in (
        "reinforcement learning (dapo) in the environment `frozen_lake`",
        "| held-out success of this checkpoint | 75.0% |",
        "| held-out success before training | 12.5% |",
        "| an optimal player | 100.0% |",
        "  name: dapo",
        "step-000001",
    ):
        assert words in card
    assert not any(words in card for words in ("/home/me", "10.0.0.7", str(run), TOKEN))
    assert TOKEN not in told.out + told.err


def test_weights_of_another_form_do_not_stay_beside_the_new_ones(hub, run):
    hub.repos["me/lake"] = dict.fromkeys(
        ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "LICENSE"), b""
    )
    assert push_to_hub(f"{run}@last", "me/lake").endswith("/commit/1")
    files = hub.repos["me/lake"]
    assert files["model.safetensors"].endswith(b" 20")
    assert set(files) == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "README.md",
        "LICENSE",
    }


@pytest.mark.slow
def test_an_adapter_names_its_base_as_others_find_it(run):
    checkpoint = run / "checkpoints" / "step-000020"
    for name in ("config.json", "model.safetensors", manifest.NAME):
        (checkpoint / name).unlink()
    (checkpoint / "adapter_model.safetensors").write_text("adapter")
    (checkpoint / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "/home/me/.cache/smol", "r": 8})
    )
    (checkpoint / "README.md").write_text("PEFT's own")
    manifest.seal(checkpoint, 20, -1.5)

    files = files_to_push(checkpoint, "me/lake")
    settings = json.loads(files["adapter_config.json"])
    assert settings == {
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": 8,
    }
    card = files["README.md"].decode()
    assert "An adapter (LoRA) trained from" in card and "PeftModel.from_pretrained" in card
    assert "library_name: peft" in card and "| held-out loss of this checkpoint | 1.5 |" in card


def test_another_model_s_folder_keeps_its_card(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert "uploaded with [AgentEvo]" in model_card(tmp_path, "me/merged")
    (tmp_path / "README.md").write_text("mine")
    assert files_to_push(tmp_path, "me/merged")["README.md"] == tmp_path / "README.md"


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        ({"/api/models/me/lake/commit": 500}, "was made for it and is empty"),
        ({"/lfs/": 403}, "the token may not write to me/lake"),
        ({"/api/repos/create": 403}, "the token may not write to me/lake"),
        ({"/api/repos/create": 401}, "the token is not valid"),
        ({"/lfs/": 413}, "a file is larger than the hub's limit"),
        ({"/lfs/": 507}, "it has no room left"),
        ({"/me/lake.git/info/lfs": 404}, "it does not accept these files"),
        ({"/lfs/": 0}, "closed the connection"),
        ({"/lfs/": -1}, "stalled for 0.2 s"),
        ({"/api/repos/create": -1}, "stalled for 0.2 s"),
    ],
)
def test_what_the_hub_refuses_leaves_nothing_half_uploaded(
    hub, run, refuses, words, capsys, monkeypatch
):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # its client tries again
    if -1 in refuses.values():
        monkeypatch.setattr("agentevo.runs.folder.hub_upload.STALL_S", 0.2)
    hub.refuses = refuses
    assert main(["models", str(run), "--push", "me/lake"]) == 2
    told = capsys.readouterr().err
    assert words in told and "nothing was uploaded" in told and TOKEN not in told
    assert not any(hub.repos.values()) and hub.num_commits == 0


def test_what_is_said_of_a_file_within_an_answer_is_passed_on(hub, run):
    hub.batch_error = "over the quota of me"
    with pytest.raises(ModelError, match=r"refused me/lake .*over the quota of me"):
        push_to_hub(run, "me/lake")


@pytest.mark.parametrize("gives_token", [False, True])
def test_files_go_by_xet_where_the_hub_speaks_it(hub, run, monkeypatch, gives_token):
    sent = []
    monkeypatch.setattr(
        "huggingface_hub._commit_api._upload_xet_files",
        lambda additions, **options: sent.extend(file.path_in_repo for file in additions),
    )
    if gives_token:
        answer = hub._answer_of_repo
        token = (200, {"casUrl": hub.url, "exp": 2**40, "accessToken": "t"}, "")
        hub._answer_of_repo = lambda path, *more: (
            token if "/xet-write-token/" in path else answer(path, *more)
        )
        hub._commit = lambda repo, lines: None
    push_to_hub(run, "me/lake")
    assert sent == (["model.safetensors"] if gives_token else [])


def test_nothing_is_sent_without_a_token_a_model_or_a_name(hub, run, monkeypatch):
    with pytest.raises(ModelError, match="is not a repository name"):
        push_to_hub(run, "a/b/c")
    with pytest.raises(
        ModelError, match="neither a run with a checkpoint nor the folder of a model"
    ):
        push_to_hub(run.parent, "me/lake")
    with pytest.raises(ModelError, match="no checkpoint of step 7"):
        push_to_hub(f"{run}@7", "me/lake")

    weights = run / "checkpoints" / "step-000010" / "model.safetensors"
    weights.write_text("w" + weights.read_text()[1:].replace("e", "f"))
    with pytest.raises(TornError, match=r"model\.safetensors has .* torn, or was changed"):
        push_to_hub(run, "me/lake")

    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ModelError, match="set HF_TOKEN, or log in"):
        push_to_hub(f"{run}@20", "me/lake")
    assert hub.repos == {}


def test_a_hub_that_is_away_is_told(hub, run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"can't be reached.*nothing was uploaded"):
        push_to_hub(run, "me/lake")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"can't be reached.*nothing was uploaded"):
        push_to_hub(run, "me/lake")
