"""A grammar of command lines that nobody should type: commands and options as the program declares
them, keys and kinds of values as the schema of a recipe has them, and hostile texts, files and
folders in their places. Everything of a case follows from its seed.

It knows the grammar and what is generally hard to read; it knows of no fault that was ever found.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import typer
import yaml

from agentevo.cli.main import app
from agentevo.config.sweep import recipe_keys

COMMANDS: dict[tuple[str, ...], Any] = {}
"""Words of each command -> how typer declares it."""


def _collect(group: Any, words: tuple[str, ...]) -> None:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            _collect(command, (*words, name))
        else:
            COMMANDS[(*words, name)] = command


_collect(typer.main.get_command(app), ())
KEYS = recipe_keys()
LEAVES = [key for key in KEYS.names() if KEYS.explain(key)[0].type != "section"]
SMALL: dict[str, Any] = {
    "environment": {"type": "coins"},
    "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
    "trainer": {"steps": 2, "groups_per_step": 2, "group_size": 2},
    "evaluation": {"tasks": 2},
}
ROWS = [{"query": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
    for n in range(4)
]
PAIRS = [
    {"prompt": [{"role": "user", "content": f"{n}?"}], "chosen": "yes", "rejected": "no"}
    for n in range(4)
]
UNICODE = ["é", "日本語", "🦜", "\u202eabc", "e\u0301", "\u200b", "\ufeff", "ß", "\uff21", "\u2028"]
CONTROLS = ["\n", "\t", "\r", "\x1b[31m", "\x7f", "\x00", "\ud800", "\udcff", "\x85"]
SYNTAX = [
    "${",
    "}",
    "${a}",
    "${run.name}",
    "${oc.env:HOME}",
    "${nope:1}",
    "\\${x}",
    "???",
    "${..}",
    "[",
    "]",
    "{",
    "}",
    "- a",
    "a: b",
    "? x",
    "|",
    ">",
    "%",
    "@",
    "`",
    "&a x",
    "*a",
    "!!set {a}",
    "!!binary aGk=",
    "!x y",
    "---",
    "...",
    "# c",
    "<<: {a: 1}",
    "~",
    "null",
    "yes",
    "off",
    "=",
    ":",
    "2020-01-01",
    "1:30",
    "0x_",
    "0b",
    "010",
    "1_000",
    "._",
    "1e",
    ".e1",
    "'",
    '"',
    '"a',
    "{a: 1}",
    "[1, 2]",
    "[[]]",
    "{}",
    "[]",
    "{a: {b: [c]}}",
    "!!int x",
    "!!float",
    "[a, a]",
    "{a, a}",
    "a,b",
]
URLS = [
    "sqlite:///s.sqlite",
    "sqlite://",
    "sqlite:////",
    "sqlite:///",
    "sqlite:///folder",
    "://",
    "http://",
    "sqlite:///run/store.sqlite",
    "sqlite:///small.yaml",
    "postgresql://127.0.0.1:1/x",
    "mongodb:///x",
    "postgresql://",
    "postgresql://h:port/x",
    "postgresql://u:p@[::1/x",
    "mongodb://h:99999/x",
    "postgresql://127.0.0.1:99999/x",
    "mongodb://%zz/x",
    "ftp://a/b",
    "http://[",
    "http://127.0.0.1:1",
    "ws://a:b:c",
    "http://a b",
    "not a url",
    "http://x:99999",
    "postgresql://127.0.0.1:1/x?schema=%00",
]
PATHS = [
    "small.yaml",
    "folder",
    "folder/",
    "empty",
    "binary",
    "fifo",
    "loop",
    "dangling",
    "nowhere",
    "rows.jsonl",
    "chats.json",
    "pairs.jsonl",
    "rows.jsonl.gz",
    "broken.yaml",
    "run",
    "sweep",
    ".",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/null/x",
    "/proc/self/mem",
    "/proc/x",
    "empty/x",
    "run/checkpoints",
    "run/checkpoints/step-000002",
    "run/store.sqlite",
    "run/config.yaml",
    "",
    "loop/x",
    "nowhere/a/b",
    "./run/../run",
    "run/metrics.jsonl",
    "coins",
    "~",
    "~nobody/x",
    "-",
    "x.gguf",
    "model.gguf",
    "x.parquet",
    "out.jsonl",
    "out.jsonl.gz",
    "nowhere/out.jsonl",
    "out.md",
]


class Hostile:
    """One case's source of words. Most cases have few accidents, so that what comes after the first
    checks is met, too."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wild = self.pick([0.0, 0.05, 0.3, 1.0])
        """How often a word that has no need to be is hostile."""
        self.num_damaged = self.pick([0, 1, 1, 2, 5])
        """Files of the run that are damaged."""

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, options: Any) -> Any:
        return self.random.choice(list(options))

    def steady(self, options: Any) -> Any:
        """As `pick`, and a further option changes few picks (rendezvous hashing): a new command or
        key leaves most cases as they were."""
        draw = self.random.getrandbits(32)
        return max(options, key=lambda option: zlib.crc32(f"{draw} {option}".encode()))

    def number(self) -> str:
        sign = self.pick(["", "", "", "-", "+"])
        exponent = self.random.randrange(0, 40)
        return sign + self.pick(
            [
                "0",
                "1",
                "2",
                "7",
                "0.5",
                "1.5",
                "nan",
                ".nan",
                "inf",
                ".inf",
                "1e308",
                "5e-324",
                f"1e{exponent}",
                f"1e-{exponent}",
                str(10**exponent),
                str(2**63),
                "9" * 40,
                "9" * self.random.choice([100, 4000, 5000, 30000]),
                f"{self.random.random() * 10:.3f}",
            ]
        )

    def text(self) -> str:
        kind = self.random.randrange(8)
        if kind == 0:
            return str(self.pick(UNICODE))
        if kind == 1:
            return str(self.pick(CONTROLS)) + "x"
        if kind == 2:
            return "x" * self.pick([1, 200, 256, 300, 5000, 60000, 120000])
        if kind == 3:
            return str(self.pick(SYNTAX))
        if kind == 4:
            return str(self.pick(URLS))

        if kind == 5:
            depth = self.pick([1, 3, 30, 70, 300, 3000, 20000])
            opening, closing = self.pick([("[", "]"), ("{a: ", "}"), ("${", "}"), ("- ", "")])
            return opening * depth + "1" + closing * depth

        if kind == 6:
            return "".join(self.pick([*SYNTAX, *UNICODE, "a", " ", "1"]) for _ in range(4))

        return self.mangled(
            self.pick(["train", "coins", "grpo", "true", "best", "1", "small.yaml"])
        )

    def path(self) -> str:
        return self.text() if self.chance(0.15) else str(self.pick(PATHS))

    def mangled(self, text: str) -> str:
        """A few small accidents."""
        for _ in range(self.random.randrange(1, 4)):
            place = self.random.randrange(len(text) + 1)
            piece = self.pick(
                ["", text[:place], self.pick(SYNTAX), self.pick(UNICODE), " ", ".", "_"]
            )
            cut = self.random.randrange(3)
            text = text[:place] + piece + text[place + cut :]

        return text

    def value(self, key: str = "") -> str:
        """For a key as its schema has it, or nearly, or not at all."""
        explanation = KEYS.explain(key)[0] if key in KEYS.names() else None
        if explanation is not None and self.chance(0.5 * (1 - self.wild)):
            return self.plausible(explanation)

        if explanation is not None and not self.chance(0.1 + self.wild / 2):
            if explanation.choices and self.chance(0.6):
                choice = str(self.pick(explanation.choices))
                return choice if self.chance(0.6) else self.mangled(choice)

            if "number" in explanation.type:
                return self.number()
            if "path" in explanation.type or "file" in explanation.meaning.lower():
                return self.path()
            if explanation.default and self.chance(0.5):
                return self.mangled(explanation.default)

        return str(self.pick([self.number, self.text, self.path, lambda: self.pick(SYNTAX)])())

    def plausible(self, explanation: Any) -> str:
        """What the schema takes, mostly."""
        if explanation.choices:
            return str(self.pick(explanation.choices))
        if "number" in explanation.type:
            return str(self.pick([0, 1, 2, 3, 8, 64, 0.5, 1e-3, 1000, 100_000, 10**9]))
        if "list" in explanation.type:
            return str(self.pick(["[]", "[rows.jsonl]", "[0.5, 0.9]", "[a]", "rows.jsonl"]))
        return str(self.pick([explanation.default or "null", self.pick(PATHS), "null"]))

    def key(self) -> str:
        key = str(self.steady(LEAVES if self.chance(0.8) else KEYS.names()))
        kind = self.random.random()
        if kind < 0.7 or kind > self.wild:
            return key
        if kind < 0.8:
            return self.mangled(key)
        if kind < 0.85:
            return f"{key}.{self.pick(['a', 'type', '0', key])}"
        if kind < 0.9:
            return ".".join(["a"] * self.pick([2, 70, 500, 3000]))

        return self.pick(
            ["", ".", "a..b", "-", "k" * self.pick([300, 100_000]), key.upper(), "é.b"]
        )

    def override(self) -> str:
        if self.chance(0.1 * self.wild):
            return self.text()
        key = self.key()
        return f"{key}={self.value(key)}"

    def option(self, parameter: Any) -> list[str]:
        name = str(self.pick(parameter.opts + parameter.secondary_opts))
        if getattr(parameter, "is_flag", False) and self.chance(0.95):
            return [name]
        value = self.pick([self.number, self.text, self.path])()
        return [f"{name}={value}"] if self.chance(0.3) else [name, value]

    def command_line(self) -> list[str]:
        words = self.steady(COMMANDS)
        command = COMMANDS[words]
        line = [self.mangled(word) if self.chance(0.03 * self.wild) else word for word in words]
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                line += self._argument(parameter)
            elif parameter.name != "help" and self.chance(0.25):
                line += self.option(parameter)

        if self.chance(0.05 * self.wild):
            line.insert(self.random.randrange(len(line) + 1), self.text())
        if words in (("train",), ("sft",)) and self.chance(0.3):
            line.append("--dry-run")

        return line

    def _argument(self, parameter: Any) -> list[str]:
        name = parameter.name
        if name == "overrides":
            return [self.override() for _ in range(self.pick([0, 1, 1, 1, 2, 3]))]
        if self.chance(0.04 * self.wild):
            return []
        if self.chance(0.2 * self.wild):
            return [self.text()]

        usual = {
            "recipe": ["small.yaml", "small.yaml", "broken.yaml", "run/config.yaml"],
            "run_dir": ["run"],
            "folders": ["run", "run", "sweep"],
            "target": ["run", "run", "small.yaml", "broken.yaml"],
            "source": ["run", "run/checkpoints/step-000002", "rows.jsonl"],
            "out": ["out.jsonl", "out.jsonl.gz", "out"],
            "kind": ["environments", "recipes", "models", "algorithms"],
            "word": ["small.yaml", "run", self.key()],
            "action": ["stats", "migrate", "gc", "retry", "export", "import", "pause"],
            "file": ["out.jsonl", "out.jsonl.gz", "rows.jsonl"],
        }
        if name in usual and not self.chance(0.05 + self.wild / 2):
            return [self.pick(usual[name])]
        if name == "target" and self.chance(0.5):
            return [self.pick(URLS)]

        return [self.path() if self.chance(0.7) else self.text()]

    def tree(self, value: Any, probability: float) -> Any:
        """A copy with some of its parts replaced by hostile ones."""
        if self.chance(probability):
            return self.leaf()

        if isinstance(value, dict):
            pairs = [
                (self.text()[:300] if self.chance(probability / 2) else key, item)
                for key, item in value.items()
                if not self.chance(probability / 2)
            ]
            return {key: self.tree(item, probability) for key, item in pairs}

        if isinstance(value, list):
            return [self.tree(item, probability) for item in value]

        return value

    def leaf(self) -> Any:
        nested: Any = 1
        for _ in range(self.pick([1, 5, 80, 400])):
            nested = [nested] if self.chance(0.5) else {"a": nested}
        options = [None, True, -1, 0, 2**70, 1.5, 1e308, -1e308, "", {}, [], nested, 10**25, "x"]
        return self.pick([*options, self.text(), self.text(), self.number(), self.path()])

    def damaged(self, content: bytes) -> bytes:
        """The content of a file after an accident."""
        kind = self.random.randrange(9)
        if kind == 0:
            return b""
        if kind == 1:
            return content[: self.random.randrange(len(content) + 1)]

        if kind == 2:
            place = self.random.randrange(len(content) + 1)
            return (
                content[:place] + self.random.randbytes(self.pick([1, 16, 500])) + content[place:]
            )

        if kind == 3:
            return content + content[: self.random.randrange(len(content) + 1)]

        if kind == 4:
            changed = bytearray(content)
            for _ in range(min(len(changed), 20)):
                changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
            return bytes(changed)

        if kind == 5:
            return self.text().encode("utf-8", "surrogatepass")
        if kind == 6:
            return self.number().encode()
        if kind == 7:
            return content.decode("utf-8", "replace").encode(self.pick(["utf-16", "utf-8-sig"]))

        return b"[" * self.pick([10, 1000, 100_000])

    def damaged_file(self, path: Path) -> None:
        """The file after an accident: of its bytes, of its values, or something else in its
        place."""
        content = path.read_bytes()
        if self.chance(0.5) and path.suffix in (".json", ".jsonl", ".yaml"):
            path.write_bytes(self._other_values(path.suffix, content))
        elif path.suffix == ".sqlite" and self.chance(0.7):
            self._other_rows(path)
        elif self.chance(0.2):
            path.unlink()
            self.odd(path)
        else:
            path.write_bytes(self.damaged(content))

    def _other_values(self, suffix: str, content: bytes) -> bytes:
        dump = lambda value: json.dumps(value).encode()  # noqa: E731
        if suffix == ".yaml":
            tree = self.tree(yaml.safe_load(content), 0.04)
            return _as_yaml(tree)

        if suffix == ".json":
            return dump(self.tree(json.loads(content), 0.1))

        lines = [dump(self.tree(json.loads(line), 0.05)) for line in content.splitlines()]
        return b"\n".join(lines) + b"\n"

    def _other_rows(self, path: Path) -> None:
        """One column of one row of one table."""
        with sqlite3.connect(path) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            names = sorted(name for (name,) in tables if not name.startswith("sqlite_"))
            table = self.pick(names)
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]

            value = self.pick(
                [None, -1, 2**62, 1.5, "", b"", self.text(), self.random.randbytes(30)]
            )
            if isinstance(value, str):
                value = value.encode("utf-8", "replace").decode()

            try:
                connection.execute(
                    f"UPDATE {table} SET {self.pick(columns)} = ? WHERE rowid = (SELECT rowid FROM "
                    f"{table} ORDER BY rowid LIMIT 1 OFFSET ?)",
                    (value, self.random.randrange(4)),
                )
            except sqlite3.Error:  # a column that may not hold that: dropped instead
                connection.rollback()
                connection.execute("PRAGMA foreign_keys=OFF")
                connection.execute(f"DROP TABLE {table}")

        connection.close()

    def odd(self, path: Path) -> None:
        """Something that is no plain file."""
        kind = self.pick(["folder", "fifo", "loop", "dangling", "device", "nothing"])
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind != "nothing":
            path.symlink_to({"loop": path.name, "dangling": "no-such", "device": "/dev/zero"}[kind])


