"""What is cached: the user's dataset, its deterministic part and its random part."""
