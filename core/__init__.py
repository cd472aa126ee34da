"""Settings, set-up, FLOPs, metrics: independent of the model."""
