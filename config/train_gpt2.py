# GPT-2 124M on OpenWebText, about 300 billion tokens.
#
#   python -m data openwebtext
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
#   python train.py config/train_gpt2.py --attention_backend=sdpa      # one GPU, the same batch
#
# Hardware: 8 x A100 40GB; about 4 days (nanoGPT's figure). Not yet timed here.
# Expect:   validation loss about 2.85 nats a token after 600,000 steps (nanoGPT's figure).

out_dir = "out/gpt2"
dataset = "openwebtext"

# 12 sequences x 1024 tokens x 40 micro-batches = 491,520 tokens a step, over all processes
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10
