"""Documents as they are given: folders, what can't be read, and what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentevo.errors import ConfigError
from agentevo_evolve.task_making import document_files
from agentevo_evolve.task_making.document_files import changed_files, is_document, read_documents


def test_a_folder_is_read_whole_but_for_what_is_hidden_or_no_text(tmp_path: Path) -> None:
    for name, content in (
        ("b.md", "Second."),
        ("a.txt", "\ufeffFirst."),
        ("deep/er/a.txt", "Third."),
        ("corpus.jsonl", '{"id": "c", "text": "Fourth."}\n'),
        ("empty.txt", " \n"),
        (".git/a.txt", "Hidden."),
        (".hidden.txt", "Hidden."),
        ("book.pdf", "%PDF"),
        ("LICENSE", "Other."),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")

    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    read = read_documents([tmp_path, tmp_path / "b.md"])
    texts = {passage.id: passage.text for passage in read.passages}
    assert texts == {
        "a.txt#0": "First.",
        "b.md#0": "Second.",
        "deep/er/a.txt#0": "Third.",
        "c": "Fourth.",
    }
    assert read.left_out == {".pdf": 1, "without an ending": 1, "empty": 1}
    assert "1 .pdf" in read.note()
    assert changed_files(read.digests) == []

    (tmp_path / "b.md").write_text("Else.")
    (tmp_path / "a.txt").unlink()
    assert sorted(changed_files(read.digests)) == [str(tmp_path / "a.txt"), str(tmp_path / "b.md")]


def refused(*paths: Path) -> str:
    with pytest.raises(ConfigError) as found:
        read_documents(paths)
    return str(found.value)


def test_what_can_not_be_read_is_refused_with_all_that_can_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no text in it" in refused(tmp_path)

    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    assert "it has 1 .pdf" in refused(tmp_path) and "pdftotext" in refused(tmp_path)
    assert "no.txt: can't be read: No such file" in refused(tmp_path / "no.txt")

    os.mkfifo(tmp_path / "pipe.txt")
    assert "pipe.txt: is a device, pipe or socket" in refused(tmp_path)

    (tmp_path / "pipe.txt").unlink()
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    (tmp_path / "zero.md").write_bytes(b"a\0b")
    (tmp_path / "good.md").write_text("Text.")
    said = refused(tmp_path)
    assert "image.txt: not UTF-8 text (byte 0)" in said
    assert "zero.md: is not a text (byte 1 is 0)" in said

    for name in ("image.txt", "zero.md"):
        (tmp_path / name).unlink()

    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(10**9)

    said = refused(tmp_path)
    assert "huge.txt: has 1,000,000,000 bytes, and the limit of one text is 32,000,000" in said

    (tmp_path / "huge.txt").unlink()
    (tmp_path / "link.txt").symlink_to("/dev/zero")
    assert "link.txt: is a device" in refused(tmp_path)

    (tmp_path / "link.txt").unlink()
    monkeypatch.setattr(document_files, "MAX_TOTAL_BYTES", 3)
    assert "5 bytes together, and the limit is 3" in refused(tmp_path)

    monkeypatch.setattr(document_files, "MAX_FILES", 0)
    assert "more than 0 texts" in refused(tmp_path)


def test_what_may_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")  # whose beginning root can't read either
    assert "a.txt: can't be read: Input/output error" in refused(tmp_path)


def test_documents_are_told_from_programs_and_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manual").mkdir()
    (tmp_path / "my notes.md").write_text("x")
    (tmp_path / "sh").mkdir()

    documents = ("manual", "manual/", "my notes.md", "away.md", "away/", ".", str(tmp_path))
    others = ("http://x/a.md", "npx -y server notes.md", "sh", "server", "", "a\0b")
    assert [is_document(word) for word in documents] == [True] * len(documents)
    assert [is_document(word) for word in others] == [False] * len(others)


def test_files_of_one_name_in_two_folders_have_names_of_their_own_and_none_counts_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("manual", "faq"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text(f"Of the {folder}.")
    monkeypatch.chdir(tmp_path)
    read = read_documents([Path("manual"), Path("faq"), Path("./faq"), tmp_path / "manual"])
    texts = {passage.id: passage.text for passage in read.passages}
    assert texts == {"README.md#0": "Of the manual.", "faq/README.md#0": "Of the faq."}


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("Text.")
    with pytest.raises(ConfigError, match="its name is not UTF-8: rename it"):
        read_documents([tmp_path])
