"""A job of several ranks on gloo, each in a process of its own."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import call_many

__all__ = ["run_ranks"]


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 400) -> list[Any]:
    """What `function(rank, *args)`, importable by name, returns on each rank of a job with a process group."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(f"file://{folder}/meeting", rank, world, function, args) for rank in range(world)]
        return call_many(_rank, arguments, method="forkserver", timeout=timeout)


def _rank(meeting: str, rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()  # without it a gloo rank aborts at exit, in one run of six
