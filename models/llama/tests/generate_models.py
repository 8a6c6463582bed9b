#!/usr/bin/env python3
"""Generates the small random Llama models on which `leasehold-llama` is tested, with their golden values.

    python3 -m venv VENV && VENV/bin/pip install torch transformers==5.24.0 numpy
    VENV/bin/python models/llama/tests/generate_models.py                  # all of them, into models/llama/tests/models/
    VENV/bin/python models/llama/tests/generate_models.py --only biases    # one

Each model is there for a shape or a spelling of `config.json` that the bundled model does not have. The weights are random
numbers drawn by NumPy's PCG64 from a fixed seed, so a second run writes the same files. They are drawn wide enough for the
logits to differ clearly, and the first seed is taken whose greedy continuations never come closer than MARGIN to a tie and
do not fall into a loop of few tokens: a test on token ids is then a test of the arithmetic, not of rounding.

`golden.json` is computed by transformers' class of the model from the files as written (so the written spelling of the config
is what transformers understood), in float64. (transformers takes RMSNorm, the softmax and the rotary table through float32 even
then; that is some 1e-6 in the logits.) Its form, one entry in `cases` per prompt:

    prompt_ids            the prompt
    last_logits           one number per vocabulary entry, after the prompt's last position
    argmax_per_position   the greedy choice after each prompt position
    greedy_N              N greedily chosen new tokens, each a step with a KV cache
    final_logits          the logits that chose the last of them

The models that the benchmarks need are not made here: see `models/llama/examples/generate_model.rs`.
"""

import argparse
import json
import pathlib
import shutil

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, __version__ as transformers_version

ROOT = pathlib.Path(__file__).resolve().parent / "models"
MARGIN = 5e-3
GREEDY = 24
# Lengths of the prompts: the shortest possible, a short one, and one beyond the trained length of the scaled rope models.
PROMPTS = (1, 6, 45)

BASE = dict(
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=200,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Trained for 64 positions, so a prompt of 45 and its 24 new tokens cross the border, and one of 80 lies beyond it.
SMALL = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=96, max_position_embeddings=64)
ACROSS = dict(prompts=(1, 6, 45, 80))
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.25, 1.5],
    "long_factor": [1.0, 1.5, 3.0, 4.5],
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# name: (what it is for, changes to BASE, storage type, other options)
MODELS = {
    "full-heads": ("as many key-value heads as heads; f32 storage; three layers",
                   dict(num_key_value_heads=6, num_hidden_layers=3), "float32", {}),
    "grouped-heads": ("three heads to a key-value head; bf16 storage", {}, "bfloat16", {}),
    "one-kv-head": ("five heads share one key-value head; a head of its own; f16 storage; several end tokens",
                    dict(hidden_size=40, num_attention_heads=5, num_key_value_heads=1, tie_word_embeddings=False,
                         eos_token_id=[2, 7, 199]), "float16", {}),
    "untied-head": ("a head of its own; a byte-level tokenizer; an embedding that is no multiple of 8",
                    dict(tie_word_embeddings=False, vocab_size=259, bos_token_id=256, eos_token_id=257), "bfloat16",
                    {"tokenizer": True}),
    "odd-sizes": ("no dimension is a multiple of 8, and head_dim is not hidden_size / heads",
                  dict(hidden_size=60, intermediate_size=97, num_attention_heads=6, num_key_value_heads=3, head_dim=14,
                       vocab_size=211, rms_norm_eps=1e-6), "float32", {}),
    "wide-theta": ("rope_theta 500000", dict(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
                   "bfloat16", {}),
    "llama3-rope": ("llama3 rope scaling in the new spelling, all three bands of frequencies",
                    dict(head_dim=16, rope_parameters=LLAMA3), "bfloat16", {}),
    "llama3-rope-old": ("llama3 rope scaling in the old spelling",
                        dict(head_dim=16, num_key_value_heads=3, rope_parameters=LLAMA3), "float32",
                        {"old": "rope_type"}),
    "linear-rope-old": ("linear rope scaling in the old spelling, its kind under `type`",
                        dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
                        "float16", {"old": "type"}),
    "biases": ("attention_bias and mlp_bias", dict(attention_bias=True, mlp_bias=True), "bfloat16", {}),
    "sharded": ("weights in several files; old spelling without any rope settings", dict(tie_word_embeddings=False),
                "bfloat16", {"shards": "40KB", "old": "rope_type"}),
    "mistral": ("Mistral, with a sliding window that no text reaches",
                SMALL | dict(sliding_window=64, max_position_embeddings=128, tie_word_embeddings=False), "bfloat16",
                {"config": MistralConfig, "prompts": (1, 6, 38)}),
    "qwen2": ("Qwen2: biases of queries, keys and values alone; a window that is not used",
              SMALL | dict(max_position_embeddings=128, sliding_window=16, use_sliding_window=False), "bfloat16",
              {"config": Qwen2Config}),
    "qwen3": ("Qwen3: norms of the heads of queries and keys; a head_dim that is not the quotient",
              SMALL | dict(max_position_embeddings=128, head_dim=12), "float32", {"config": Qwen3Config}),
    "dynamic-rope-old": ("dynamic rope scaling in the old spelling, texts across the trained length",
                         SMALL | dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
                         "bfloat16", {"old": "type"} | ACROSS),
    "yarn-rope": ("yarn rope scaling, texts across the trained length",
                  SMALL | dict(max_position_embeddings=128, rope_parameters=YARN), "bfloat16", ACROSS),
    "qwen3-yarn": ("yarn in Qwen3, with settings of its own", SMALL | dict(
        max_position_embeddings=128, head_dim=16,
        rope_parameters=YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.25}),
                   "bfloat16", {"config": Qwen3Config} | ACROSS),
    "longrope": ("longrope, texts across the trained length",
                 SMALL | dict(max_position_embeddings=128, rope_parameters=LONGROPE), "bfloat16", ACROSS),
}


