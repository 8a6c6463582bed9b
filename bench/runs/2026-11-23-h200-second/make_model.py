import json, os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
d, h, i, l, q, kv = sys.argv[1], *map(int, sys.argv[2:7])
c = LlamaConfig(vocab_size=32000, hidden_size=h, intermediate_size=i, num_hidden_layers=l, num_attention_heads=q, num_key_value_heads=kv, head_dim=64 if h==2048 else 128, max_position_embeddings=8192, tie_word_embeddings=False)
torch.manual_seed(1); torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"): m = LlamaForCausalLM(c)
m.save_pretrained(d, max_shard_size="100GB")
json.dump(dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=32000, hidden_size=h, intermediate_size=i, num_hidden_layers=l, num_attention_heads=q, num_key_value_heads=kv, head_dim=c.head_dim, max_position_embeddings=8192, tie_word_embeddings=False, rms_norm_eps=c.rms_norm_eps, rope_theta=10000.0, hidden_act="silu", torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2), open(d+"/config.json","w"))
print(os.listdir(d))
