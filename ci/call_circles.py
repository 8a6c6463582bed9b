#!/usr/bin/env python3
"""Finds circles among the files of a Rust crate: sets of files each of which leads to every other.

An arrow `a -> b` says that file `a` names an item of `b`, by `use` or by its path, or calls an
inherent method that `b` defines. A method of a type needs no import where the type is at hand, so
the chapters of one `impl` may form a circle that no `use` shows. Files without a circle can be read
one after the other, each once those are read that it leads to.

    ci/call_circles.py crates/alloc                    prints the circles and their arrows
    ci/call_circles.py crates/alloc=0 crates/cuda=5:31
                                                       fails above so many circles[: files in them]

A method call is an arrow if the type of its receiver is known: `self`, `Type::f`, a parameter or a
field with a type. If the type is not known, the call is an arrow, marked with `?`, where the
workspace has one function of that name. Calls of traits' methods are no arrows, and neither are
tests. A re-exported item is the item of the file that has it. The script reads text and no types,
so it misses calls on the results of calls.
"""

import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

# Methods of the standard library that the workspace defines too.
STANDARD = {
    *("as_mut", "as_ptr", "as_ref", "as_slice", "as_str", "for_each", "from_utf8", "get_mut"),
    *("is_err", "is_none", "is_ok", "is_some", "push_back", "try_lock"),
}
# Each alternative begins with a letter; what must not stand before it is asked after it.
# Such expressions search several times as fast.
NOISE = re.compile(
    r"//[^\n]*|/\*.*?\*/"  # comments
    r'|r(?<!\wr)(#*)".*?"\1|br(?<!\wbr)(#*)".*?"\2'  # raw strings
    r'|"[^"\\]*(?:\\.[^"\\]*)*"|b"[^"\\]*(?:\\.[^"\\]*)*"'  # strings
    r"|'(?:\\[^']*|[^\\'])'|b'(?:\\[^']*|[^\\'])'",  # characters
    re.DOTALL,
)
TEST = re.compile(r"#\[cfg\((?:all\()?(?:test|loom)\b[^\]]*\]")
IMPL = re.compile(r"impl(?<!\wimpl)\b\s*(?:<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>)?\s*([^{;]*?)\{")
USE = re.compile(r"(pub(?<!\wpub)(?:\([^)]*\))?\s+)use\s+([^;]+);|use(?<!\wuse)\s+([^;]+);")
FN = re.compile(r"fn(?<!\wfn)\s+(\w+)")
TYPE_NAME = re.compile(r"[A-Z](?<!\w.)(?<!::.)\w*")
TYPE = re.compile(r"\b(?:struct|enum|union)\s+(\w+)")
STRUCT = re.compile(r"\bstruct\s+(\w+)[^{;(]*\{")
FIELD = re.compile(r"\b(\w+)\s*:(?!:)\s*((?:[^,{}<]|<(?:[^<>]|<[^<>]*>)*>)+)")
VISIBLE = re.compile(r"pub(?<!\wpub)\s*\([^)]*\)")
PATH = re.compile(r"(?<![\w:.])\w+(?:::\w+)+")
TYPED_NAME = re.compile(r"\b(\w+)\s*:\s*((?:&|dyn|mut|'\w+|\s)*[A-Z][^,)={;|]*)")
FUNCTION_OF_TYPE = re.compile(r"(?<![\w:])([A-Z]\w*)(?:::<[^()]*?>)?::(\w+)")
METHOD_CALL = re.compile(r"\.\s*(\w+)\s*(?:::<[^()]*?>)?(?=\()")
# What stands before a call's point, from its end.
RECEIVER = re.compile(r"\s*(?:(\w+)(?:\s*\.\s*(\w+))?|[)\]?}])")
BRACE = re.compile(r"[{};]")


def end(text, at):
    """The end of the block that begins after `at`, or of the item if its `;` comes first."""
    depth = 0
    for m in BRACE.finditer(text, at):
        depth += {"{": 1, "}": -1, ";": 0}[m[0]]
        if depth == 0:
            return m.end()
    return len(text)


def method_calls(text):
    """Calls of methods: the receiver's owner and the receiver if they are names, the name, the place."""
    reverse = text[::-1]
    for m in METHOD_CALL.finditer(text):
        if before := RECEIVER.match(reverse, len(text) - m.start()):
            receiver, owner = (name and name[::-1] for name in before.groups())
            yield owner, receiver, m[1], len(text) - before.end()


