"""The measuring bench behind bench_mfu.py: one process a backend, rounds in turn, records.

bench_mfu.py    what is asked, the modes, what is printed
process.py      the worker processes, and the rounds: A B C A B C
worker.py       the process in which one backend is measured; it answers through a pipe
training.py     its training steps: for the modes train and converge
profiling.py    where the time of a step goes, by what the profiler saw
roofline.py     where it would go at best, by the sizes alone
kernels.py      its attention calls: for the mode kernel
decoding.py     its generated tokens: for the mode decode
machine.py      the device: name, memory, peak rate and bandwidth, the clock
rivals.py       nanoGPT's model and transformers' GPT-2, measured alike
serving.py     many prompts: batches against continuous batching; python -m bench.serving
curves.py      loss curves of the fast training paths and a plain one; python -m bench.curves
stats.py        medians, quartiles, what is noisy
tables.py       the rows as tables; answers.py: what they say, in words
records.py      a record: written, read, compared; report.py: its pictures and HTML
"""
