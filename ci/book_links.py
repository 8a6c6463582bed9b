"""Follows the links of a rendered book: to its pages, to places in them, and to files of the project.
Also those of the project's other pages to files.

usage: book_links.py BOOK
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PROJECT = re.compile(re.escape("https://github.com/leasehold/leasehold/") + r"(?:blob|tree)/main/([^#?]*)")
REPOSITORY = Path(__file__).resolve().parent.parent


class Page(HTMLParser):
    """The links and the places of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            if name in ("href", "src") and value and tag != "base":
                self.links.append(value)


def other_pages() -> list[tuple[str, str]]:
    """The pages outside the book, each with its links to files of the project."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    files = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    found = []
    for name in files.stdout.split():
        page = REPOSITORY / name
        if name.startswith("docs/") or not page.is_file():
            continue
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not urlsplit(link).scheme and not link.startswith("#"):
                found.append((name, link))
    return found


def main() -> None:
    """Prints the dead links; the exit status is 1 if there are any."""
    book = Path(sys.argv[1]).resolve()
    pages = {path: Page(path) for path in sorted(book.rglob("*.html"))}
    dead, followed = [], 0
    for path, page in pages.items():
        # This one stands for any address, and the other has all pages once more.
        if path.name in ("404.html", "print.html"):
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                inside = PROJECT.match(link)
                if inside:
                    followed += 1
                    if not (REPOSITORY / unquote(inside[1])).exists():
                        dead.append((path, link))
                continue
            followed += 1
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if to.is_dir():
                to = to / "index.html"
            known = to.is_file() and to.is_relative_to(book)
            if known and parts.fragment and to in pages:
                known = unquote(parts.fragment) in pages[to].places
            if not known:
                dead.append((path, link))
    for path, link in dead:
        print(f"{path.relative_to(book)}: dead link {link}", file=sys.stderr)
    others = other_pages()
    for name, link in others:
        if not (REPOSITORY / name).parent.joinpath(unquote(urlsplit(link).path)).exists():
            print(f"{name}: dead link {link}", file=sys.stderr)
            dead.append((name, link))
    if dead:
        sys.exit(1)
    if followed < len(pages):
        sys.exit(f"only {followed} links in {len(pages)} pages: the reader of links is broken")
    print(f"book: {len(pages)} pages, {followed + len(others)} links, none dead")


main()
