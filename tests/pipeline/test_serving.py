"""The stage kind `serve`: a server lives as long as a stage needs it, and ends with all that use
it."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.sweep_view import SweepView
from agentevo.pipeline import StageChoice, build_pipeline, read_state, run_pipeline, stage_kinds
from agentevo.pipeline.kinds import Job
from agentevo.pipeline.serve_stages import ServeStage

DEADLINE_S = 300.0
SERVER = """
import http.server, os, pathlib, secrets, sys, time
folder, port, what = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(exist_ok=True)
(folder / "pid").open("a").write(f"{os.getpid()}\\n")
if what == "dies":
    raise SystemExit("no weights there")
if what == "hangs":
    time.sleep(600)
secret = folder / "secret"
if not secret.exists():
    secret.write_text(secrets.token_hex(32))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == f"Bearer {secret.read_text()}"
        if self.path.endswith("/die"):
            os._exit(7)
        self.send_response(200 if right else 401)
        self.end_headers()
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
(folder / "url").write_text(f"http://127.0.0.1:{server.server_port}")
server.serve_forever()
"""
ASK = """
import os, pathlib, sys, time, urllib.request
out, url, key, pause = sys.argv[1:5]
name = key.removeprefix("${env:").removesuffix("}")
def ask(path):
    asked = urllib.request.Request(url + path)
    asked.add_header("Authorization", f"Bearer {os.environ[name]}")
    return urllib.request.urlopen(asked, timeout=300).status
pathlib.Path(out, "began").write_text(url)
status = ask("/models")
if pause == "die":
    try: ask("/die")
    except OSError: pass
    time.sleep(600)
