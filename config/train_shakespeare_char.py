# A character-level GPT of 10.7 million parameters on the plays of Shakespeare, nanoGPT's example.
#
#   python -m data shakespeare_char
#   python train.py config/train_shakespeare_char.py
#
#   python -m data shakespeare_char --source=tinyshakespeare --force      # nanoGPT's text
#
# Hardware: one GPU, a few minutes (nanoGPT reports 3 on an A100). Not yet timed here.
# Expect:   on tinyshakespeare a best validation loss of 1.47 nats a character (nanoGPT's figure),
#           then overfitting: the best checkpoint is kept.

out_dir = "out/shakespeare_char"
dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
batch_size = 64
dropout = 0.2

max_iters = 5000
learning_rate = 1e-3
warmup_iters = 100
beta2 = 0.99

eval_interval = 250
eval_iters = 200
log_interval = 10
sample_tokens = 500
