#!/usr/bin/env python3
"""The rules of the tree that no tool knows, by reading it alone: nothing is built.

    ci/rules.py    prints each rule that is broken, with the places, and ends with 1 if there is one

A rule is a function of this file with a name in `RULES`. It gives the places that break it. Each
file is read once. The floors and the list of a launch's files stand in ARCHITECTURE.md.
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

sys.dont_write_bytecode = True
import call_circles  # noqa: E402
import launch_path  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

# Folders of packages, for every rule: the runtime, its neighbours and their instruments.
RUNTIME = ("crates",)
NEIGHBOURS = ("models", "tl")
PRODUCT = RUNTIME + NEIGHBOURS
INSTRUMENTS = ("testing",)
HOUSES = PRODUCT + INSTRUMENTS
RUST = HOUSES + ("examples", "python")

# Circles of files, by imports and calls of methods, and files in them. A bound may only
# fall. (A table of children in a `mod.rs` counts too, and does no harm.)
CIRCLES = {
    **{"crates/core": "1:2", "crates/hal": "1:5", "crates/cpu": "1:2", "crates/cuda": "1:7"},
    **{"crates/mps": "1:4", "crates/leasehold": "1:2", "models/operators": "1:4"},
    **{"models/serve": "1:5", "testing/conformance": "1:4", "testing/sim": "7:34", "testing/stress": "2:6"},
}

# The house's bounds. What needs more takes as much away elsewhere, or raises one by a commit of
# its own that says why. A line is one of the file, comments and tests included.
SIZES = {
    "packages": 24,
    "floors": 9,
    "lines of Rust in crates/*/src": 87_330,
    "lines of Rust": 259_790,
    "lines of Rust in clients": 2_600,
    "public methods of leasehold": 249,
    "files of alloc with methods of Inner": 10,
    "lines of ARCHITECTURE.md": 180,
    "lines of a function of crates/*/src, models/*/src": 100,
}

HOSTS = re.compile(
    r"(www\.w3\.org|github\.com|(doc|www)\.rust-lang\.org|docs\.rs|crates\.io|(www\.)?apache\.org"
    r"|docs\.nvidia\.com|developer\.apple\.com|opensource\.org|keepachangelog\.com|semver\.org"
    r"|arxiv\.org|(www\.)?kernel\.org|docs\.kernel\.org|en\.wikipedia\.org|llvm\.org|huggingface\.co"
    r"|json-schema\.org|git-lfs\.github\.com|dmlc\.github\.io)"
)

# Words that one project alone would understand.
OWN_WORDS = re.compile(
    r"\b(annex(es)?|yards?|estates?|quarrels?|loot|homeward|see_off|ladder|climbs?|scrape|pockets?"
    r"|bury|buried|graves?|relend|renew|dress|witness|invite|rush|tend|recall|birth|seats?"
    r"|landings?|doors?|breathe?)\b",
    re.IGNORECASE,
)

CONFIGURATIONS = (
    "AllocatorConfig|DebugOptions|PoolConfig|CpuConfig|CudaConfig|SimDriverConfig|MachineConfig"
    "|PoolLimits|Config|Filter|StreamDesc"
)


@cache
def files():
    """Files of the tree, committed or new, but not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return sorted({name for name in listed if name and (ROOT / name).is_file()})


@cache
def text(name):
    """A file's text; none of a file that is not text."""
    content = (ROOT / name).read_bytes()
    return "" if b"\0" in content[:8000] else content.decode(errors="replace")


def select(*ends, under=(), without=()):
    """Files with one of these ends, in one of these folders, and in none of those."""
    return [
        name
        for name in files()
        if name.endswith(ends or "")
        and (not under or name.startswith(tuple(f"{folder}/" for folder in under)))
        and not any(part in name for part in without)
    ]


def lines(names, pattern, group=0):
    """Lines of files where a pattern is found: the place, the line and the match."""
    for name in names:
        content, seen = text(name), 0
        for match in pattern.finditer(content):
            begin = content.rfind("\n", 0, match.start(group)) + 1
            if begin >= seen:
                seen = content.find("\n", match.end(group)) + 1 or len(content) + 1
                number = content.count("\n", 0, begin) + 1
                yield f"{name}:{number}", content[begin : seen - 1], match


