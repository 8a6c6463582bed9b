"""Writes the bf16 weights of a Hugging Face Llama directory as a GGUF file for llama.cpp: `convert.py DIR FILE`.

Needs Python alone. The tokenizer stays out: the benchmark gives and compares token ids. The format is that of
ggml's `docs/gguf.md`, version 3. Matrices keep their bits; norms become f32, as llama.cpp requires.
"""

import json
import struct
import sys
from pathlib import Path

ALIGNMENT = 32
U32, F32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5
GGML_F32, GGML_BF16 = 0, 30
FILE_BF16 = 32
# Kinds of tokens: normal, unknown, control, byte.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, what):
    if kind == STRING:
        return text(what)
    return struct.pack({U32: "<I", INT32: "<i", F32: "<f", BOOL: "<?"}[kind], what)


def field(name, kind, what):
    return text(name) + struct.pack("<I", kind) + value(kind, what)


def array(name, kind, items):
    head = text(name) + struct.pack("<IIQ", ARRAY, kind, len(items))
    return head + b"".join(value(kind, item) for item in items)


def vocabulary(size):
    """Tokens that stand for nothing: llama.cpp wants a byte for each of 256, and three special ones."""
    tokens = [b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % byte for byte in range(256)]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    more = max(0, size - len(tokens))
    tokens += [b"t%d" % i for i in range(more)]
    return tokens[:size], (kinds + [NORMAL] * more)[:size]


def metadata(config, heads, kv_heads, head_dim):
    rope = config.get("rope_parameters") or config
    size = config["vocab_size"]
    tokens, kinds = vocabulary(size)
    return [
        field("general.architecture", STRING, "llama"),
        field("general.alignment", U32, ALIGNMENT),
        field("general.file_type", U32, FILE_BF16),
        field("llama.context_length", U32, config["max_position_embeddings"]),
        field("llama.embedding_length", U32, config["hidden_size"]),
        field("llama.block_count", U32, config["num_hidden_layers"]),
        field("llama.feed_forward_length", U32, config["intermediate_size"]),
        field("llama.attention.head_count", U32, heads),
        field("llama.attention.head_count_kv", U32, kv_heads),
        field("llama.attention.key_length", U32, head_dim),
        field("llama.attention.value_length", U32, head_dim),
        field("llama.attention.layer_norm_rms_epsilon", F32, config["rms_norm_eps"]),
        field("llama.rope.freq_base", F32, rope.get("rope_theta", 10000.0)),
        field("llama.rope.dimension_count", U32, head_dim),
        field("llama.vocab_size", U32, size),
        field("tokenizer.ggml.model", STRING, "llama"),
        array("tokenizer.ggml.tokens", STRING, tokens),
        array("tokenizer.ggml.scores", F32, [0.0] * size),
        array("tokenizer.ggml.token_type", INT32, kinds),
    ]


def pairs_apart(data, rows, heads):
    """Rows of queries or keys from Hugging Face's order, halves of a head, to llama.cpp's: pairs beside each other."""
    row, half = len(data) // rows, rows // heads // 2
    order = [h * 2 * half + i + part * half for h in range(heads) for i in range(half) for part in (0, 1)]
    return b"".join(data[r * row : (r + 1) * row] for r in order)


def widened(data):
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return bytes(wide)


def main(directory, to):
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    with open(directory / "model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        stored = json.loads(file.read(length))
        if "lm_head.weight" in stored and not config.get("tie_word_embeddings"):
            names["lm_head.weight"] = "output.weight"
        infos, offset = [], 0
        for theirs, ours in names.items():
            tensor = stored[theirs]
            if tensor["dtype"] != "BF16":
                raise SystemExit(f"convert.py: {theirs} is {tensor['dtype']}; only BF16 is converted")
            shape = tensor["shape"]
            vector = len(shape) == 1
            begin, end = tensor["data_offsets"]
            info = text(ours) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in reversed(shape))
            infos.append(info + struct.pack("<IQ", GGML_F32 if vector else GGML_BF16, offset))
            offset += -(-(end - begin) * (2 if vector else 1) // ALIGNMENT) * ALIGNMENT
        fields = metadata(config, heads, kv_heads, head_dim)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(fields)) + b"".join(fields) + b"".join(infos)
        with open(to, "wb") as out:
            out.write(head + bytes(-len(head) % ALIGNMENT))
            for theirs in names:
                shape, (begin, end) = stored[theirs]["shape"], stored[theirs]["data_offsets"]
                file.seek(8 + length + begin)
                data = file.read(end - begin)
                if len(shape) == 1:
                    data = widened(data)
                elif theirs.endswith(("q_proj.weight", "k_proj.weight")):
                    data = pairs_apart(data, shape[0], heads if "q_proj" in theirs else kv_heads)
                out.write(data + bytes(-len(data) % ALIGNMENT))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: convert.py DIR FILE")
    main(Path(sys.argv[1]), sys.argv[2])
