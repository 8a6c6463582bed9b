"""Compares the workspace's packages with what a registry asks for, and prints their names.

usage: cargo metadata --format-version 1 --no-deps | packages.py VERSION
"""

import json
import sys
from pathlib import Path

WANTED = ("description", "license", "repository", "readme", "keywords", "categories", "documentation", "rust_version")


def main() -> None:
    """Prints the names of what is published; the exit status is 1 if something is missing."""
    version = sys.argv[1]
    packages = json.load(sys.stdin)["packages"]
    published = {package["name"] for package in packages if package["publish"] is None}
    found = []
    for package in packages:
        name = package["name"]
        if package["version"] != version:
            found.append(f"{name}: version {package['version']}, and the workspace has {version}")
        if name not in published:
            continue
        folder = Path(package["manifest_path"]).parent
        found.extend(f"{name}: no {field}" for field in WANTED if not package[field])
        found.extend(f"{name}: no {file}" for file in ("LICENSE-MIT", "LICENSE-APACHE") if not (folder / file).is_file())
        if len(package["keywords"]) > 5 or len(package["categories"]) > 5:
            found.append(f"{name}: more than five keywords or categories")
        for needed in package["dependencies"]:
            if not needed.get("path") or needed["kind"] == "dev":
                continue
            if needed["name"] not in published:
                found.append(f"{name}: needs {needed['name']}, which is not published")
            if needed["req"] != f"^{version}":
                found.append(f"{name}: needs {needed['name']} {needed['req']}, and the workspace has {version}")
    for line in found:
        print(line, file=sys.stderr)
    if found:
        sys.exit(1)
    print("\n".join(sorted(published)))


main()
