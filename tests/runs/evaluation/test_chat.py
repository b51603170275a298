"""A conversation in the terminal: with a run's checkpoint, from a pipe and from a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

from agentevo.cli.main import main
from agentevo.config import ModelSection, build_config
from agentevo.config.recipe import to_yaml
from agentevo.errors import ConfigError, ModelError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.files.load import load_model
from agentevo.runs.evaluation import chat as chat_module
from agentevo.runs.evaluation.chat import ChatModel
from agentevo.runs.evaluation.contestants import Contestant, find_contestants
from agentevo.runs.folder.run_folder import run_config
from agentevo.runs.orchestration.components import load_policy
from agentevo.types import Message

RECIPE = (
    "environment: {type: coins}\n"
    "model: {name: tiny, tiny: {hidden_size: 32, num_layers: 1, num_heads: 2, tokenizer: byte}}\n"
    "sampling: {max_new_tokens: 4}\n"
    "trainer: {steps: 2, group_size: 2, groups_per_step: 1}\n"
    "evaluation: {tasks: 1, samples: 0}\ncold_start: {episodes: 0}\ncheckpoint: {every: 1}\n"
    "tracking: {report: false, tensorboard: false}\n"
)


@pytest.fixture
def judged_elsewhere(tmp_path) -> Path:
    """The folder of a run whose reward was a function of the program that made it."""
    config = build_config({"model": "tiny", "environment": "coins"}, needs_environment=False)
    tree = yaml.safe_load(to_yaml(config)) | {"rewards": [{"name": "of_a_program"}]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "run"


@pytest.mark.slow
def test_what_asks_a_run_for_its_model_needs_none_of_its_rewards(judged_elsewhere, capsys):
    for words in (
        ["chat", str(judged_elsewhere)],
        ["serve", "--openai", str(judged_elsewhere)],
        ["serve", "--openai", f"{judged_elsewhere}@last"],
        ["models", str(judged_elsewhere), "--merge", str(judged_elsewhere / "merged")],
    ):
        assert main(words) == 2
        problem = capsys.readouterr().err
        assert "of_a_program" not in problem
        assert "checkpoint" in problem

    with pytest.raises(ConfigError, match="got 'of_a_program'"):
        run_config(judged_elsewhere)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "small.yaml").write_text(RECIPE)
    assert main(["train", str(folder / "small.yaml"), f"run.dir={folder / 'run'}"]) == 0
    return folder / "run"


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    stdin = SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(content))
    monkeypatch.setattr(sys, "stdin", stdin)


@pytest.mark.slow
def test_each_line_of_a_pipe_gets_an_answer_that_goes_on_from_those_before(
    run, monkeypatch, capsys
):
    turns: list[Any] = []
    complete = Conversation.complete

    async def recording(self: Conversation, *asked: Any, **more: Any) -> Any:
        turns.extend(answers := await complete(self, *asked, **more))
        return answers

    monkeypatch.setattr(Conversation, "complete", recording)
    pipe(monkeypatch, b"Hello\n\nHow are you?\r\nBye")
    words = ["--temperature", "0", "--max-new-tokens", "3", "--system", "Be kind."]
    assert main(["chat", str(run), *words]) == 0

    told = capsys.readouterr()
    assert "run@last (step-000002)" in told.err and "system: Be kind." in told.err
    assert "environment is not played here" in told.err
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [turn.messages[-2].text for turn in turns] == ["Hello", "How are you?", "Bye"]
    assert turns[0].messages[0].text == "Be kind."
    assert all(turn.messages[-1].text[:1] in told.out for turn in turns)

    pipe(monkeypatch, b"Hello\n\xff\n")
    assert main(["chat", f"{run}@1", "--max-new-tokens", "1"]) == 2
    assert "standard input, line 2: not UTF-8" in capsys.readouterr().err


class Scripted(ChatModel):
    """Says `first`, and goes on for ever at the first question."""

    histories: ClassVar[list[list[str]]] = []

    async def _open(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._ended.wait()

    async def _answer(self, history: Sequence[Message], show: Callable[[str], None]) -> Message:
        self.histories.append([message.text for message in history])
        show("first")
        if len(self.histories) == 1:
            os.kill(os.getpid(), signal.SIGINT)  # a person presses Ctrl-C
            await asyncio.sleep(1000)
        show(" and\x1b last")
        return Message("assistant", "first and last")


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(Scripted, "histories", [])
    monkeypatch.setattr(chat_module, "ChatModel", Scripted)
    config = build_config({"environment": {"type": "coins"}, "model": {"name": "tiny"}})
    monkeypatch.setattr(chat_module, "find_model", lambda *_: Contestant("run@last", config))
    return Scripted.histories


def test_ctrl_c_ends_an_answer_whose_text_stays(scripted, monkeypatch, capsys):
    pipe(monkeypatch, b"One\nTwo\nThree\n")
    assert main(["chat", "run"]) == 0
    assert scripted == [
        ["One"],
        ["One", "first", "Two"],
        ["One", "first", "Two", "first and last", "Three"],
    ]
    answers = capsys.readouterr().out.split("\n")
    assert answers == ["first [ended]", *["first and\\u001b last"] * 2, ""]


def test_ctrl_c_at_the_prompt_ends_nothing_and_ctrl_d_the_chat(scripted, monkeypatch, capsys):
    typed = iter([KeyboardInterrupt, "", "One", EOFError])

    def type_line(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["chat", "run"]) == 0
    assert scripted == [["One"]]
    told = capsys.readouterr()
    assert "(Ctrl-D ends the chat)" in told.out and "Ctrl-C ends an answer" in told.err


SCRIPTED = """if True:
    import asyncio, os, sys, time
    from agentevo.cli.main import main
    from agentevo.config import build_config
    from agentevo.runs.evaluation import chat
    from agentevo.runs.evaluation.contestants import Contestant
    from agentevo.types import Message

    class Scripted(chat.ChatModel):
        async def _open(self):
            self._loop.set_result(asyncio.get_running_loop())
            await self._ended.wait()

        async def _answer(self, history, show):
            show(f"to {len(history)}")
            await asyncio.sleep(1000 if history[-1].text == "long" else 0)
            return Message("assistant", "an answer")

    config = build_config({"environment": {"type": "coins"}, "model": {"name": "tiny"}})
    chat.ChatModel = Scripted
    chat.find_model = lambda *_: Contestant("run@last", config)
    sys.exit(main(["chat", "run"]))
