#!/bin/sh
# Licences, sources and versions of all dependencies, by the lists of deny.toml: ci/deny.py compares
# the lists with `cargo metadata`. It needs cargo and Python alone. The workflow `compatibility`
# gives the same file to cargo-deny (ci/compatibility.sh).
set -eu
cd "$(dirname "$0")/.."
python=python3
# The reader of TOML is part of Python from 3.11 on.
if ! "$python" -c 'import tomllib' 2>/dev/null; then
    tools="${CARGO_TARGET_DIR:-target}/deny"
    [ -x "$tools/bin/python" ] || { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet --disable-pip-version-check tomli; }
    python="$tools/bin/python"
fi
cargo metadata --format-version 1 --locked --all-features | "$python" ci/deny.py deny.toml
