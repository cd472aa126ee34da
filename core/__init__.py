"""Independent of the model."""