def clean(text):
    """The text without comments, contents of strings, tests and models."""
    text = NOISE.sub(lambda m: '""' + "\n" * m[0].count("\n"), text)
    while m := TEST.search(text):
        text = text[: m.start()] + text[end(text, m.end()) :]
    return text


def leaves(tree):
    """The paths of a `use` tree, with the name that each is known by."""
    m = re.match(r"([^{]*)\{(.*)\}$", tree, re.DOTALL)
    if not m:
        path, _, alias = tree.partition(" as ")
        names = path.strip().split("::")
        return [(names, (alias or names[-1]).strip())] if tree.strip() else []
    # Commas within inner braces do not part this tree.
    inner = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|,")
    parts = inner.sub(lambda c: c[0] if c[0] != "," else "\0", m[2]).split("\0")
    prefix = m[1].strip()
    return [leaf for part in parts if part.strip() for leaf in leaves(prefix + part.strip())]


def own_type(head):
    """The type of an `impl`'s head, and whether the impl is inherent."""
    trait, _, rest = re.sub(r"\bfor\s*<[^>]*>", "", head).partition(" for ")
    return re.split(r"[<\s]", (rest or trait).strip())[0], not rest


@cache
def functions(path):
    """The names of the functions that a file of the workspace defines."""
    return frozenset(FN.findall(path.read_text()))


@cache
def sources(root):
    """The files of all packages beside a package's folder and in the other folders of packages."""
    return [path for path in root.glob("[ct]*/*/src/**/*.rs")]


