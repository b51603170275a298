"""Reads documents as passages: plain texts, corpora and folders of both.

The reader splits a plain text at the ends of paragraphs and sentences. A corpus (.jsonl) has its
own passages. The files of a folder include those of its subfolders, except hidden ones (.git) and
symbolic links. Files without the ending of a text are left out and reported. Texts that can't be
read are errors, which are reported together.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentevo.agents.tools.corpus import Passage, read_corpus
from agentevo.errors import ConfigError
from agentevo.runtime.parsing import check_file, read_text
from agentevo.runtime.paths import name_problem

CORPUS_ENDING = ".jsonl"
ENDINGS = (".txt", ".text", ".md", ".markdown", ".rst", ".org", ".adoc", CORPUS_ENDING)
"""The endings of the files that are read from a folder."""
MAX_PASSAGE_CHARS = 1_200
"""The maximum number of characters of a passage of a plain text."""
MAX_BYTES = 32_000_000
"""The maximum size of one plain text."""
MAX_TOTAL_BYTES = 512_000_000
"""The maximum size of all files together."""
MAX_FILES = 20_000
MAX_SHOWN = 5
"""The number of problems, or endings, that a message names."""
SENTENCE = re.compile(
    r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])|\n\s*\n"
    r"|(?<=[。！？])(?![。！？”」』）】》])\s*|(?<=[。！？][”」』）】》])\s*"
)
"""The separator between two sentences."""


@dataclass(frozen=True)
class Documents:
    """The passages of documents."""

    passages: list[Passage]
    digests: dict[str, str]
    """The sha256 of every file that was read, by its path."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Maps the reason why files of a folder were not read to their number."""

    def note(self) -> str:
        """A description of the files that were left out. Empty if all were read."""
        if not self.left_out:
            return ""
        why = ", ".join(f"{many} {what}" for what, many in list(self.left_out.items())[:MAX_SHOWN])
        num_hidden = len(self.left_out) - MAX_SHOWN
        return f"left out: {why}{f' and {num_hidden} further kinds' if num_hidden > 0 else ''}"


def is_document(word: str) -> bool:
    """Whether a command-line argument is a document: a folder, or the name of a text. The name of a
    program is not a document, even if a folder has the same name."""
    if not word or "://" in word or name_problem(word) or ("/" not in word and shutil.which(word)):
        return False
    path = Path(word).expanduser()
    is_one_word = not any(part.isspace() for part in word)
    is_text = path.suffix.lower() in ENDINGS and (is_one_word or path.is_file())
    return is_text or path.is_dir() or (is_one_word and word.endswith("/"))


def read_documents(sources: Sequence[Path]) -> Documents:
    """The passages of files and folders. Raises ConfigError with a line for each file that can't be
    read, and if there is nothing to read."""
    left_out = Counter[str]()
    files = _name_files(sources, left_out)

    passages = list[Passage]()
    digests = dict[str, str]()
    problems = list[str]()
    for path in files:
        if not _is_utf8(str(path)):
            problems.append(f"{str(path)!a}: its name is not UTF-8: rename it")

    if not files:
        problems.append(_no_text_message(sources, left_out))

    _check_sizes(files, problems)
    for path, name in files.items() if not problems else ():
        try:
            found_passages = list(_passages_of(path, name))
            digests[str(path)] = digest_of(path)
        except ConfigError as error:
            problems.append(str(error))
            continue

        if not found_passages and path in sources:
            problems.append(f"{path}: it is empty: give a text, or a corpus ({CORPUS_ENDING})")
        elif not found_passages:
            left_out["empty"] += 1

        passages += found_passages

    if not (passages or problems):
        problems.append(_no_text_message(sources, left_out))

    twice = [name for name, many in Counter(passage.id for passage in passages).items() if many > 1]
    if twice and not problems:
        problems.append(f"two passages have the id {twice[0]!r}: give each a different id")

    if problems:
        num_hidden = len(problems) - MAX_SHOWN
        rest = [f"and {num_hidden} more that can't be read"] if num_hidden > 0 else []
        raise ConfigError("\n".join([*problems[:MAX_SHOWN], *rest]))

    return Documents(passages, digests, dict(left_out.most_common()))


