"""Compares packages with the lists of deny.toml: licences, sources, several versions, wildcards.

usage: cargo metadata --format-version 1 --all-features | deny.py deny.toml
"""

import json
import re
import sys
from collections import defaultdict

try:
    import tomllib
except ImportError:
    import tomli as tomllib


def satisfied(expression: str, allowed: set[str]) -> bool:
    """Whether the licence expression can be satisfied with the allowed licences."""
    words = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def either() -> bool:
        value = both()
        while words[:1] == ["OR"]:
            words.pop(0)
            other = both()
            value = value or other
        return value

    def both() -> bool:
        value = one()
        while words[:1] == ["AND"]:
            words.pop(0)
            other = one()
            value = value and other
        return value

    def one() -> bool:
        word = words.pop(0)
        if word == "(":
            value = either()
            if words.pop(0) != ")":
                raise ValueError(expression)
            return value
        if words[:1] == ["WITH"]:
            words.pop(0)
            word = f"{word} WITH {words.pop(0)}"
        return word in allowed

    value = either()
    if words:
        raise ValueError(expression)
    return value


def problems(metadata: dict, rules: dict) -> list[str]:
    """A line for each package that the lists refuse, and for each entry that nothing needs."""
    found = []
    allowed = set(rules["licenses"]["allow"])
    registries = {f"registry+{url}" for url in rules["sources"]["allow-registry"]}
    banned = {entry["crate"] for entry in rules["bans"]["deny"]}
    skipped = {entry["crate"] for entry in rules["bans"]["skip"]}
    versions = defaultdict(set)
    for package in metadata["packages"]:
        name, version = package["name"], package["version"]
        what = f"{name}@{version}"
        versions[name].add(version)
        licence = package["license"]
        try:
            if licence is None or not satisfied(licence, allowed):
                found.append(f"{what}: the licence {licence} is not allowed")
        except (ValueError, IndexError):
            found.append(f"{what}: the licence {licence} is no expression")
        if package["source"] is not None and package["source"] not in registries:
            found.append(f"{what}: comes from {package['source']}")
        if name in banned:
            found.append(f"{what}: is banned")
        if package["source"] is None:
            for needed in package["dependencies"]:
                alone = needed["req"] == "*" and (not needed.get("path") or needed["kind"] != "dev")
                if alone and package["publish"] != []:
                    found.append(f"{what}: {needed['name']} has no version")
    for name, several in sorted(versions.items()):
        left = {version for version in several if f"{name}@{version}" not in skipped}
        if len(left) > 1:
            found.append(f"{name}: several versions: {', '.join(sorted(left))}")
    there = {f"{name}@{version}" for name, all_of in versions.items() for version in all_of}
    found.extend(f"{entry}: skipped by deny.toml, and not there" for entry in sorted(skipped - there))
    return found


def self_test() -> None:
    """The expressions of licences that matter."""
    allowed = {"MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"}
    for expression, expected in [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("MIT/Apache-2.0", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("(GPL-3.0-only OR MIT) AND Zlib", True),
        ("(GPL-3.0-only OR MIT) AND ISC", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache-2.0", False),
        ("GPL-3.0-only OR MIT AND ISC", False),
    ]:
        if satisfied(expression, allowed) is not expected:
            sys.exit(f"deny.py is wrong about {expression}")


def main() -> None:
    """Prints the problems; the exit status is 1 if there are any."""
    self_test()
    with open(sys.argv[1], "rb") as file:
        rules = tomllib.load(file)
    metadata = json.load(sys.stdin)
    found = problems(metadata, rules)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"deny: {len(metadata['packages'])} packages: licences, sources and versions are as deny.toml says")


main()
