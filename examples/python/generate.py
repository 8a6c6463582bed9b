"""Continues texts with a model: a text as it comes, then several together.

    python generate.py DIRECTORY [cpu:0 | cuda:0 | ...]

DIRECTORY is a Llama, Mistral, Qwen2 or Qwen3 of Hugging Face; `models/llama/demo-model` is a small one.
"""

from __future__ import annotations

import sys

import leasehold


def main(path: str, device: str = "cpu:0") -> None:
    model = leasehold.Model(path, device=device)
    prompt = "def read_lines(path):\n    "
    print(prompt, end="")
    for piece in leasehold.stream_text(model, prompt, tokens=12):
        print(piece, end="", flush=True)
    print()

    prompts = ["import os\n", "class Stack:\n", "for i in range("]
    # Decoded together: each step reads the weights once for all three.
    texts = leasehold.generate(model, prompts, tokens=12, temperature=0.7, top_p=0.9, seed=7)
    for prompt, text in zip(prompts, texts):
        print(repr(prompt + text))


if __name__ == "__main__":
    main(*sys.argv[1:])