@cache
def workspace():
    """Packages of the workspace: their folder, and their manifest as cargo reads it."""
    read = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {
        str(Path(package["manifest_path"]).parent.relative_to(ROOT)): package
        for package in json.loads(read)["packages"]
    }


def packages():
    """The packages in the houses."""
    return {folder: package for folder, package in workspace().items() if folder.split("/")[0] in HOUSES}


def atomics():
    # Atomics come from `leasehold_core::sync`, so that loom can take their place. `input` stands
    # beside `core`, and has counters alone.
    pattern = re.compile(
        r"std::sync::(?:atomic|\{[^}\n]*atomic)|core::sync::(?:atomic|\{[^}\n]*atomic)"
        r"|parking_lot(?<![a-z_]parking_lot)::|loom(?<![a-z_]loom)::"
    )
    fine = re.compile(
        r"leasehold_core::sync|leasehold::backend::sync|crate::core::sync|loom::model"
    )
    for place, line, _ in lines(select(".rs", under=RUST), pattern):
        own = place.startswith(("crates/core/src/sync.rs:", "crates/input/"))
        if not own and not fine.search(line):
            yield f"{place}: {line.strip()}"


def rust_opens():
    for name in select(".rs", under=RUST, without=("/compile_fail/",)):
        if not text(name).startswith(("//!", "#![", "// @generated")):
            yield name


def python_opens():
    for name in select(".py", ".pyi", under=("python",)):
        if not re.match(r'r?"""', text(name)):
            yield name


def plain(markdown):
    words = re.sub(r"\]\([^)]*\)", "", " ".join(markdown.split()))
    return re.sub(r"[\[\]`]", "", words).strip()


def readmes():
    # What a crate is: the first paragraph of its README.md, which is also the head of its lib.rs.
    link = "[Leasehold](https://github.com/leasehold/leasehold#readme)"
    for folder in packages():
        page, root = f"{folder}/README.md", f"{folder}/src/lib.rs"
        if page not in files():
            continue
        if root not in files():
            root = f"{folder}/src/main.rs"
        if link not in text(page):
            yield f"{page} does not name the project's README"
        says = text(page).split("\n", 1)[1].strip().split("\n\n")[0]
        head = re.match(r"(//! ?\S.*\n)*", text(root))[0]
        if plain(says) != plain(re.sub(r"^//! ?", "", head, flags=re.M)):
            yield f"{page}: other words than {root}"


def width():
    # rustfmt keeps code within the same width.
    for names, mark in ((select(".rs"), "//"), ([*select(under=("ci",)), ".ci/run"], "#")):
        for place, line, _ in lines(names, re.compile(rf"^(?=.{{80}})[ \t]*{mark}.*$", re.M)):
            if len(line.encode()) > 100:
                yield place


def machine_paths():
    # Models keep the paths that others wrote into them.
    pattern = re.compile(r"/(?<![\w.]/)(?:work|tmp|home|root|Users)/")
    without = (".lock", "llama/demo-model", "llama/tests/models", "ci/rules.py")
    for place, line, _ in lines(select(without=without), pattern):
        yield f"{place}: {line.strip()[:160]}"


def registry():
    pattern = re.compile(
        r'^source = (?!"registry\+https://github\.com/rust-lang/crates\.io-index").*', re.M
    )
    for place, line, _ in lines(select(".lock"), pattern):
        yield f"{place}: {line}"


def links():
    without = (".lock", "llama/demo-model/", "llama/tests/models", "ci/rules.py")
    pattern = re.compile(r"https?://([A-Za-z0-9._:-]+)")
    for name in select(without=without):
        for match in pattern.finditer(text(name)):
            if not HOSTS.fullmatch(match[1]):
                yield f"{name}: {match[0]}"


def floor_table():
    table = {}
    for floor, crates in re.findall(r"^\| *(\d+) *\|([^|]*)\|", text("ARCHITECTURE.md"), re.M):
        for crate in re.findall(r"`([a-z-]+)`", crates):
            table[crate] = int(floor)
    return table


