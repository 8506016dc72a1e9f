"""Hydra configs, installed as ``lightning_stocache.configs``: ``hydra.searchpath=[pkg://lightning_stocache.configs]``."""
