"""Save, load, resume, import and export checkpoints."""

import core.settings  # first: makes Ctrl-C one line
from checkpoint.convert import (
    init_model,
    load_hf,
    load_nanogpt,
    save_hf,
    tokenizer_meta,
    trained_on,
)
from checkpoint.run import (
    Progress,
    Saver,
    build_model,
    explained,
    gathered,
    locked,
    restarted,
    restore,
    restore_run,
    resume_command,
    resumed,
)
from checkpoint.store import Checkpoint, best_folder, folders, latest, load, save, set_aside
