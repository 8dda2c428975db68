"""Hooks of mkdocs: links that leave docs/ work on the site as well.

Pages link to sources, tests and result files of the repository by relative paths. The site has no such files: a link becomes
one to the repository where mkdocs.yml states `repo_url`, else plain text. Plots of benchmarks/results are copied into the site.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PLOTS = "benchmarks/results"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r'(src(?:set)?=")([^":]+\.png)(")')


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrites the links of a page that lead out of docs/, and the places of its plots."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if target.startswith("docs/") and target.endswith(".md"):
            return match[0]
        if config.repo_url:
            return f"[{match[1]}]({config.repo_url.rstrip('/')}/blob/main/{target}{match[3] or ''})"
        return match[1]

    def image(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        return f"{match[1]}{posixpath.relpath(target, folder.removeprefix('docs').lstrip('/') or '.')}{match[3]}"

    return IMAGE.sub(image, LINK.sub(link, markdown))


def on_post_build(config: Any, **_: Any) -> None:
    """Copies the plots into the site, at their paths in the repository."""
    for plot in (ROOT / PLOTS).rglob("*.png"):
        target = Path(config.site_dir) / plot.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(plot, target)
