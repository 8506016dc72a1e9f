"""HOW a cache opens on a job."""