"""


class Terminal:
    """A program on a terminal of its own, which sends it a signal for Ctrl-C."""

    def __init__(self, program: str) -> None:
        self._main, theirs = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(theirs)
        self._shown = b""

    def type(self, text: bytes) -> None:
        os.write(self._main, text)

    def wait_for(self, text: bytes) -> None:
        """Until the text is shown, behind what was waited for before."""
        while text not in self._shown:
            ready, _, _ = select.select([self._main], [], [], 300)
            assert ready, self._shown
            self._shown += os.read(self._main, 4096)
        self._shown = self._shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_chat():
    terminal = Terminal(SCRIPTED)
    try:
        terminal.wait_for(b"> ")
        terminal.type(b"long\n")
        terminal.wait_for(b"to 1")
        terminal.type(b"\x03")
        terminal.wait_for(b"[ended]\r\n> ")

        terminal.type(b"half a line\x03")
        terminal.wait_for(b"(Ctrl-D ends the chat)\r\n> ")
        # Pressed this often, some come between the prompt and the moment when a key is awaited.
        for _ in range(300):
            terminal.type(b"\x03")
            terminal.wait_for(b"(Ctrl-D ends the chat)\r\n> ")

        terminal.type(b"short\n")
        terminal.wait_for(b"to 3\r\n> ")
        terminal.type(b"\x04")
        assert terminal.process.wait(300) == 0
    finally:
        terminal.close()


def test_ctrl_c_once_more_than_needed_ends_nothing(scripted, monkeypatch, capsys):
    said = print

    def press_again(*words: object, **options: Any) -> None:
        said(*words, **options)
        if words == (" [ended]",):
            os.kill(os.getpid(), signal.SIGINT)

    typed = iter(["One", "Two", EOFError])

    def type_line(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.print", press_again)
    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["chat", "run"]) == 0
    assert scripted == [["One"], ["One", "first", "Two"]]


def test_ctrl_c_just_before_the_wait_for_an_answer_ends_it(scripted, monkeypatch, capsys):
    presses = iter([lambda: os.kill(os.getpid(), signal.SIGINT)])
    wait = threading.Condition.wait

    class Slow(Scripted):
        """Would answer the first question for ever."""

        def answer(self, history: Sequence[Message]) -> Message | None:
            with monkeypatch.context() as patches:
                patches.setattr(threading.Condition, "wait", press_and_wait)
                return super().answer(history)

        async def _answer(self, history: Sequence[Message], show: Callable[[str], None]) -> Message:
            if len(history) == 1 and history[0].text == "One":
                await asyncio.sleep(1000)
            return Message("assistant", "an answer")

    def press_and_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return wait(condition, timeout)
        next(presses, lambda: None)()
        assert wait(condition, 300), "nobody woke the one who waits for the answer"
        return True

    monkeypatch.setattr(chat_module, "ChatModel", Slow)
    typed = iter(["One", "Two"])

    def type_line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["chat", "run"]) == 0
    assert " [ended]" in capsys.readouterr().out


def test_ctrl_c_while_the_model_is_loaded_promises_no_checkpoint(monkeypatch, capsys):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "find_model", interrupted)
    assert main(["chat", "run"]) == 130
    assert "checkpoint" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing-like-it"], "no recipe, run or model is called"),
        (["http://127.0.0.1:9/v1#m"], "takes a run or a model that runs on this machine"),
        (["smollm2-135m-instruct", "--step", "3"], "is not the folder of a run"),
    ],
)
def test_what_can_t_be_talked_to_is_refused(words, expected, monkeypatch, capsys):
    pipe(monkeypatch, b"Hello\n")
    assert main(["chat", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_values_of_the_templates_variables_apply_to_a_folder_and_to_a_checkpoint(tmp_path):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if style %}{{ style }}{% endif %}"
    )
    tiny = {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    section = ModelSection(
        name="tiny", tiny=tiny, chat_template=template, template={"style": "plain"}
    )
    loaded = load_model(section)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)

    (contestant,) = find_contestants(
        str(tmp_path), (), ("model.template.style=loud", "environment=coins"), ()
    )
    assert contestant.config.model.template == {"style": "loud"}
    for checkpoint in (None, tmp_path):
        tokenizer = load_policy(contestant.config, checkpoint).tokenizer
        question = [{"role": "user", "content": "1+1?"}]
        assert tokenizer.apply_chat_template(question, tokenize=False).endswith("loud")

    (contestant,) = find_contestants(
        str(tmp_path), (), ("model.template.nope=loud", "environment=coins"), ()
    )
    with pytest.raises(ModelError, match="does not read 'nope'"):
        load_policy(contestant.config, tmp_path)
