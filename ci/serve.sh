#!/bin/sh
# The server of models/serve, on the CPU with the bundled model, and OpenAI's client in a virtual
# environment: texts, streams, chats, errors, clients that go, a full queue, weights that sleep, the
# end. Its Rust tests are among those of ci/test.sh.
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
# With the features and the profile of ci/test.sh, so that they share one build.
cargo test --quiet --locked --workspace --test serve_command --no-run
environment="$target/serve"
printf '%s\n' 'openai>=2,<3' >"$target/serve-needed"
if ! cmp -s "$target/serve-needed" "$environment/needed"; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install -r "$target/serve-needed"
    cp "$target/serve-needed" "$environment/needed"
fi
"$environment/bin/python" models/serve/test_openai.py "$target/debug/leasehold-serve" models/llama/demo-model
