"""WHAT GROWS: streams that are stored as they pass, and rolling caches."""
