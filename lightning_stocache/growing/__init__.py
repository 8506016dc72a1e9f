"""WHAT GROWS: streams that are kept, and caches that roll."""
