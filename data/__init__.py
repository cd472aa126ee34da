"""Prepare datasets (prepare.py), and read them (loader.py)."""

import core.process  # first: makes Ctrl-C one line
from data.loader import Batches, Tokens, bits_per_byte, eval_batches, find, load, padded, read_meta
from data.prepare import DATASETS, PrepareConfig, prepare
from data.tokenizer import CharTokenizer, FileTokenizer, GPT2Tokenizer, Tokenizer, from_meta, same
