import sys, time, json, torch
from transformers import AutoModelForCausalLM, AutoConfig
d, n = sys.argv[1], int(sys.argv[2])
m = AutoModelForCausalLM.from_pretrained(d, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
ids = torch.tensor([[ (i*7919+13) % 31990 for i in range(n)]], device="cuda")
with torch.no_grad():
    for _ in range(3): o = m(ids, use_cache=True, logits_to_keep=1)
    torch.cuda.synchronize(); ts=[]
    for _ in range(10):
        t=time.perf_counter(); o = m(ids, use_cache=True, logits_to_keep=1); torch.cuda.synchronize(); ts.append(time.perf_counter()-t)
ts.sort(); l=o.logits[0,-1].float().cpu()
json.dump({"n":n,"ms":ts[len(ts)//2]*1e3,"argmax":int(l.argmax()),"logits":l.tolist()}, open(f"torch_{n}.json","w"))
print("torch", n, "ms", round(ts[len(ts)//2]*1e3,2), "argmax", int(l.argmax()))