# What a neighbour may use of the runtime.
FACES = {
    "models": {"leasehold", "leasehold-collective", "leasehold-input", "leasehold-report"},
    "tl": {"leasehold-core"},
}


def floors():
    # Development dependencies may also name any crate of testing/. What a feature or a test of an
    # instrument needs of the runtime stands at any height: a simulated driver is above the
    # backend that it serves, and other simulated devices are below that backend's users.
    table = floor_table()
    folder_of = {package["name"]: folder for folder, package in packages().items()}
    for crate in sorted(table.keys() - {folder.split("/")[-1] for folder in packages()}):
        yield f"{crate} is on a floor of ARCHITECTURE.md and nowhere else"
    for folder, package in packages().items():
        house, crate = folder.split("/")[0], folder.split("/")[-1]
        own = table.get(crate)
        if own is None:
            yield f"{crate} is on no floor of ARCHITECTURE.md"
            continue
        used = {(d["name"], d["kind"] == "dev", d["optional"]) for d in package["dependencies"]}
        for name, dev, optional in sorted(used):
            if name not in folder_of or name == package["name"]:
                continue
            other_house, other = folder_of[name].split("/")[0], folder_of[name].split("/")[-1]
            if other_house in INSTRUMENTS and dev:
                continue
            if house in INSTRUMENTS and other_house in RUNTIME and (dev or optional):
                continue
            floor = table.get(other)
            if floor is None or floor >= own:
                kind = "dev" if dev else "normal,build"
                yield f"{crate} (floor {own}) uses {other} (floor {floor}; {kind})"


def neighbours():
    # The runtime needs no neighbour. A neighbour uses the runtime's faces alone. Neither needs an
    # instrument, but where a feature of the operators switches it on. Nothing needs the workbench.
    folder_of = {package["name"]: folder for folder, package in packages().items()}
    for folder, package in packages().items():
        house, crate = folder.split("/")[0], folder.split("/")[-1]
        for dependency in package["dependencies"]:
            name = dependency["name"]
            other_house, _, other = folder_of.get(name, house).partition("/")
            if other == "workbench":
                yield f"{folder} needs {name}"
            tests = other and other_house in INSTRUMENTS and dependency["kind"] == "dev"
            if tests and dependency["req"] != "*":
                # No registry resolves the circle of a crate and what tests it.
                yield f"{folder} has a version of {name}; a development dependency has its path alone"
            if house in INSTRUMENTS or dependency["kind"] == "dev":
                continue
            optional = (crate, other) in {("operators", "sim"), ("operators", "emulator")}
            face = other_house in RUNTIME and name in FACES.get(house, ())
            if other_house != house and not face and not optional:
                yield f"{folder} needs {name} ({other_house}/)"


# Who names the engine beside its own files: its tests, backends, and the glossary, whose paths are
# compiled.
ENGINE = ("crates/hal/src/engine", "crates/cpu", "crates/cuda", "crates/mps", "testing/sim")
ENGINE += ("testing/workbench/tests/glossary", "crates/hal/tests/unit/engine")


def engine():
    # What is above a backend uses the traits of `hal`, and the traits do not know the engine. A
    # name may stand in an import's braces, and a `use` of `hal` by another name hides it.
    others = [name for name in select(".rs", under=RUST) if not name.startswith(tuple(f"{folder}/" for folder in ENGINE))]
    hal = [name for name in others if name.startswith("crates/hal/")]
    above = re.compile(r"hal::(?:\{[^;]*?\b)?engine\b|leasehold_hal(?<!\wleasehold_hal) as\b")
    inside = re.compile(r"\b(?:crate|self|super)::(?:\{[^;]*?\b)?engine\b|\bengine::")
    for place, line, _ in [*lines(others, above), *lines(hal, inside)]:
        yield f"{place}: {line.strip()}"


