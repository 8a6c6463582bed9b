#!/bin/sh
# A Python environment under the target folder, made when it is missing or lists other packages.
# Prints its folder of programs.
#
#   ci/venv.sh NAME PACKAGE…
set -eu
cd "$(dirname "$0")/.."
environment=$(realpath -m "${CARGO_TARGET_DIR:-target}")/venv/$1
shift
if [ "$(cat "$environment/packages" 2>/dev/null)" != "$*" ]; then
    rm -rf "$environment"
    "${PYTHON:-python3}" -m venv "$environment" >&2
    [ $# -eq 0 ] || "$environment/bin/pip" install --quiet --disable-pip-version-check "$@" >&2
    echo "$*" >"$environment/packages"
fi
echo "$environment/bin"
