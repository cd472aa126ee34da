"""The measuring bench behind bench_mfu.py: one process a backend, rounds in turn, records.

config.py       the knobs: the bench's own, and train.py's for the model
bench.py        one run: what all modes need; plan.py: how long it takes, and what takes too long
modes.py        what each mode asks of the workers, and the rows that come of it
process.py      the worker processes, and the rounds: A B C A B C; when they end
qualify.py      the mode of that name, by the other modes; proof.py: is every kernel right here?
guard.py        what ends them with their parent
worker.py       the process in which one backend is measured; it answers through a pipe
job.py          how every job in it begins: settings, device, the model
training.py     its training steps: for the modes train and converge
kernels.py      its attention calls: for the mode kernel
decoding.py     its generated tokens: for the mode decode
machine.py      the device: name, memory, peak rate and bandwidth, the clock
candidates.py   who is measured: our model, nanoGPT's, transformers' GPT-2, a plain step
hf.py           --hf: any causal language model of transformers
fitting.py      --batch_size=auto: the largest batch that fits
profiling.py    where the time of a step goes, by what the profiler saw
roofline.py     where it would go at best, by the sizes alone
rows.py         answers of the workers -> rows; stats.py: medians, quartiles, what is noisy
tables.py       the rows as tables, and what they say; pictures.py: as PNG
records.py      a record: written, sealed, read; compare.py: two of them side by side
verify.py       is a record what it claims to be?
board.py        all records: each verified, and their board, docs/BOARD.md
against_nanogpt.py  whole runs of train.py beside nanoGPT's own
"""