def toy():
    # It shows that an outsider can write a backend: it names what an outsider has, and no backend.
    under = "testing/conformance/examples/toy"
    for place, line, match in lines(select(".rs", under=(under,)), re.compile(r"\bleasehold\w*\b(?=::| as )")):
        if match[0] not in ("leasehold", "leasehold_hal", "leasehold_conformance"):
            yield f"{place}: {line.strip()}"
    if not select(".rs", under=(under,)):
        yield f"{under} has no files"


def circles(folder):
    if not any(name.startswith(f"{folder}/src/") for name in files()):
        yield f"{folder} has no files"
    found = launch_path.crate(folder).circles()
    count, inside = len(found), sum(map(len, found))
    allowed, _, most = CIRCLES.get(folder, "0:0").partition(":")
    if count > int(allowed) or inside > int(most):
        yield f"{folder}={count}:{inside}; MORE than {allowed}:{most} (ci/call_circles.py {folder})"
    elif count < int(allowed) or inside < int(most):
        yield f"{folder}={count}:{inside}: lower the bound {allowed}:{most}"


def launch():
    wrong = launch_path.main()
    return [wrong] if wrong else []


def unsafe_named():
    # Public ways into unsafe code stand in docs/unsafe.md, under their crate's heading.
    page = text("docs/unsafe.md")
    sections = [(part.split("\n")[0], part) for part in re.split(r"^## ", page, flags=re.M)]
    pattern = re.compile(r"^ *pub (?:const )?unsafe (?:fn|trait) (\w+)", re.M)
    for folder in packages():
        crate = folder.split("/")[-1]
        own = "".join(part for title, part in sections if crate in title.split(", "))
        found = {
            match[1]
            # The kernels' own functions are in nobody's reach.
            for name in select(".rs", under=(f"{folder}/src",), without=("operators/src/kernels",))
            for match in pattern.finditer(text(name))
        }
        for name in sorted(found):
            if not re.search(rf"[`:.]{name}[`<(]", own):
                yield f"{folder}: {name}"


def defaults():
    # A field's own documentation says its default.
    head = re.compile(rf"^pub struct ({CONFIGURATIONS}) \{{\n(.*?)^\}}", re.M | re.S)
    field = re.compile(r"((?:^ *(?:///|#).*\n)*)^    pub ((?:r#)?\w+)", re.M)
    for folder in packages():
        for name in select(".rs", under=(f"{folder}/src",), without=("models/llama",)):
            for struct in head.finditer(text(name)):
                for doc, what in field.findall(struct[2]):
                    if "default" not in doc.lower():
                        yield f"{name}: {what}"


def runtime_methods():
    # Memory is made by `Runtime`, and moved and filled by `Stream`. What comes later goes on
    # `Context`, `Stream` or a value. The four recording names of document 002 do not count.
    names = [
        method
        for name in select(".rs", under=("crates/leasehold/src",))
        for body in re.findall(r"^impl Runtime \{\n(.*?)^\}", text(name), re.M | re.S)
        for method in re.findall(r"^    pub (?:const )?(?:unsafe )?fn (\w+)", body, re.M)
        if not re.fullmatch(r"(start|stop)_graph_recording|is_graph_recording|add_graph_operator", method)
    ]
    if not 20 <= len(names) <= 35:
        yield f"{len(names)}: {' '.join(names)}"


FUNCTION = re.compile(r"^( *)(?:pub(?:\([^)]*\))? )?(?:const )?(?:unsafe )?(?:extern \S+ )?fn \w+[^;{]*(?:\{$|where\b[^{]*\{$)(.*?)^\1\}", re.M | re.S)


def longest_function(names):
    # Empty lines and comments are not counted, as clippy does.
    bodies = (match[2] for name in names for match in FUNCTION.finditer(text(name)))
    return max(sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in body.split("\n")) for body in bodies)


