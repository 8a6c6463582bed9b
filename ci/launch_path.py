#!/usr/bin/env python3
"""Compares ARCHITECTURE.md's list of the files that a launch passes with the source.

A line of the list is a file and the files that it calls. A call within a crate must be an arrow of
`call_circles.py`. A call into another crate, or of a trait's method, stands as `TYPE::METHOD in
FILE`: the caller calls the method, and the file has it for that type or trait. The list begins with
the launch, and leads to each file from one above. No more than 17 files are on it.
"""

import re
import sys
from functools import cache
from pathlib import Path

sys.dont_write_bytecode = True
from call_circles import IMPL, Crate, end  # noqa: E402

MOST = 17
ROOT = Path(__file__).resolve().parent.parent


@cache
def crate(folder):
    return Crate(ROOT / folder)


def step(caller, callee):
    """What is wrong with a call, if anything."""
    if " in " not in callee:
        (name, a), b = caller.split("/", 1), callee
        return [] if (f"{a}.rs", f"{b}.rs") in crate(f"crates/{name}").arrows else ["no arrow"]
    path, to = callee.split(" in ")
    kind, method = path.split("::")
    (name, a), (other, b) = caller.split("/", 1), to.split("/", 1)
    text = crate(f"crates/{other}").text.get(f"{b}.rs", "")
    impls = (m for m in IMPL.finditer(text) if re.search(rf"\b{kind}\b", m[1]))
    has = any(re.search(rf"\bfn {method}\b", text[m.start() : end(text, m.end() - 1)]) for m in impls)
    calls = re.search(rf"\.{method}\(", crate(f"crates/{name}").text.get(f"{a}.rs", ""))
    return (["the file does not have it"] if not has else []) + (["no call"] if not calls else [])


def listed():
    """The list of ARCHITECTURE.md."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    found = re.search(r"```text\n(leasehold/kernel/launch: .*?)```", page, re.DOTALL)
    return found[1].splitlines() if found else []


def crates():
    """The crates whose files are on the list."""
    return set(re.findall(r"\b(\w+)/", " ".join(listed())))


def main():
    if not listed():
        return "ARCHITECTURE.md has no list that begins with leasehold/kernel/launch"
    passed, wrong = [], []
    for line in listed():
        caller, callees = line.split(": ")
        name = caller.split("/")[0]
        if passed and caller not in passed:
            wrong.append(f"{caller}: no file above leads to it")
        for callee in callees.split(", "):
            wrong += [f"{caller} -> {callee}: {why}" for why in step(caller, callee)]
            to = callee.split(" in ")[1] if " in " in callee else f"{name}/{callee}"
            passed += [file for file in (caller, to) if file not in passed]
    if len(passed) > MOST:
        wrong.append(f"{len(passed)} files are passed; the most is {MOST}")
    return "\n".join(wrong)


if __name__ == "__main__":
    sys.exit(main() or 0)