time.sleep(float(pause) if pause.replace(".", "").isdigit() else 0)
ask("/models")
pathlib.Path(out, "f").write_text(f"{status} {url}")
"""


class Fake(ServeStage):
    """A server that needs no model."""

    reads_recipe: ClassVar[bool] = False

    def check(self, config: Any, options: Any, model: str | None) -> None:
        """Nothing to check."""

    what = ""
    """What it does in place of serving."""

    def words(self, job: Job) -> list[str]:
        folder = str(job.folder / "serving")
        return [sys.executable, "-c", SERVER, folder, str(job.options.port), self.what]


FAKE = Fake()
stage_kinds.register("fake_serve")(FAKE)


def asks(pause: str = "0", *more: str) -> dict[str, Any]:
    words = ["${stage.folder}", "${stages.judge.url}", "${stages.judge.key}", pause, *more]
    return {"kind": "command", "options": {"run": [sys.executable, "-c", ASK, *words], "file": "f"}}


def tree(folder: Path, stages: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"dir": str(folder / "p"), "held_out": None, "stages": stages, **keys}


def run(
    folder: Path, stages: dict[str, Any], what: str = "", config: Any = None, **options: Any
) -> str:
    """Runs it; what was shown."""
    stream = io.StringIO()
    pipeline = build_pipeline(tree(folder, stages, config=config or {}))
    FAKE.what = what
    run_pipeline(pipeline, view=SweepView("p", stream=stream, plain=True), **options)
    return stream.getvalue()


def pids(folder: Path) -> list[int]:
    file = folder / "p/stages/judge/serving/pid"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(holds: Any, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_a_server_answers_who_needs_it_and_ends_before_what_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "a ${x} 'b'"
    after = [sys.executable, "-c", "import sys, os; os.kill(int(open(sys.argv[1]).read()), 0)"]
    stages = {
        "judge": {"kind": "fake_serve"},
        "one": asks(),
        "two": asks("0", "${stages.one.file}"),
        "late": {
            "kind": "command",
            "needs": "two",
            "options": {"run": [*after, str(folder / "p/stages/judge/serving/pid")]},
        },
    }
    with pytest.raises(AgentEvoError, match=r"late: failed with exit code 1(.|\n)*ProcessLookup"):
        run(folder, stages)

    state = read_state(folder / "p")
    assert [state.stages[one].status for one in ("judge", "one", "two")] == ["finished"] * 3
    assert (folder / "p/stages/two/f").read_text() == f"200 {state.stages['judge'].says['url']}"
    assert len(pids(folder)) == 1
    assert "AGENTEVO_KEY_" in (folder / "p/pipeline.json").read_text()

    secret = (folder / "p/stages/judge/serving/secret").read_text()
    assert secret not in (folder / "p/pipeline.json").read_text()


@pytest.mark.slow
def test_it_is_started_again_for_a_stage_that_is_run_again_and_for_no_other(tmp_path: Path) -> None:
    stages = {"judge": {"kind": "fake_serve"}, "one": asks(), "two": asks("0", "two")}
    run(tmp_path, stages)
    run(tmp_path, stages, resume=True)
    assert len(pids(tmp_path)) == 1, "nothing needs it any more"

    key = (tmp_path / "p/stages/judge/serving/secret").read_text()
    (tmp_path / "p/stages/two/f").unlink()
    shown = run(tmp_path, stages, resume=True)
    assert len(pids(tmp_path)) == 2 and "one: started" not in shown
    assert (tmp_path / "p/stages/judge/serving/secret").read_text() == key

    port = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{port.getsockname()[1]}/v1"
    stages["judge"]["options"] = {"start_s": 300}
    file = tmp_path / "p/pipeline.json"
    known = read_state(tmp_path / "p").stages["judge"].says["url"]
    file.write_text(file.read_text().replace(known, url))  # somebody else has its port now
    shown = run(tmp_path, stages, resume=True, choice=StageChoice(start="two"))
    assert "one: is run again" not in shown
    assert (tmp_path / "p/stages/two/f").read_text() != f"200 {url}"


@pytest.mark.slow
def test_what_does_not_answer_is_told_with_its_log(tmp_path: Path) -> None:
    stages: dict[str, Any] = {"judge": {"kind": "fake_serve"}, "one": asks()}
    with pytest.raises(AgentEvoError, match=r"judge: exit code 1(.|\n)*no weights there"):
        run(tmp_path / "dies", stages, "dies")

    state = read_state(tmp_path / "dies/p")
    assert state.stages["one"].why == "waits for judge" and state.stages["judge"].why

    run(tmp_path / "dies", stages, resume=True)
    assert read_state(tmp_path / "dies/p").status == "finished"

    stages["judge"]["options"] = {"start_s": 4}
    with pytest.raises(AgentEvoError, match=r"judge: has not answered within 4 s"):
        run(tmp_path / "hangs", stages, "hangs")

    (pid,) = pids(tmp_path / "hangs")
    assert is_gone(pid)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stages["judge"]["options"] = {"port": taken.getsockname()[1]}
        with pytest.raises(AgentEvoError, match=r"judge: exit code 1(.|\n)*in use"):
            run(tmp_path / "port", stages)


@pytest.mark.slow
def test_one_that_dies_stops_who_asks_it_and_both_go_on(tmp_path: Path) -> None:
    stages = {"judge": {"kind": "fake_serve"}, "one": asks("die")}
    began = time.monotonic()
    with pytest.raises(AgentEvoError, match=r"1 stage failed(.|\n)*judge: exit code 7"):
        run(tmp_path, stages)

    assert time.monotonic() - began < 300
    assert read_state(tmp_path / "p").stages["one"].status == "stopped"
    run(tmp_path, {**stages, "one": asks()}, resume=True)
    assert (tmp_path / "p/stages/one/f").read_text().startswith("200")


MAIN = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_serving
from agentevo.pipeline import build_pipeline, run_pipeline
run_pipeline(build_pipeline(json.loads(sys.argv[1])), resume=sys.argv[2] == "resume")
print("ended well")
"""


def start(folder: Path, stages: dict[str, Any], how: str = "") -> subprocess.Popen[str]:
    words = [sys.executable, "-c", MAIN, json.dumps(tree(folder, stages)), how]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_pipeline_that_ends_leaves_no_server(tmp_path: Path, how: int) -> None:
    stages = {"judge": {"kind": "fake_serve"}, "one": asks("3")}
    process = start(tmp_path, stages)
    until((tmp_path / "p/stages/one/began").exists, "the stage has not begun")
    (pid,) = pids(tmp_path)
    process.send_signal(how)
    process.communicate(timeout=DEADLINE_S)

    if how == signal.SIGKILL:  # what was under way goes on to its end, with what it needs
        assert not is_gone(pid)
        until((tmp_path / "p/stages/one/f").exists, "its server has gone before the stage")

    until(lambda: is_gone(pid), "the server lives on")
    time.sleep(0.2)
    said = start(tmp_path, stages, "resume").communicate(timeout=DEADLINE_S)[0]
    assert "ended well" in said
    assert len(pids(tmp_path)) == (1 if how == signal.SIGKILL else 2)


