"""A hook of mkdocs that adapts the links of a page to the site.

A link to a file of the repository leads to `repo_url` of mkdocs.yml. Without a `repo_url`, only its
text remains, since the site has no such page.

Links name the English page and heading in every language, such as `tools.md#code-as-action`. If
there is a translation, the link leads to the heading at the same position in it.
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
