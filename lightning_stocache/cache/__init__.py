"""Samples in a segment: their bytes, their slots, their counters."""
