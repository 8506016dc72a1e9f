"""Lightning: the DataModule and the callbacks."""
