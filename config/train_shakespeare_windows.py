# The small GPT of train_shakespeare_cpu.py on longer sequences, with a window of 32 keys in all
# layers but the last (docs/ATTENTION.md).
#
#   python -m data shakespeare_char
#   python train.py config/train_shakespeare_windows.py
#
# Hardware: any laptop; 3 minutes on two AMD EPYC cores.
# Expect:   validation loss about 2.22 nats a character, 2.13 with --attention_window=none.

out_dir = "out/shakespeare_windows"
dataset = "shakespeare_char"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
batch_size = 4
dropout = 0.0
attention_window = 32, 32, 32, None

max_iters = 2000
learning_rate = 1e-3
warmup_iters = 100
beta2 = 0.99  # few tokens a step

eval_interval = 500
eval_iters = 40
log_interval = 100
sample_tokens = 300
