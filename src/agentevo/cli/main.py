"""The `agentevo` command: it turns words into calls, prints the results, and decides the exit code.

    0    done
    1    it failed on the way (`AgentEvoError`), or `doctor` found something wrong
    2    the words or the configuration are wrong: said in one line per problem on stderr, and
         nothing was created
    130  stopped by Ctrl-C
    143  stopped by SIGTERM, which `serve` and `sample` end with 0 at

`main` is the one boundary where errors become messages; commands let them through. Whatever is
heavy (torch, transformers, SQLAlchemy, matplotlib) is imported inside the command that needs it, so
`agentevo --help` answers at once.
"""

from __future__ import annotations

import copy
import errno
import re
import sys
from collections.abc import Sequence
from functools import cache
from io import TextIOWrapper
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from agentevo import __version__
from agentevo.cli import (
    audit,
    chat,
    control,
    data,
    doctor,
    evaluation,
    judge,
    labelling,
    launch,
    names,
    processes,
    report,
    sandbox,
    store,
    tools,
    top,
    train,
    trajectories,
)
from agentevo.cli.ending import end_soon
from agentevo.cli.packages import package_modules
from agentevo.cli.printing import first_sentence
from agentevo.cli.topics import Topic
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runtime import progress
from agentevo.runtime.credentials import without_passwords
from agentevo.runtime.extras import training_packages
from agentevo.runtime.paths import name_problem

_LONG = re.compile(r"(\S{300})\S{100,}")
"""What is too long to be read in a message: a number or a text that a user gave."""
LONGEST_LINE = 1200
"""Characters of a message's line, for a text of many words."""
LONGEST_WORD = 100_000
"""Characters in one word of a command line; `execve` takes 131,072 bytes."""
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""What typer raises for words that fit no command."""

_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENAMETOOLONG,
}


class TopicalGroup(TyperGroup):
    """Lists the commands in its help by topic (`rich_help_panel`), each with the first sentence of
    its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        topics: dict[str, list[tuple[str, str]]] = {topic: [] for topic in Topic}
        for name, command in self.commands.items():
            if command.hidden:
                continue

            topic = getattr(command, "rich_help_panel", None)
            row = (name, first_sentence(command.help or ""))
            topics.setdefault(topic if isinstance(topic, str) else "Commands", []).append(row)

        for topic, rows in topics.items():
            if rows:
                with formatter.section(topic):
                    formatter.write_dl(rows)


