"""What grows: streams that are stored as they pass, and rolling caches."""
