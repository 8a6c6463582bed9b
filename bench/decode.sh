#!/usr/bin/env bash
# Greedy decoding, Leasehold beside candle and llama.cpp: the same model, prompt, tokens and threads, run in turns; medians
# of the rounds.
# Needs bash, awk and cargo. See README.md for what is measured and for the form of the lines.
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")

usage() {
    cat <<'TEXT'
usage: bench/decode.sh [--model DIR] [--f32-model DIR] [--prompt-ids 1,2,3 | --prompt N] [--tokens N] [--threads "1 2"]
                       [--pairs N] [--dtype f32|bf16] [--level LEVEL] [--peers "candle llama.cpp"] [--out FILE]

  --model DIR        the model, weights as stored            (default: models/llama/demo-model)
  --f32-model DIR    the same weights in f32: a second series (see `generate_model from=`)
  --prompt-ids LIST  (default: 316,221)
  --prompt N         the ids 5, 6, … of a prompt of N tokens
  --tokens N         new tokens in each run                   (default: 64)
  --threads LIST     one series for each                      (default: "1 2")
  --pairs N          runs of each side in a series            (default: 11)
  --dtype TYPE       Leasehold's activations, f32 or bf16     (default: f32)
  --level LEVEL      Leasehold's instructions, as x86-64-v3   (default: the best)
  --peers LIST       candle, llama.cpp or both                (default: candle)
  --out FILE         where the JSON lines go                  (default: standard output)

Environment: LEASEHOLD, CANDLE and MEMORY name the binaries; those that it does not name are built.
LLAMA_CPP names a Python with llama-cpp-python (default: python3), which the peer llama.cpp needs.
TEXT
}

model=$root/models/llama/demo-model f32_model='' prompt=316,221 tokens=64 threads='1 2' pairs=11 dtype=f32
level='' peers=candle out=/dev/stdout
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --model | --f32-model | --prompt-ids | --prompt | --tokens | --threads | --pairs | --dtype | --level | --peers | --out)
            [ $# -ge 2 ] || { echo "decode.sh: $1 needs a value" >&2; exit 2; } ;;&
        --model) model=$2 ;;
        --f32-model) f32_model=$2 ;;
        --prompt-ids) prompt=$2 ;;
        --prompt) prompt=$(seq -s, 5 $(($2 + 4))) ;;
        --tokens) tokens=$2 ;;
        --threads) threads=$2 ;;
        --pairs) pairs=$2 ;;
        --dtype) dtype=$2 ;;
        --level) level=$2 ;;
        --peers) peers=$2 ;;
        --out) out=$2 ;;
        *) echo "decode.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
    shift 2
done
for number in "$tokens" "$pairs" $threads; do
    case $number in '' | *[!0-9]* | 0*) echo "decode.sh: $number is no positive number" >&2; exit 2 ;; esac
done

for peer in $peers; do
    case $peer in candle | llama.cpp) ;; *) echo "decode.sh: no peer is called $peer; there are candle and llama.cpp" >&2; exit 2 ;; esac
done
has() { case " $peers " in *" $1 "*) ;; *) return 1 ;; esac; }
if has llama.cpp && [ -n "$f32_model" ]; then
    echo "decode.sh: the peer llama.cpp takes bf16 weights; leave --f32-model out" >&2
    exit 2
fi

build() { # MANIFEST PACKAGE-DIR: builds it, into its own target directory
    cargo build --quiet --release --manifest-path "$1" --target-dir "$2/target" >&2
}
if [ -z "${LEASEHOLD:-}" ]; then
    build "$root/Cargo.toml" "$root"
    LEASEHOLD=$root/target/release/leasehold
fi
if has candle && [ -z "${CANDLE:-}" ]; then
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
    "$LEASEHOLD" run --json --model "$1" --prompt-ids "$prompt" --tokens "$tokens" --threads "$2" --mode both \
        --dtype "$dtype" ${level:+--level "$level"} | one_line
}
candle() { # MODEL THREADS
    RAYON_NUM_THREADS=$2 "$CANDLE" --model "$1" --prompt-ids "$prompt" --tokens "$tokens" | one_line
}

llama_cpp() { # MODEL THREADS
    "${LLAMA_CPP:-python3}" "$here/peers/llama_cpp/decode.py" --model "$gguf" --prompt-ids "$prompt" --tokens "$tokens" \
        --threads "$2" | one_line
}

ratio() { awk "BEGIN { print $1 / $2 }"; }
middle() { # NAME: the median of a list
    local -n list=$1
    printf '%s\n' "${list[@]}" | median
}