app = typer.Typer(
    cls=TopicalGroup,
    name="agentevo",
    help="Train language-model agents that act over many turns and learn from reward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command(rich_help_panel=Topic.START)(train.train)
app.command("eval", rich_help_panel=Topic.START)(evaluation.evaluate)
app.command(rich_help_panel=Topic.START)(processes.serve)

app.command(rich_help_panel=Topic.RECIPES)(doctor.doctor)
app.command(rich_help_panel=Topic.RECIPES)(names.config)
app.command(rich_help_panel=Topic.RECIPES)(names.models)

app.command(rich_help_panel=Topic.TRAINING)(train.sft)

app.command(rich_help_panel=Topic.RUNS)(top.top)
app.command(rich_help_panel=Topic.RUNS)(control.control)
app.command(rich_help_panel=Topic.RUNS)(chat.chat)
app.add_typer(trajectories.trajectories, name="trajectories", rich_help_panel=Topic.RUNS)
app.command(rich_help_panel=Topic.RUNS)(report.report)
app.command(rich_help_panel=Topic.RUNS)(audit.audit)
app.command(rich_help_panel=Topic.RUNS)(store.store)

app.command(rich_help_panel=Topic.LABELS)(judge.judge)
app.command(rich_help_panel=Topic.LABELS)(labelling.annotate)

app.add_typer(data.data, name="data", rich_help_panel=Topic.TASKS)
app.add_typer(tools.tools, name="tools", rich_help_panel=Topic.TASKS)
app.command(rich_help_panel=Topic.TASKS)(sandbox.sandbox)

app.command(rich_help_panel=Topic.MACHINES)(launch.launch)
app.command(rich_help_panel=Topic.MACHINES)(processes.learn)
app.command(rich_help_panel=Topic.MACHINES)(processes.sample)
app.command("launch-node", hidden=True)(launch.node)
app.command("launch-own", hidden=True)(launch.own)

for _module in package_modules("commands"):
    _module.add_commands(app)

app.command("list", rich_help_panel=Topic.START)(names.list_names)  # the last of its topic


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. As the process's own command (without `argv`) it
    ends the process soon, whatever of a user's code would keep it, and a pipe or a log file gets
    each line when it is printed: the URL of a dashboard, say."""
    if argv is None and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)

    code = _run(sys.argv[1:] if argv is None else list(argv))
    if argv is None:
        end_soon(code)
    return code


def _run(words: list[str]) -> int:
    """The only place that turns an error into a message."""
    try:
        _check_words(words)
        with training_packages("this command"), progress.showing(sys.stderr):
            command = _command(words[0] if words else "")
            code = command(args=words, prog_name="agentevo", standalone_mode=False)
    except ConfigError as error:
        return _fail(str(error), 2)
    except AgentEvoError as error:
        return _fail(str(error), 1)
    except MemoryError:
        return _fail("memory has run out: free some, or use a machine with more", 1)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = error.filename or "a file"
        code = 2 if error.errno == errno.ENAMETOOLONG else 1
        return _fail(f"{where} could not be written or read ({error.strerror})", code)
    except _UsageError as error:
        return _usage_problem(error)
    except SystemExit as exit_request:
        code = exit_request.code

    goes_on_itself = words[:1] in (["learn"], ["launch-node"], ["launch-own"])
    if code in (130, 143) and (goes_on_itself or _takes_resume(words)):
        resumed = "the same command" + ("" if goes_on_itself else " with --resume")
        print(
            f"stopped cleanly: whole checkpoints are kept, and {resumed} continues from the last",
            file=sys.stderr,
        )

    return code if isinstance(code, int) else 0


def _check_words(words: Sequence[str]) -> None:
    """Looks at the words before any command does, so that what no file system, no terminal and no
    database can hold is refused in one place.

    Raises ConfigError for a word that is no text, or that can't be a path where it may be one:
    overrides (`key=value`) and URLs are looked at where they are read."""
    for number, word in enumerate(words, start=1):
        problem = _word_problem(word)
        if problem:
            shown = word if len(word) <= 60 else f"{word[:57]}..."
            raise ConfigError(f"argument {number}, {shown!a}, {problem}")


def _word_problem(word: str) -> str:
    """What is wrong with it and what to do, or empty."""
    if len(word) > LONGEST_WORD:
        return f"has {len(word):,} characters: put long values into the recipe"

    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return "is not UTF-8: rename the file, or write the text in UTF-8"

    if "=" in word or "://" in word:
        return "has a NUL character: remove it" if "\0" in word else ""
    if any(ord(character) < 32 or ord(character) == 127 for character in word):
        return "has a control character: remove it"

    return name_problem(word)


@cache
def _command(name: str) -> Any:
    """The command with its options, or the group so called with those of its commands; where there
    is none, all of them, which takes a quarter of what the shortest command takes."""
    commands = [
        registered_command
        for registered_command in app.registered_commands
        if _name_of(registered_command) == name
    ]
    groups = [
        registered_group
        for registered_group in app.registered_groups
        if registered_group.name == name
    ]
    if not commands and not groups:
        return typer.main.get_command(app)

    reduced_app = copy.copy(app)
    reduced_app.registered_commands = commands
    reduced_app.registered_groups = groups
    return typer.main.get_command(reduced_app)


def _takes_resume(words: Sequence[str]) -> bool:
    """Whether the command has an option --resume, so that it leaves something to resume from."""
    name = words[0] if words else ""
    command = _command(name).commands.get(name)
    return command is not None and any(option.name == "resume" for option in command.params)


def _name_of(command: Any) -> str:
    return str(command.name or typer.main.get_command_name(command.callback.__name__))


def _usage_problem(error: Any) -> int:
    """Words that fit no command: one line; where a group of commands stands alone, its help."""
    if "\n" in error.message:
        error.show()
    else:
        command = error.ctx.command_path if error.ctx is not None else "agentevo"
        text = " ".join(error.format_message().split())
        _fail(f"{text} (`{command} --help` says what it takes)", 2)
    return 2


def _fail(message: str, code: int) -> int:
    for line in _LONG.sub(r"\1...", without_passwords(message)).split("\n"):
        shortened = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."
        print(f"error: {shortened}", file=sys.stderr)
    return code


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"agentevo {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None: ...
