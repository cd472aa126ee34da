"""Quality of a trained model by lm-evaluation-harness (docs/EVALUATE.md).

harness.py   `lm_eval run` with our kernels: python -m evaluate.harness
tasks.py     small tasks and text to train on: python -m evaluate.tasks FOLDER
"""
