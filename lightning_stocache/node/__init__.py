"""Where the memory is."""
