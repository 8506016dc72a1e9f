"""What lies in the memory."""
