"""What knows nothing of the model: settings, the set-up of a run, FLOPs and peaks, metrics."""
