"""The llama.cpp peer of Leasehold's decode benchmark: greedy decoding of a GGUF file on the CPU, as one JSON object.

Needs `llama-cpp-python`, built for this machine. A short generation runs before, as in the other peers. `prefill_ms` is
the prompt's pass up to the first new id; a decode step is timed from the call to the id on the host.
"""

import argparse
import ctypes
import json
import time

import llama_cpp as llama
import numpy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a file of convert.py")
    parser.add_argument("--prompt-ids", required=True, help="1,2,3")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    prompt = [int(token) for token in args.prompt_ids.split(",")]

    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(args.model.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"decode.py: llama.cpp cannot load {args.model}")
    params = llama.llama_context_default_params()
    params.n_ctx = len(prompt) + args.tokens + 8
    params.n_batch = params.n_ubatch = max(512, len(prompt))
    params.n_threads = params.n_threads_batch = args.threads
    context = llama.llama_init_from_model(model, params)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def step(tokens):
        start = time.perf_counter()
        ids = (llama.llama_token * len(tokens))(*tokens)
        if llama.llama_decode(context, llama.llama_batch_get_one(ids, len(tokens))) != 0:
            raise SystemExit("decode.py: llama.cpp failed to decode")
        logits = numpy.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), shape=(vocabulary,))
        token = int(logits.argmax())
        return token, time.perf_counter() - start

    def generate(count):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        token, prefill = step(prompt)
        ids, times = [token], []
        while len(ids) < count:
            token, spent = step([token])
            ids.append(token)
            times.append(spent)
        return ids, prefill, times

    generate(min(8, args.tokens))
    ids, prefill, times = generate(args.tokens)
    result = {
        "peer": "llama.cpp",
        "version": llama.__version__,
        "threads": args.threads,
        "prompt_tokens": len(prompt),
        "prefill_ms": prefill * 1e3,
        "decode_tokens_per_s": len(times) / sum(times),
        "output_ids": ids,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