series() { # NAME MODEL THREADS ROOF
    local name=$1 dir=$2 t=$3 roof=$4 pair side json flat_ours flat_peer key e g p peer bytes
    local -a order eager=() graph=() prefill=()
    read -ra order <<<"ours $peers"
    local -A runs
    for peer in $peers; do
        key=${peer//./_}
        local -a "decode_$key=()" "prefill_$key=()" "eager_over_$key=()" "graph_over_$key=()" "prefill_over_$key=()"
    done
    for ((pair = 1; pair <= pairs; pair++)); do
        # In turns, and another side first in every round.
        for side in "${order[@]}"; do
            case $side in
                ours) json=$(ours "$dir" "$t") ;;
                candle) json=$(candle "$dir" "$t") ;;
                llama.cpp) json=$(llama_cpp "$dir" "$t") ;;
            esac
            runs[$side]=$json
        done
        order=("${order[@]:1}" "${order[0]}")
        line "{\"series\":\"$name\",\"pair\":$pair,\"side\":\"leasehold\",\"threads\":$t,\"run\":${runs[ours]}}"
        flat_ours=$(flat <<<"${runs[ours]}")
        e=$(field modes.eager.decode_tokens_per_s "$flat_ours")
        g=$(field modes.graph.decode_tokens_per_s "$flat_ours")
        p=$(field modes.graph.prefill_ms "$flat_ours")
        eager+=("$e") graph+=("$g") prefill+=("$p")
        for peer in $peers; do
            key=${peer//./_}
            line "{\"series\":\"$name\",\"pair\":$pair,\"side\":\"$peer\",\"threads\":$t,\"run\":${runs[$peer]}}"
            flat_peer=$(flat <<<"${runs[$peer]}")
            if [ "$(ids "$flat_ours")" != "$(ids "$flat_peer")" ]; then
                echo "decode.sh: $name, $t threads: Leasehold and $peer chose different tokens" >&2
                return 1
            fi
            local -n decode_of=decode_$key prefill_of=prefill_$key e_over=eager_over_$key g_over=graph_over_$key p_over=prefill_over_$key
            decode_of+=("$(field decode_tokens_per_s "$flat_peer")")
            prefill_of+=("$(field prefill_ms "$flat_peer")")
            e_over+=("$(ratio "$e" "${decode_of[-1]}")")
            g_over+=("$(ratio "$g" "${decode_of[-1]}")")
            p_over+=("$(ratio "${prefill_of[-1]}" "$p")")
        done
    done
    bytes=$(weight_bytes "$dir")
    e=$(middle eager) g=$(middle graph)
    local summary
    summary=$(printf '{"series":"%s","summary":true,"threads":%s,"tokens":%s,"pairs":%s,"weight_bytes":%s,' "$name" "$t" "$tokens" "$pairs" "$bytes")
    summary+=$(printf '"eager_tokens_per_s":%s,"graph_tokens_per_s":%s,"prefill_ms":%s,' "$e" "$g" "$(middle prefill)")
    for peer in $peers; do
        key=${peer//./_}
        summary+=$(printf '"%s_tokens_per_s":%s,"eager_over_%s":%s,"graph_over_%s":%s,"%s_prefill_ms":%s,"prefill_over_%s":%s,' \
            "$key" "$(middle "decode_$key")" "$key" "$(middle "eager_over_$key")" "$key" "$(middle "graph_over_$key")" \
            "$key" "$(middle "prefill_$key")" "$key" "$(middle "prefill_over_$key")")
    done
    line "$summary$(awk -v bytes="$bytes" -v e="$e" -v g="$g" -v roof="$roof" \
        'BEGIN { printf "\"eager_gb_per_s\":%.2f,\"graph_gb_per_s\":%.2f,\"memory\":%s}", bytes * e / 1e9, bytes * g / 1e9, roof }')"
}

if has llama.cpp; then
    gguf=$(mktemp --suffix .gguf)
    trap 'rm -f "$gguf"' EXIT
    "${LLAMA_CPP:-python3}" "$here/peers/llama_cpp/convert.py" "$model" "$gguf"
fi
[ "$out" = /dev/stdout ] || : >"$out"
cpu=$(awk -F': ' '/^model name/ { print $2; exit }' /proc/cpuinfo 2>/dev/null || uname -m)
line "{\"host\":true,\"cpu\":\"$cpu\",\"cores\":$(getconf _NPROCESSORS_ONLN),\"date\":\"$(date -u +%Y-%m-%dT%H:%MZ)\",\"model\":\"$(basename "$model")\"}"
for t in $threads; do
    roof=$("$MEMORY" --threads "$t")
    series stored "$model" "$t" "$roof"
    if [ -n "$f32_model" ]; then series f32 "$f32_model" "$t" "$roof"; fi
done
