# A Llama of 124M parameters; data, tokens, steps and width of train_gpt2.py.
#
#   python -m data openwebtext
#   torchrun --standalone --nproc_per_node=8 train.py config/train_llama.py
#   torchrun --standalone --nproc_per_node=8 train.py config/train_llama.py --qk_norm=True   # Qwen3
#
# Hardware: 8 GPUs of 40 GB or more; not yet run or timed.
# Expect:   not known; GPT-2 has about 2.85 (train_gpt2.py).

out_dir = "out/llama"
dataset = "openwebtext"

position = "rope"
norm = "rms"
mlp = "swiglu"

# 12 sequences x 1024 tokens x 40 micro-batches = 491,520 tokens a step, over all processes
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10
