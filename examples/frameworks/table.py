"""Trains every example with its real package and writes the table of docs/gateway.md.

    .venv/bin/python examples/frameworks/table.py                     # all: about a minute each
    .venv/bin/python examples/frameworks/table.py --only langgraph_agent
    .venv/bin/python examples/frameworks/table.py --only              # the table of earlier results

A line of the page without a result under --out stays as it is.

Each group of packages that fit together (requirements/GROUP.txt) has an environment of its own in
build/frameworks/GROUP: its versions come first, AgentEvo and torch are those of the Python that
runs this. An environment is made once, and again when its requirements change.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
BUILD = ROOT / "build" / "frameworks"
PAGE = ROOT / "docs" / "gateway.md"
BEGIN = "<!-- table -->"
END = "<!-- /table -->"


@dataclass(frozen=True)
class Example:
    """One line of the table."""

    title: str
    file: str
    """Name of its file, without .py."""
    group: str
    """Its environment: requirements/GROUP.txt, or a folder with a package.json."""
    api: str
    """How it asks the policy."""
    extends: bool = True
    """Whether its history extends the recorded tokens; else every turn has a prompt of its own."""
    asks_again: bool = False
    """Whether it leaves an answer that it can't use out of its history, and asks anew."""
    drops_words: bool = False
    """Whether it leaves the words beside a call out of its history: such a turn is not extended,
    which is counted as drift."""
    steps: int = 4
    """Of training."""
    conversations: int = 1536
    """Of the cold start: a long prompt, and turns with prompts of their own, need more."""
    learning_rate: float = 1e-3

    @property
    def name(self) -> str:
        """Of its results: the file's, and the group's where a file serves several."""
        several = sum(one.file == self.file for one in EXAMPLES) > 1
        return f"{self.file}-{self.group}" if several else self.file


EXAMPLES = [
    Example("OpenAI SDK 2", "openai_sdk", "openai2", "chat completions"),
    Example("OpenAI SDK 3", "openai_sdk", "openai3", "chat completions"),
    Example("OpenAI SDK for Node", "node_openai", "node_openai", "chat completions"),
    Example("Anthropic SDK", "anthropic_sdk", "anthropic", "messages"),
    Example("OpenAI Agents SDK", "openai_agents", "openai_agents", "Responses"),
    Example(
        "LangGraph, LangChain",
        "langgraph_agent",
        "langgraph",
        "chat completions",
        steps=8,
        learning_rate=5e-4,
    ),
    Example("LangGraph by class", "langchain_native", "langgraph", "`policy.generate`"),
    Example("Pydantic AI", "pydantic_ai_agent", "pydantic_ai", "chat completions"),
    Example(
        "LlamaIndex",
        "llama_index_agent",
        "llama_index",
        "streamed chat completions",
        steps=6,
        conversations=4096,
    ),
    Example("AutoGen", "autogen_agent", "autogen", "chat completions"),
    Example(
        "CrewAI",
        "crewai_agent",
        "crewai",
        "chat completions",
        drops_words=True,
        steps=5,
        conversations=4096,
    ),
    Example(
        "DSPy",
        "dspy_agent",
        "dspy",
        "chat completions",
        asks_again=True,
        steps=5,
        conversations=4096,
    ),
    Example("Google ADK", "google_adk_agent", "google_adk", "chat completions", asks_again=True),
    Example(
        "smolagents",
        "smolagents_agent",
        "smolagents",
        "chat completions",
        extends=False,
        steps=24,
        conversations=8192,
        learning_rate=3e-4,
    ),
]


class NotInstalledError(Exception):
    """An environment that can't be made here; the message is the installer's."""


def python_of(example: Example) -> str:
    """The Python that runs an example, in its environment, which is made if need be."""
    if (FOLDER / example.group / "package.json").exists():
        folder = FOLDER / example.group
        if not (folder / "node_modules").exists():
            _install(["npm", "install", "--no-audit", "--no-fund"], cwd=folder)
        return sys.executable

    wanted = (FOLDER / "requirements" / f"{example.group}.txt").read_text()
    folder = BUILD / example.group
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        _install([sys.executable, "-m", "venv", "--clear", str(folder)])
        requirements = str(FOLDER / "requirements" / f"{example.group}.txt")
        _install([str(python), "-m", "pip", "install", "--quiet", "--requirement", requirements])
        outer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (site / "zz_outer.pth").write_text(outer)
        stamp.write_text(wanted)

    return str(python)


def _install(words: list[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=1200)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise NotInstalledError(f"{' '.join(words)}: {(done.stderr or done.stdout)[-1000:]}")


def train(example: Example, out: Path, *options: str) -> dict[str, float]:
    """Success before and after, the steps between them, and the CPU minutes that it took."""
    folder = out / example.name
    words = [python_of(example), str(FOLDER / f"{example.file}.py"), "--out", str(folder)]
    words += ["--steps", str(example.steps), "--conversations", str(example.conversations)]
    words += ["--learning-rate", str(example.learning_rate)]
    words += options
    began = cpu_s()

    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{example.name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    result = json.loads((folder / "result.json").read_text())
    result["minutes"] = (cpu_s() - began) / 60
    (folder / "result.json").write_text(json.dumps(result))
    return result


def cpu_s() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(out: Path, page: str = "") -> str:
    """Of all results that there are. An example that has none keeps its line of the page."""
    stand = {line.split("|")[1].strip(): line for line in page.splitlines() if line[:1] == "|"}
    lines = [
        "| framework | packages | asks by | before | after | gain, points | steps | CPU minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for example in EXAMPLES:
        path = out / example.name / "result.json"
        if not path.exists():
            lines += [stand[example.title]] if example.title in stand else []
            continue

        result = json.loads(path.read_text())
        before = 100 * result["before"]
        after = 100 * result["after"]
        lines.append(
            f"| {example.title} | {_packages(example)} | {example.api} | {before:.0f}% "
            f"| {after:.0f}% | {after - before:+.0f} | {result['steps']} "
            f"| {result['minutes']:.1f} |"
        )

    return "\n".join(lines)


def _packages(example: Example) -> str:
    package = FOLDER / example.group / "package.json"
    if package.exists():
        named = json.loads(package.read_text())["dependencies"].items()
        return ", ".join(f"{name} {version}" for name, version in named)
    lines = (FOLDER / "requirements" / f"{example.group}.txt").read_text().splitlines()
    return ", ".join(line.replace("==", " ") for line in lines if "==" in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[one.name for one in EXAMPLES])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "frameworks")
    given = parser.parse_args()

    names = {one.name: one for one in EXAMPLES}
    unknown = [name for name in given.only if name not in names]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: choose from {', '.join(names)}")

    failed = False
    for name in given.only:
        try:
            result = train(names[name], given.out)
            print(f"{name}: {result['before']:.0%} -> {result['after']:.0%}", flush=True)
        except (NotInstalledError, RuntimeError) as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr, flush=True)

    rewrite(PAGE, lambda stands: table(given.out, stands))
    return int(failed)


def rewrite(page: Path, made: Callable[[str], str]) -> None:
    """Puts a table into its place of a page. `made` is given what stands there."""
    head, rest = page.read_text().split(BEGIN, 1)
    stands, tail = rest.split(END, 1)
    page.write_text(f"{head}{BEGIN}\n{made(stands)}\n{END}{tail}")


if __name__ == "__main__":
    sys.exit(main())
