"""A hook of mkdocs: links that the site's pages have elsewhere than the repository's.

The repository's files are no pages of the site. Where mkdocs.yml has a `repo_url`, such a link
leads to the repository; otherwise its text remains.

A link to another page names its English file and heading, `tools.md#code-as-action`, in every
language. On a site in another language it leads to the translation, where there is one, and so to
the heading at the same place there.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from pymdownx.slugs import slugify

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]*)\)")
ANCHOR = re.compile(r"\]\(([\w./-]+)\.md#([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def replace_link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"[{text}]({config.repo_url}/blob/main/{path})" if config.repo_url else text

    def replace_anchor(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        page_path = Path(config.docs_dir, posixpath.dirname(page.file.src_uri), target)
        language = page.file.locale_alternate_of
        return f"]({target}.md#{translate(anchor, page_path, language)})"

    return ANCHOR.sub(replace_anchor, LINK.sub(replace_link, markdown))


def translate(anchor: str, page_path: Path, language: str) -> str:
    """The anchor in the translation of a page (its path has no suffix) of a heading of the page;
    the same one where either has no counterpart."""
    translation = page_path.with_name(f"{page_path.name}.{language}.md")
    if not translation.is_file():
        return anchor

    anchors = anchors_of(page_path.with_name(f"{page_path.name}.md"))
    translated = anchors_of(translation)
    if anchor not in anchors or len(anchors) != len(translated):
        return anchor  # mkdocs warns of it

    return translated[anchors.index(anchor)]


def anchors_of(path: Path) -> list[str]:
    slug = slugify(case="lower")
    headings = HEADING.findall(FENCE.sub("", path.read_text(encoding="utf-8")))
    return [slug(heading, "-") for heading in headings]
