"""Check a site that Sphinx has built: its links, what it loads, and its search. ``python docs/check.py docs/_build/html``"""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.search.en import SearchEnglish

WORDS = "autocast", "threads", "bfloat16", "disable", "macOS", "wheel", "conj"
"""What users search for: each has to lead to a page."""


class Page(HTMLParser):
    """A page's anchors; what it links to, and what a browser loads with it."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.loads = {"", "top"}, [], []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list):
        given = dict(attributes)
        self.anchors |= {given.get("id"), given.get("name")}
        self.links += filter(None, [given.get("href") if tag == "a" else None])
        self.loads += filter(None, [given.get("src"), given.get("href") if tag == "link" else None])


def broken(site: Path):
    """What is wrong, a line each."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc:
                wrong = "is loaded from elsewhere" if link in page.loads and parts.scheme != "data" else None
            elif not target.is_file():
                wrong = "leads to no file"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong = "leads to no such anchor"
            else:
                wrong = None
            if wrong:
                yield f"{path.relative_to(site)}: {link} {wrong}"
    index = json.loads((site / "searchindex.js").read_text("utf-8").removeprefix("Search.setIndex(").removesuffix(")"))
    for word in WORDS:
        if not {SearchEnglish({}).stem(word.lower())} & {*index["terms"], *index["titleterms"]}:
            yield f"the search for {word} leads to no page"


if __name__ == "__main__":
    found = sorted({*broken(Path(sys.argv[1]).resolve())})
    print("\n".join(found) or "all links lead somewhere")
    sys.exit(bool(found))
