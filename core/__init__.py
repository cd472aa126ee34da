"""Settings, set-up of a run, FLOPs and peaks, metrics: independent of the model."""
