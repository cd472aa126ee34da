# Evaluate the published GPT-2 (350M) on OpenWebText's validation split.
#
#   python -m data openwebtext
#   python train.py config/eval_gpt2_medium.py
#
# Hardware: one GPU, minutes; a CPU with --eval_iters=10. Not yet timed here.
# Expect:   validation loss about 2.84 nats a token (nanoGPT's figure).

dataset = "openwebtext"
init_from = "gpt2-medium"
eval_only = True

batch_size = 8
block_size = 1024
eval_iters = 500
