"""A hook of mkdocs: links of a page that lead out of `docs/`.

The repository's files are no pages of the site. Where mkdocs.yml has a `repo_url`, such a link leads
to the repository; otherwise its text remains.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]\n]+)\]\((\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def replace_link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"[{text}]({config.repo_url}/blob/main/{path})" if config.repo_url else text

    return LINK.sub(replace_link, markdown)
