"""Save, load, resume, import and export checkpoints."""

import core.process  # first: makes Ctrl-C one line
from checkpoint.families import init_model, load_hf, save_hf, tokenizer_meta, trained_on
from checkpoint.run import Saver, build_model, explained, gathered, restarted, resumed, set_aside
from checkpoint.store import Checkpoint, best_folder, folders, latest, load, save
