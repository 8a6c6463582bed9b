import json,sys,math
n, off = sys.argv[1:]
o, t = json.load(open(f"ours_{n}_{off}.json")), json.load(open(f"torch_{n}.json"))
l=o["last_logits"]; a=t["logits"]; rms=math.sqrt(sum((x-y)**2 for x,y in zip(a,l))/sum(x*x for x in a))
print("ours ", n, "cublaslt" if off=="0" else "kernels ", "prefill ms", {k:round(v["prefill_ms"],2) for k,v in o["modes"].items()}, "torch ms", round(t["ms"],2), "argmax", max(range(len(l)),key=l.__getitem__), t["argmax"], "rms vs torch", round(rms,5), "agree", o["modes_agree"])
