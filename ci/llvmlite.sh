#!/bin/sh
# Prints the path of a Python that can import llvmlite, made in the target folder when it is not
# there yet.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
venv="$target/llvmlite"
if ! "$venv/bin/python" -c 'import llvmlite' 2>/dev/null; then
    python3 -m venv "$venv" >&2
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'llvmlite>=0.44' >&2
fi
# Not resolved: a virtual environment's interpreter finds its packages by the link's own path.
realpath -s "$venv/bin/python"