def _as_yaml(tree: Any) -> bytes:
    try:
        text = yaml.safe_dump(tree, allow_unicode=True)
    except RecursionError:
        text = json.dumps(tree)  # which is YAML, too
    return text.encode("utf-8", "surrogatepass")


def furnish(folder: Path, hostile: Hostile, run: Path) -> None:
    """Fills a folder with what the words of a command line may name: recipes, data, odd files, and
    a copy of the finished `run`, more or less damaged."""
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    content = _as_yaml(hostile.tree(SMALL, 0.1))
    (folder / "broken.yaml").write_bytes(
        hostile.damaged(content) if hostile.chance(0.4) else content
    )

    for name, rows in (("rows.jsonl", ROWS), ("pairs.jsonl", PAIRS)):
        lines = [json.dumps(hostile.tree(row, 0.05)).encode() for row in rows]
        (folder / name).write_bytes(b"\n".join(lines))

    (folder / "chats.json").write_text(json.dumps(hostile.tree(CHATS, 0.03)))
    packed = gzip.compress((folder / "rows.jsonl").read_bytes())
    (folder / "rows.jsonl.gz").write_bytes(
        hostile.damaged(packed) if hostile.chance(0.5) else packed
    )

    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    (folder / "x.parquet").write_bytes(b"PAR1" + bytes(30))
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("no-such")
    shutil.copytree(run, folder / "run", copy_function=shutil.copyfile)

    files = sorted(path for path in (folder / "run").rglob("*") if path.is_file())
    for path in hostile.random.sample(files, k=hostile.num_damaged):
        hostile.damaged_file(path)

    sweep = folder / "sweep"
    sweep.mkdir()
    (sweep / "sweep.yaml").write_bytes(
        hostile.pick([b"variants: {a: {}}\n", hostile.damaged(b"variants: {a: {}}\n")])
    )
