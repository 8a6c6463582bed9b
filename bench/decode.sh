#!/usr/bin/env bash
# Greedy decoding, Leasehold beside candle: the same model, prompt, tokens and threads, run in turns; medians of the pairs.
# Needs bash, awk and cargo. See README.md for what is measured and for the form of the lines.
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")

usage() {
    cat <<'TEXT'
usage: bench/decode.sh [--model DIR] [--f32-model DIR] [--prompt-ids 1,2,3] [--tokens N] [--threads "1 2"] [--pairs N]
                       [--out FILE]

  --model DIR        the model, weights as stored            (default: crates/tiny-python/model)
  --f32-model DIR    the same weights in f32: a second series (see `generate_model from=`)
  --prompt-ids LIST  (default: 316,221)
  --tokens N         new tokens in each run                   (default: 64)
  --threads LIST     one series for each                      (default: "1 2")
  --pairs N          runs of each side in a series            (default: 11)
  --out FILE         where the JSON lines go                  (default: standard output)

Environment: LEASEHOLD, CANDLE and MEMORY name the binaries; those that it does not name are built.
TEXT
}

model=$root/crates/tiny-python/model f32_model='' prompt=316,221 tokens=64 threads='1 2' pairs=11 out=/dev/stdout
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --model | --f32-model | --prompt-ids | --tokens | --threads | --pairs | --out)
            [ $# -ge 2 ] || { echo "decode.sh: $1 needs a value" >&2; exit 2; } ;;&
        --model) model=$2 ;;
        --f32-model) f32_model=$2 ;;
        --prompt-ids) prompt=$2 ;;
        --tokens) tokens=$2 ;;
        --threads) threads=$2 ;;
        --pairs) pairs=$2 ;;
        --out) out=$2 ;;
        *) echo "decode.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
    shift 2
done
for number in "$tokens" "$pairs" $threads; do
    case $number in '' | *[!0-9]* | 0*) echo "decode.sh: $number is no positive number" >&2; exit 2 ;; esac
done

build() { # MANIFEST PACKAGE-DIR: builds it, into its own target directory
    cargo build --quiet --release --manifest-path "$1" --target-dir "$2/target" >&2
}
if [ -z "${LEASEHOLD:-}" ]; then
    build "$root/Cargo.toml" "$root"
    LEASEHOLD=$root/target/release/leasehold
fi
if [ -z "${CANDLE:-}" ]; then
    build "$here/peers/candle/Cargo.toml" "$here/peers/candle"
    CANDLE=$here/peers/candle/target/release/leasehold-peer-candle
fi
if [ -z "${MEMORY:-}" ]; then
    build "$here/peers/memory/Cargo.toml" "$here/peers/memory"
    MEMORY=$here/peers/memory/target/release/leasehold-peer-memory
fi

flat() { awk -f "$here/json.awk"; }
field() { awk -F'\t' -v path="$1" '$1 == path { print $2; found = 1 } END { exit !found }' <<<"$2"; }
ids() { awk -F'\t' '$1 ~ /^output_ids\[/ { print $2 }' <<<"$1"; }
median() { sort -g | awk '{ a[NR] = $1 } END { print NR % 2 ? a[(NR + 1) / 2] : (a[NR / 2] + a[NR / 2 + 1]) / 2 }'; }
line() { printf '%s\n' "$1" >>"$out"; }
weight_bytes() { cat "$1"/*.safetensors | wc -c | tr -d ' '; }

one_line() { tr -d '\r' | tr '\n' ' ' | sed 's/[[:space:]]*$//'; }

ours() { # MODEL THREADS
    "$LEASEHOLD" run --json --model "$1" --prompt-ids "$prompt" --tokens "$tokens" --threads "$2" --mode both | one_line
}
candle() { # MODEL THREADS
    RAYON_NUM_THREADS=$2 "$CANDLE" --model "$1" --prompt-ids "$prompt" --tokens "$tokens" | one_line
}

series() { # NAME MODEL THREADS ROOF
    local name=$1 dir=$2 t=$3 roof=$4 pair order ours_json candle_json flat_ours flat_candle e g c bytes
    local -a eager=() graph=() peer=() eager_ratio=() graph_ratio=()
    for ((pair = 1; pair <= pairs; pair++)); do
        # In turns, and each side first in every other pair.
        if ((pair % 2)); then order='ours candle'; else order='candle ours'; fi
        for side in $order; do
            if [ "$side" = ours ]; then ours_json=$(ours "$dir" "$t"); else candle_json=$(candle "$dir" "$t"); fi
        done
        line "{\"series\":\"$name\",\"pair\":$pair,\"side\":\"leasehold\",\"threads\":$t,\"run\":$ours_json}"
        line "{\"series\":\"$name\",\"pair\":$pair,\"side\":\"candle\",\"threads\":$t,\"run\":$candle_json}"
        flat_ours=$(flat <<<"$ours_json")
        flat_candle=$(flat <<<"$candle_json")
        if [ "$(ids "$flat_ours")" != "$(ids "$flat_candle")" ]; then
            echo "decode.sh: $name, $t threads: the two sides chose different tokens" >&2
            return 1
        fi
        e=$(field modes.eager.decode_tokens_per_s "$flat_ours")
        g=$(field modes.graph.decode_tokens_per_s "$flat_ours")
        c=$(field decode_tokens_per_s "$flat_candle")
        eager+=("$e") graph+=("$g") peer+=("$c")
        eager_ratio+=("$(awk "BEGIN { print $e / $c }")") graph_ratio+=("$(awk "BEGIN { print $g / $c }")")
    done
    e=$(printf '%s\n' "${eager[@]}" | median)
    g=$(printf '%s\n' "${graph[@]}" | median)
    c=$(printf '%s\n' "${peer[@]}" | median)
    bytes=$(weight_bytes "$dir")
    line "$(printf '{"series":"%s","summary":true,"threads":%s,"tokens":%s,"pairs":%s,"weight_bytes":%s,' \
        "$name" "$t" "$tokens" "$pairs" "$bytes")$(printf \
        '"eager_tokens_per_s":%s,"graph_tokens_per_s":%s,"candle_tokens_per_s":%s,"eager_over_candle":%s,"graph_over_candle":%s,' \
        "$e" "$g" "$c" "$(printf '%s\n' "${eager_ratio[@]}" | median)" "$(printf '%s\n' "${graph_ratio[@]}" | median)")$(awk \
        -v bytes="$bytes" -v e="$e" -v g="$g" -v roof="$roof" \
        'BEGIN { printf "\"eager_gb_per_s\":%.2f,\"graph_gb_per_s\":%.2f,\"memory\":%s}", bytes * e / 1e9, bytes * g / 1e9, roof }')"
}

[ "$out" = /dev/stdout ] || : >"$out"
cpu=$(awk -F': ' '/^model name/ { print $2; exit }' /proc/cpuinfo 2>/dev/null || uname -m)
line "{\"host\":true,\"cpu\":\"$cpu\",\"cores\":$(getconf _NPROCESSORS_ONLN),\"date\":\"$(date -u +%Y-%m-%dT%H:%MZ)\",\"model\":\"$(basename "$model")\"}"
for t in $threads; do
    roof=$("$MEMORY" --threads "$t")
    series stored "$model" "$t" "$roof"
    if [ -n "$f32_model" ]; then series f32 "$f32_model" "$t" "$roof"; fi
done
