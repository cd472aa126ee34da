# A 124M GPT by Muon: the rates, decay, batch and schedule of modded-nanogpt's track 3.
#
#   python -m data fineweb
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_muon.py
#
# Hardware: 8 GPUs of 40 GB or more; not yet run or timed.
# Expect:   not known; modded-nanogpt's validation loss is 3.28 nats a token after 3,250 such steps
#           (mean of 10 runs), with other data and a changed model.

out_dir = "out/gpt2_muon"
dataset = "fineweb"

position = "rope"
norm = "rms"
qk_norm = True
tied = False

# 16 sequences x 1024 tokens x 32 micro-batches = 524,288 tokens a step, over all processes
batch_size = 16
block_size = 1024
gradient_accumulation_steps = 4 * 8

optimizer = "muon"
muon_rates = 0.025, 0.7, 0.004, 0.015
weight_decay = 0.05
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0

max_iters = 3250
decay_lr = "linear"
warmup_iters = 0
min_lr = 0.0

eval_interval = 125
eval_iters = 200
log_interval = 10