@pytest.mark.slow
def test_one_that_is_kept_serves_until_ctrl_c_and_again(tmp_path: Path) -> None:
    stages = {"judge": {"kind": "fake_serve", "options": {"keep": True}}, "one": asks()}
    for number in (1, 2):
        process = start(tmp_path, stages, "resume" if number == 2 else "")
        until((tmp_path / "p/table.md").exists, "no table")
        until(lambda: len(pids(tmp_path)) == number, "no server")  # noqa: B023
        time.sleep(1.0)
        assert process.poll() is None and not is_gone(pids(tmp_path)[-1])

        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=DEADLINE_S)[0]
        assert process.returncode == 0 and "serving until Ctrl-C" in said
        assert is_gone(pids(tmp_path)[-1])

        (tmp_path / "p/table.md").unlink()


def test_what_serves_nothing_has_no_url(tmp_path: Path) -> None:
    one = {"kind": "command", "options": {"run": ["true", "${stages.two.url}"]}}
    two = {"kind": "command", "options": {"run": ["true"]}}
    with pytest.raises(ConfigError, match="has no url: refer to one of the kind serve"):
        build_pipeline(tree(tmp_path, {"one": one, "two": two}))
    tiny = {"judge": {"kind": "serve", "config": {"model": {"name": "tiny"}}}}
    with pytest.raises(ConfigError, match="set the model to serve"):
        build_pipeline(tree(tmp_path, tiny))


@pytest.mark.slow
def test_a_model_that_a_stage_made_judges_in_a_later_one(tmp_path: Path) -> None:
    """The judge has learnt to give everything the same score, so its words reach the reward."""
    words = ["red", "green", "blue", "box", "cat", "tree", "sea"]
    said = [" ".join(words[n % 7 :] + words[: n % 5]) * (1 + 7 * (n % 4)) for n in range(64)]
    score = {"role": "assistant", "content": "<score>0.25</score>"}
    rows = [{"messages": [{"role": "user", "content": one}, score]} for one in said]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"id": f"t{n}", "query": f"Say {n}.", "answer": str(n)} for n in range(6)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))

    asked = {"base_url": "${stages.judge.url}", "model": "judge", "api_key": "${stages.judge.key}"}
    judged = {
        "name": "llm_judge",
        "models": ["judge"],
        "judge_prompt_template": "{question} {response} <score>?",
    }
    tiny = {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1, "context_length": 8192}
    stages = {
        "teach": {
            "kind": "sft",
            "config": {
                "data": {"train": str(tmp_path / "rows.jsonl"), "eval_share": 0},
                "sft": {"epochs": 24, "batch_conversations": 8, "learning_rate": 1e-2},
            },
        },
        "judge": {
            "kind": "serve",
            "model": "${stages.teach.checkpoint}",
            "config": {"sampling": {"temperature": 0.001, "max_new_tokens": 24}},
        },
        "rated": {
            "kind": "evaluate",
            "config": {"remote_models": {"judge": asked}, "rewards": [judged]},
        },
    }

    config = {
        "model": {"name": "tiny", "tiny": tiny},
        "agent": {"type": "single_turn"},
        "rewards": ["contains"],
        "tasks": {"train": str(tmp_path / "tasks.jsonl")},
        "sampling": {"max_new_tokens": 3},
        "evaluation": {"tasks": 3, "samples": 0},
        "tracking": {"tensorboard": False, "report": False},
    }
    run(tmp_path, stages, config=config)
    state = read_state(tmp_path / "p")
    assert state.stages["rated"].numbers["reward"] == 0.25

    recipe = (tmp_path / "p/recipes/rated.yaml").read_text()
    assert "${env:AGENTEVO_KEY_" in recipe

    secret = (tmp_path / "p/stages/judge/serving/secret").read_text().strip()
    kept = [one for one in (tmp_path / "p").rglob("*") if one.is_file() and one.name != "secret"]
    assert not [one for one in kept if secret.encode() in one.read_bytes()]
    assert not (tmp_path / "p/stages/judge/serving/url").exists(), "it has ended"
