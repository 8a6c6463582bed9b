"""Prompts and decoding with PyTorch and transformers, at a shape: random weights in bf16, fused attention, a captured step.

torch_llama.py CONFIG TOKENS... — prints the second prompt's time of each length, then the captured decode step's rate.
"""
import json, statistics, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
given = json.load(open(sys.argv[1]))
config = LlamaConfig(**{k: v for k, v in given.items() if k not in ("architectures", "model_type", "torch_dtype")}, attn_implementation="sdpa")
torch.manual_seed(1)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).eval()
with torch.inference_mode():
    for n in map(int, sys.argv[2:]):
        ids = torch.randint(0, config.vocab_size, (1, n), device="cuda")
        times = []
        for _ in range(5):
            torch.cuda.synchronize(); began = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1); out.logits.argmax(-1).item()
            times.append((time.perf_counter() - began) * 1e3)
        print(f"torch prompt {n}: {statistics.median(times[1:]):.2f} ms, first {times[0]:.1f}", flush=True)
    cache = StaticCache(config=config, max_cache_len=512)
    token = torch.zeros((1, 1), dtype=torch.long, device="cuda")
    position = torch.zeros(1, dtype=torch.long, device="cuda")
    def step():
        out = model(token, past_key_values=cache, cache_position=position, position_ids=position[None], use_cache=True)
        token.copy_(out.logits[:, -1:].argmax(-1)); position.add_(1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3): step()
    torch.cuda.synchronize(); position.fill_(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): step()
    position.fill_(16)
    for _ in range(10): graph.replay()
    torch.cuda.synchronize(); began = time.perf_counter()
    for _ in range(128):
        graph.replay(); token.item()
    seconds = time.perf_counter() - began
    print(f"torch decode, captured: {128 / seconds:.1f} tokens/s", flush=True)
