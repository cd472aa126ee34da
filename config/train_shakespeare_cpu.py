# A small character-level GPT on the plays of Shakespeare: the default of `make train`.
#
#   python -m data shakespeare_char
#   python train.py config/train_shakespeare_cpu.py
#
# Hardware: any laptop; 45 s on two AMD EPYC cores.
# Expect:   validation loss about 1.9 nats a character; a unigram model has 3.3, a bigram 2.5.

out_dir = "out/shakespeare_cpu"
dataset = "shakespeare_char"

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
