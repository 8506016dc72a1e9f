"""How samples become a batch."""
