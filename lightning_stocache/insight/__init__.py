"""What the counts tell."""