class Crate:
    """The files of a crate and the arrows between them. A type is a pair of its name and file."""

    def __init__(self, root):
        source = root / "src"
        # By (from, to): the names that make the arrow.
        self.arrows = {}
        # By (file, name): the item that a `use` gives the name, as (name, file).
        self.known = {}
        # By file: what it imports or re-exports, name to path.
        self.shown = {}
        # By type: its fields, each with the types of this crate that it names.
        self.types = {}
        # By method: the types that have it, each with the file that defines it.
        self.methods = {}
        files = [path for path in sorted(source.rglob("*.rs")) if path.stem != "tests"]
        self.text = {str(path.relative_to(source)): clean(path.read_text()) for path in files}
        self.way = {
            file: tuple(
                w for w in Path(file).with_suffix("").parts if w not in ("mod", "lib", "main")
            )
            for file in self.text
        }
        self.at = {way: file for file, way in self.way.items()}
        counts = Counter(name for text in self.text.values() for name in FN.findall(text))
        # Names that several functions of the workspace have.
        self.common = {name for name, n in counts.items() if n > 1}
        own = f"{root.resolve()}/"
        for path in sources(root.resolve().parents[1]):
            if not str(path).startswith(own):
                self.common.update(functions(path))
        for file, text in self.text.items():
            self.types.update({(m[1], file): {} for m in TYPE.finditer(text)})
            uses = [leaf for m in USE.finditer(text) if m[1] for leaf in leaves(m[2])]
            self.shown[file] = {name: path for path, name in uses}
        for step in (self.imports, self.define):
            for file, text in self.text.items():
                step(file, text)
        # By field's name: the types of this crate that fields of the name have.
        self.fields = {}
        for fields in self.types.values():
            for name, kinds in fields.items():
                if kinds:
                    self.fields.setdefault(name, set()).update(kinds)
        for file, text in self.text.items():
            self.calls(file, text)

    def arrow(self, a, b, why):
        if b and a != b:
            self.arrows.setdefault((a, b), set()).add(why)

    def find(self, file, path, depth=0):
        """The name and file of the item that a path names in a file; no file for another crate's."""
        path = list(path)
        way = [] if path[0] == "crate" else list(self.way[file])
        if path[0] not in ("crate", "self", "super") and (*way, path[0]) not in self.at:
            return "", None
        while path and path[0] in ("crate", "self", "super"):
            way = way[:-1] if path.pop(0) == "super" else way
        while path and (*way, path[0]) in self.at:
            way.append(path.pop(0))
        home, name = self.at.get(tuple(way)), path[0] if path else ""
        if home and depth < 5 and name in self.shown[home]:
            deeper = self.find(home, self.shown[home][name], depth + 1)
            if deeper[1]:
                return deeper
        return name, home

    def imports(self, file, text):
        for m in USE.finditer(text):
            for path, name in leaves(m[2] or m[3]):
                self.known[file, name] = self.find(file, path)
                if not m[1]:
                    self.arrow(file, self.known[file, name][1], "use " + name)
        for path in {m[0] for m in PATH.finditer(USE.sub("", VISIBLE.sub("", text)))}:
            self.arrow(file, self.find(file, path.split("::"))[1], path)

    def kinds(self, file, text):
        """The crate's own types that are named in a text of a file."""
        named = {
            kind
            for word in TYPE_NAME.findall(text)
            for kind in ((word, file), self.known.get((file, word)))
        }
        return named & self.types.keys()

    def define(self, file, text):
        for m in STRUCT.finditer(text):
            for field in FIELD.finditer(text[m.end() : end(text, m.start())]):
                self.types[m[1], file][field[1]] = self.kinds(file, field[2])
        for m in IMPL.finditer(text):
            name, inherent = own_type(m[1])
            for kind in self.kinds(file, name) if inherent else ():
                for method in FN.findall(text[m.start() : end(text, m.end() - 1)]):
                    self.methods.setdefault(method, {}).setdefault(kind, file)

    def calls(self, file, text):
        impls = [
            (m.start(), end(text, m.end() - 1), own_type(m[1])[0]) for m in IMPL.finditer(text)
        ]

        def self_at(at):
            names = (name for first, last, name in impls if first <= at < last)
            return next((kind for name in names for kind in self.kinds(file, name)), None)

        local = {}
        for m in TYPED_NAME.finditer(text):
            local.setdefault(m[1], set()).update(self.kinds(file, m[2]))
        for m in FUNCTION_OF_TYPE.finditer(text):
            kinds = [self_at(m.start())] if m[1] == "Self" else self.kinds(file, m[1])
            for kind in kinds:
                self.arrow(file, self.methods.get(m[2], {}).get(kind), m[0])
        for owner, receiver, name, at in method_calls(text):
            # The types that the receiver may have; `None` where nothing is known of it.
            if receiver == "self":
                of = {self_at(at)}
            elif owner == "self":
                of = self.types.get(self_at(at), {}).get(receiver)
            elif owner:
                of = self.fields.get(receiver)
            else:
                of = local.get(receiver)
            homes = self.methods.get(name, {})
            hits = {homes[kind] for kind in of or () if kind in homes}
            only = "_" in name and name not in STANDARD and name not in self.common
            if len(hits) == 1:
                self.arrow(file, *hits, name)
            elif of is None and len(homes) == 1 and only:
                self.arrow(file, *homes.values(), name + "?")

    def circles(self):
        reach = {file: {b for a, b in self.arrows if a == file} for file in self.text}
        for via in self.text:
            for file in self.text:
                reach[file] |= reach[via] if via in reach[file] else set()
        groups = {
            tuple(other for other in self.text if other in reach[file] and file in reach[other])
            for file in self.text
            if file in reach[file]
        }
        return sorted(group for group in groups if len(group) > 1)


def main():
    failed = False
    for argument in sys.argv[1:]:
        root, _, most = argument.partition("=")
        crate = Crate(Path(root))
        circles = crate.circles()
        inside = sum(map(len, circles))
        allowed, _, files = most.partition(":")
        above = most and (len(circles) > int(allowed) or inside > int(files or inside))
        below = most and (len(circles) < int(allowed) or inside < int(files or inside))
        failed |= bool(above)
        verdict = f"; MORE than {most}" if above else "; less: lower the bound" if below else ""
        print(f"{root}={len(circles)}:{inside}, of {len(crate.text)} files{verdict}")
        for circle in circles if above or not most else ():
            print("  circle:", " ".join(circle))
            for (a, b), why in sorted(crate.arrows.items()):
                if a in circle and b in circle:
                    names = ", ".join(sorted(why)[:4]) + (", …" if len(why) > 4 else "")
                    print(f"    {a} -> {b}  ({names})")
    return failed


if __name__ == "__main__":
    sys.exit(main())
