"""WHO trains on what."""