def fill(model, rng):
    """Random weights. Projections are a few times wider than trained ones, norms spread around one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if "norm" in name:
                values = rng.uniform(0.5, 1.5, shape)
            elif name.endswith("bias"):
                values = rng.normal(0.0, 0.3, shape)
            elif "embed" in name:
                values = rng.normal(0.0, 0.5, shape)
            else:
                values = rng.normal(0.0, 2.0 / np.sqrt(shape[-1]), shape)
            parameter.copy_(torch.from_numpy(values))


def old_spelling(path, kind):
    """Rewrites `config.json` as transformers 4 wrote it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    theta, rope_type = rope.pop("rope_theta"), rope.pop("rope_type")
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    if rope_type == "default" and theta == 10000.0:
        # As the first Llama configs have it: nothing at all, so the default holds.
        config["rope_scaling"] = None
        config.pop("head_dim", None)
    else:
        config["rope_theta"] = theta
        config["rope_scaling"] = {kind: rope_type, **rope} if rope_type != "default" else None
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def byte_level_tokenizer(path):
    """256 bytes, then begin, end and padding."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [dict(id=256 + i, content=text, **special) for i, text in enumerate(("<s>", "</s>", "<pad>"))]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {letter[b]: b for b in range(256)}, "merges": []},
    }, ensure_ascii=False) + "\n")


def golden(directory, seed, prompts):
    """The golden values of the model in `directory`, or None when a choice is too close or the text too dull."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    rng = np.random.default_rng(seed + 1_000_000)
    cases = []
    for length in prompts:
        prompt = [int(i) for i in rng.integers(0, model.config.vocab_size, length)]
        with torch.no_grad():
            done = model(torch.tensor([prompt]), use_cache=True)
            # The logits of every choice made, at every position.
            logits, new = done.logits[0], [int(done.logits[0, -1].argmax())]
            while len(new) < GREEDY:
                done = model(torch.tensor([new[-1:]]), past_key_values=done.past_key_values, use_cache=True)
                logits = torch.cat((logits, done.logits[0]))
                new.append(int(logits[-1].argmax()))
        top = logits.topk(2, dim=-1).values
        margins = (top[:, 0] - top[:, 1]).tolist()
        if min(margins) < MARGIN or len(set(new)) < GREEDY // 2:
            return None
        cases.append({
            "prompt_ids": prompt,
            "last_logits": [round(x, 7) for x in logits[length - 1].tolist()],
            "argmax_per_position": logits[:length].argmax(-1).tolist(),
            f"greedy_{GREEDY}": new,
            "final_logits": [round(x, 7) for x in logits[-1].tolist()],
        })
    source = f"transformers {transformers_version} {type(model).__name__}, weights as stored, evaluated in float64"
    return {"source": source, "seed": seed, "cases": cases}


def write(name):
    about, changes, dtype, options = MODELS[name]
    directory = ROOT / name
    for seed in range(1, 1000):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        config = options.get("config", LlamaConfig)(**(BASE | changes))
        model = AutoModelForCausalLM.from_config(config).double()
        fill(model, np.random.default_rng(seed))
        model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=options.get("shards", "1GB"))
        (directory / "generation_config.json").unlink(missing_ok=True)
        if "old" in options:
            old_spelling(directory / "config.json", options["old"])
        values = golden(directory, seed, options.get("prompts", PROMPTS))
        if values is not None:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps its margin")
    values = {"about": about} | values
    (directory / "golden.json").write_text(json.dumps(values) + "\n")
    if options.get("tokenizer"):
        byte_level_tokenizer(directory / "tokenizer.json")
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{name}: seed {seed}, {size} bytes")


def main():
    parser = argparse.ArgumentParser(description="Writes the small golden models.")
    parser.add_argument("--only", choices=MODELS, help="this one alone")
    only = parser.parse_args().only
    for name in [only] if only else MODELS:
        write(name)


if __name__ == "__main__":
    main()
