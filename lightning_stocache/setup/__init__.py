"""How a cache opens in a job."""
