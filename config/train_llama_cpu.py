# The GPT of train_shakespeare_cpu.py as a small Llama: RoPE, RMSNorm, SwiGLU, grouped heads.
#
#   python -m data shakespeare_char
#   python train.py config/train_llama_cpu.py
#
# Hardware: any laptop, about a minute.
# Expect:   validation loss about 1.68 nats a character; train_shakespeare_cpu.py has 1.89.

out_dir = "out/llama_cpu"
dataset = "shakespeare_char"

position = "rope"
norm = "rms"
mlp = "swiglu"
n_kv_head = 2

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
batch_size = 12
dropout = 0.0

max_iters = 2000
learning_rate = 1e-3
warmup_iters = 100
beta2 = 0.99  # few tokens a step

eval_interval = 500
eval_iters = 40
log_interval = 100
sample_tokens = 300
