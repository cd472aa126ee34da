# Finetune GPT-2 XL on the plays of Shakespeare.
#
#   python -m data shakespeare
#   python train.py config/finetune_shakespeare.py
#   python train.py config/finetune_shakespeare.py --init_from=gpt2    # for a smaller GPU
#
# Hardware: one GPU of 40 GB (weights, gradients, AdamW: 25 GB). Not yet timed here.
# Expect:   validation loss near 2.8 nats a token on tinyshakespeare (nanoGPT's figure).

out_dir = "out/finetune_shakespeare"
dataset = "shakespeare"
init_from = "gpt2-xl"

# 1 sequence x 1024 tokens x 32 micro-batches = 32,768 tokens a step
batch_size = 1
gradient_accumulation_steps = 32
gradient_checkpointing = True

max_iters = 20
learning_rate = 3e-5
decay_lr = False

eval_interval = 5
eval_iters = 40
log_interval = 1
sample_tokens = 300
