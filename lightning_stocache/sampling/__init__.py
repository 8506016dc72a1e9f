"""Who trains on what."""
