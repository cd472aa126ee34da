# What bench_mfu.py measures on a CPU without another config; long enough for attention to matter.

dataset = "shakespeare_char"
vocab_size = 1024

n_layer = 4
n_head = 4
n_embd = 256
block_size = 512
batch_size = 4

learning_rate = 1e-3