def sizes():
    rust = select(".rs")
    # What is written for packages of others has a bound of its own.
    clients = [name for name in rust if name.startswith("clients/")]
    rust = [name for name in rust if name not in clients]
    in_crates = [name for name in rust if re.match(r"crates/.+/src/", name)]
    public = re.compile(r"^\s+pub (?:const )?(?:unsafe )?(?:async )?fn ", re.M)
    inner = re.compile(r"impl(?:<[^>]*>)? Inner\b")
    found = {
        "packages": len(workspace()),
        "floors": len(set(floor_table().values())),
        "lines of Rust in crates/*/src": sum(text(name).count("\n") for name in in_crates),
        "lines of Rust": sum(text(name).count("\n") for name in rust),
        "lines of Rust in clients": sum(text(name).count("\n") for name in clients),
        "public methods of leasehold": sum(
            len(public.findall(text(name))) for name in in_crates if name.startswith("crates/leasehold/")
        ),
        "files of alloc with methods of Inner": sum(
            bool(inner.search(text(name))) for name in in_crates if name.startswith("crates/alloc/")
        ),
        "lines of ARCHITECTURE.md": text("ARCHITECTURE.md").count("\n"),
        "lines of a function of crates/*/src, models/*/src": longest_function(
            name for name in rust if re.match(r"(crates|models)/.+/src/", name) and "tests" not in name
        ),
    }
    for what, most in SIZES.items():
        if not 0 < found[what] <= most:
            yield f"{found[what]} {what}; at most {most}"


def own_words():
    # Decision pages and the changelog tell what they were.
    folders = HOUSES + ("ci", ".ci", "bench", "docs", "examples", "python")
    without = ("docs/decisions", "bench/runs", ".json", ".ptx", ".xz", ".lock", "ci/rules.py")
    names = [*select(under=folders, without=without), "README.md", "ARCHITECTURE.md"]
    # Most files have none of these words: their sets of words tell faster than a search.
    between = {code: " " for code in range(128) if not (chr(code).isalpha() or chr(code) == "_")}
    words = {name: set(text(name).lower().translate(between).split()) for name in names}
    own = {word for word in set().union(*words.values()) if OWN_WORDS.fullmatch(word)}
    for place, line, _ in lines([name for name in names if words[name] & own], OWN_WORDS):
        yield f"{place}: {line.strip()[:160]}"


# The longest first.
RULES = {
    "ARCHITECTURE.md's list of the files that a launch passes is true": launch,
    "the field's words": own_words,
    "atomics, locks and loom only through leasehold_core::sync": atomics,
    "every source file opens with what it is": rust_opens,
    "a crate's README.md opens as its lib.rs does, and leads to the project's": readmes,
    "every Python file of the package opens with what it is": python_opens,
    "no comment line above 100 columns (bytes)": width,
    "no path of somebody's machine": machine_paths,
    "packages from crates.io only": registry,
    "links to known public hosts only (the list is in ci/rules.py)": links,
    "imports run downwards": floors,
    "neighbours use the runtime by its faces": neighbours,
    "backends alone name the engine, and the rest of hal does not": engine,
    "the toy backend names what an outsider has": toy,
    "public unsafe functions and traits are named in docs/unsafe.md": unsafe_named,
    "fields of configurations say their default": defaults,
    "Runtime has at most 35 methods": runtime_methods,
    "the house keeps its size": sizes,
}


def broken(title, folders=()):
    """A rule's title and the places that break it, and those of circles in crates that it reads too."""
    found = [(title, list(RULES[title]()))] if title else []
    return found + [("no more circles of files", list(circles(folder))) for folder in folders]


def main():
    # The rule of a launch reads these crates as the rule of circles does.
    read = {f"crates/{name}" for name in launch_path.crates()}
    # Forked processes share what was read before them.
    for name in files():
        text(name)
    for path in call_circles.sources(ROOT):
        call_circles.functions(path)
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        tasks = [
            pool.submit(broken, title, [folder for folder in packages() if folder in read] if rule is launch else ())
            for title, rule in RULES.items()
        ]
        tasks += [pool.submit(broken, None, [folder]) for folder in packages() if folder not in read]
        found = [one for task in tasks for one in task.result()]
    for title, places in found:
        if places:
            print(f"rule: {title}", *places, sep="\n", file=sys.stderr)
    return any(places for _, places in found)


if __name__ == "__main__":
    sys.exit(main())
