"""WHAT is cached: the dataset as its user has it, and the random part of it."""
