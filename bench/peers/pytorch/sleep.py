"""The weights of a large model leave the device and come back, under a captured step of decoding.

    sleep.py [--layers N]      default: 32, the shape of Llama 3 8B with random weights

Under PyTorch's own allocator. The weights lie in a region of Leasehold's. A graph decodes one token; its replays must give the same
tokens after the weights were away. Needs PyTorch and transformers.
"""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import leasehold.torch as lt

TOKENS = 24


def timed(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def main():
    layers = int(sys.argv[2]) if sys.argv[1:2] == ["--layers"] else 32
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        dtype=torch.bfloat16,
    )
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    before = torch.cuda.mem_get_info()[0]
    with lt.region("weights"), torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    # What the initialization left is PyTorch's.
    torch.cuda.empty_cache()
    at = [p.data_ptr() for p in model.parameters()]
    cache = StaticCache(config=config, max_batch_size=1, max_cache_len=256, device="cuda", dtype=torch.bfloat16)
    token = torch.full((1, 1), 17, device="cuda")
    position = torch.zeros(1, device="cuda", dtype=torch.long)

    def step():
        logits = model(token, past_key_values=cache, cache_position=position, position_ids=position[None], use_cache=True).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def decode():
        cache.reset()
        token.fill_(17)
        position.zero_()
        tokens = []
        for _ in range(TOKENS):
            graph.replay()
            tokens.append(token.clone())
        return torch.cat(tokens).flatten().tolist()

    first = decode()
    print(f"{size / 2**30:.2f} GiB of weights, {(before - torch.cuda.mem_get_info()[0]) / 2**30:.2f} GiB of the device; tokens {first[:8]} ...")
    pinned = torch.empty(size // 2, dtype=torch.bfloat16, pin_memory=True)
    device = torch.empty(size // 2, dtype=torch.bfloat16, device="cuda")
    pinned.copy_(device)
    out, _ = timed(lambda: pinned.copy_(device, non_blocking=True))
    back, _ = timed(lambda: device.copy_(pinned, non_blocking=True))
    del device, pinned
    torch.cuda.empty_cache()
    print(f"a copy of as many bytes to pinned memory takes {1e3 * out:.0f} ms, and back {1e3 * back:.0f} ms")
    for turn in range(3):
        full = torch.cuda.mem_get_info()[0]
        away, freed = timed(lambda: lt.suspend("weights"))
        empty = torch.cuda.mem_get_info()[0]
        returned, _ = timed(lambda: lt.resume("weights"))
        again = decode()
        same = again == first and at == [p.data_ptr() for p in model.parameters()]
        print(
            f"turn {turn}: suspend {1e3 * away:.0f} ms ({away / out:.2f}), resume {1e3 * returned:.0f} ms ({returned / back:.2f}), "
            f"{freed / 2**30:.2f} GiB freed, the device has {(empty - full) / 2**30:.2f} GiB more ({100 * (empty - full) / size:.1f} % of the weights), "
            f"{'same' if same else 'OTHER'} tokens and addresses",
            flush=True,
        )
        if not same:
            sys.exit(1)


if __name__ == "__main__":
    main()