def _name_files(sources: Sequence[Path], left_out: Counter[str]) -> dict[Path, str]:
    """Maps each file to the name that its passages have: the path within the folder. If another
    file has the same path, the folder's name comes first. A file counts once, even if it is named
    twice or by several paths."""
    files = dict[Path, str]()
    seen_paths = set[Path]()
    for source in sources:
        names = _files_in(source, left_out) if source.is_dir() else {source: source.name}
        taken = set(files.values())
        for path, name in names.items():
            resolved = path.resolve()
            if resolved not in seen_paths:
                seen_paths.add(resolved)
                above = (source if source.is_dir() else source.parent).resolve().name
                files[path] = f"{above}/{name}" if name in taken else name

    return files


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def digest_of(path: Path) -> str:
    """The sha256 of a file's content. Raises ConfigError if the file can't be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error


def changed_files(digests: dict[str, str]) -> list[str]:
    """The files that were changed or deleted since they were read."""
    changed = []
    for path, digest in digests.items():
        try:
            is_same = digest_of(Path(path)) == digest
        except ConfigError:
            is_same = False
        if not is_same:
            changed.append(path)

    return changed


def _no_text_message(sources: Sequence[Path], left_out: Counter[str]) -> str:
    where = ", ".join(map(str, sources)) or "documents"
    other_kinds = (
        f" (it has {', '.join(f'{many} {what}' for what, many in left_out.most_common(MAX_SHOWN))})"
    )
    return (
        f"{where}: there is no text in it{other_kinds if left_out else ''}: give files that end in "
        f"{', '.join(ENDINGS)}; convert a PDF or a web page to text first, with pdftotext or "
        "pandoc"
    )


def _files_in(folder: Path, left_out: Counter[str]) -> dict[Path, str]:
    """The texts of a folder with their relative names, in order. Raises ConfigError if the folder
    can't be read or has more than MAX_FILES texts."""

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: can't be read: {error.strerror}") from error

    texts: dict[Path, str] = {}
    for where, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(where) / name
            if path.suffix.lower() not in ENDINGS:
                left_out[path.suffix.lower()[:20] or "without an ending"] += 1
                continue

            texts[path] = path.relative_to(folder).as_posix()
            if len(texts) > MAX_FILES:
                raise ConfigError(
                    f"{folder}: has more than {MAX_FILES:,} texts: give a part of them, or one "
                    f"corpus ({CORPUS_ENDING}) with a line for each passage"
                )

    return texts


def _check_sizes(files: Iterable[Path], problems: list[str]) -> None:
    """Checks the sizes before any file is read, and appends to `problems`."""
    num_bytes = 0
    for path in files:
        try:
            size = check_file(path)
        except ConfigError as error:
            problems.append(str(error))
            continue

        num_bytes += size
        if path.suffix.lower() != CORPUS_ENDING and size > MAX_BYTES:
            problems.append(
                f"{path}: has {size:,} bytes, and the limit of one text is {MAX_BYTES:,}: split "
                f"it, or make a corpus ({CORPUS_ENDING}) of it, with a line for each passage"
            )

    if num_bytes > MAX_TOTAL_BYTES and not problems:
        problems.append(
            f"the documents have {num_bytes:,} bytes together, and the limit is "
            f"{MAX_TOTAL_BYTES:,}: "
            "give a part of them"
        )


def _passages_of(path: Path, name: str) -> Iterator[Passage]:
    """The passages of a file. Raises ConfigError if it can't be read."""
    if path.suffix.lower() == CORPUS_ENDING:
        yield from read_corpus(str(path))
        return
    for number, part in enumerate(parts_of(_text_of(path))):
        yield Passage(f"{name}#{number}", path.stem, part)


def _text_of(path: Path) -> str:
    """The text of a file. Raises ConfigError if it can't be read as text."""
    text = read_text(path, at_most=MAX_BYTES).removeprefix("\ufeff")
    if "\0" in text:
        raise ConfigError(
            f"{path}: is not a text (byte {text.index(chr(0))} is 0): remove it, or give its text"
        )
    return text


def parts_of(text: str) -> Iterator[str]:
    """The passages of a text. Short paragraphs are joined up to the limit. Longer ones are split at
    the ends of sentences, or anywhere if there is no such end."""
    paragraphs = filter(None, (paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)))
    pieces = (
        piece
        for paragraph in paragraphs
        for piece in (
            [paragraph]
            if len(paragraph) <= MAX_PASSAGE_CHARS
            else _pack_neighbours(_sentences(paragraph), " ")
        )
    )
    return _pack_neighbours(pieces, "\n\n")


def _sentences(paragraph: str) -> Iterator[str]:
    for sentence in SENTENCE.split(paragraph):
        for first in range(0, len(sentence), MAX_PASSAGE_CHARS):
            yield sentence[first : first + MAX_PASSAGE_CHARS]


def _pack_neighbours(pieces: Iterable[str], joint: str) -> Iterator[str]:
    """Joins neighbouring pieces up to the limit."""
    packed = ""
    for piece in pieces:
        if packed and len(packed) + len(joint) + len(piece) > MAX_PASSAGE_CHARS:
            yield packed
            packed = ""
        packed = f"{packed}{joint}{piece}" if packed else piece

    if packed:
        yield packed
