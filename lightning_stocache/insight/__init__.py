"""Metrics, the plan, the report, the doctor, and the clock of steps."""
