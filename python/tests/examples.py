"""Runs the Python examples of Markdown files, those of a file one after the other.

A block that begins with ```python runs. One with a further word (```python gpu) is only compiled.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import os


def blocks(text: str) -> list[tuple[int, str, str]]:
    """The blocks of a text: their line, the words behind the fence, their code."""
    found: list[tuple[int, str, str]] = []
    words, code, begin = None, [], 0
    for number, line in enumerate(text.splitlines(), 1):
        if words is None and line.startswith("```python"):
            words, code, begin = line[len("```python") :].strip(), [], number
        elif words is not None and line.startswith("```"):
            found.append((begin, words, "\n".join(code)))
            words = None
        elif words is not None:
            code.append(line)
    return found


def main() -> None:
    paths = [pathlib.Path(path).resolve() for path in sys.argv[1:]]
    # Examples may write files.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for path in paths:
            names: dict[str, object] = {"__name__": "example"}
            ran = 0
            for line, words, code in blocks(path.read_text(encoding="utf-8")):
                program = compile("\n" * line + code, str(path), "exec")
                if not words:
                    exec(program, names)
                    ran += 1
            print(f"{path.name}: {ran} examples")
        os.chdir(os.path.dirname(folder))


if __name__ == "__main__":
    main()
