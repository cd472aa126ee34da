"""Text from a trained model: KV caches, sampling, the engine, serving."""
