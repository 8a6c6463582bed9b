#!/bin/sh
# Spelling of everything that a person reads, by `typos` of the Python package index, one release of
# it. The project's own words are in typos.toml.
#
#   ci/typos.sh            reports
#   ci/typos.sh --write    corrects what has one correction
set -eu
cd "$(dirname "$0")/.."
release=typos==1.52.0
tools="${CARGO_TARGET_DIR:-target}/typos"
if [ "$(cat "$tools/release" 2>/dev/null)" != "$release" ]; then
    rm -rf "$tools"
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check "$release"
    echo "$release" >"$tools/release"
fi
"$tools/bin/typos" --format brief "$@"
echo "typos: none"
