"""Where a source is cut, and how: its transform ends before the cut, and the tail goes on after it.

A source is cut by its `transform` (or the joint `transforms` of a VisionDataset), through any depth of Subset. Nested
Composes and Sequentials are one flat list of steps. A `Cut` says how many of them stay in the source and where in a
sample the values of each call lie; it holds nothing but numbers and keys, so a process that has read nothing cuts its
own source in the same way. `apply` gives a shallow copy of the source that runs the steps before the cut, and the
`Tail`, which runs the others on the sample. The user's objects are not modified.

Whether a cut is sound is not known here: `split` finds it and proves it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.utils.data import Dataset, Subset

from lightning_stocache.loading.probe import Path

__all__ = [
    "Cut",
    "Steps",
    "Tail",
    "UncuttableError",
    "run_step",
    "step_name",
    "steps_of",
    "transform_of",
    "with_transform",
]


@dataclass(frozen=True)
class Cut:
    """Where a source is cut. Found by `split` in one process, it can be applied to the same source in another.

    Args:
        position: How many steps of the (flattened) transform stay in the source.
        places: Per call of the transform for a sample, where its values lie: one path, several if it is joint.
    """

    position: int
    places: tuple[tuple[Path, ...], ...]

    def apply(self, source: Dataset[Any]) -> tuple[Dataset[Any], Tail]:
        """The deterministic copy of `source` and the tail, without a read.

        Raises:
            ValueError: If `source` has no transform that could be cut: it is not the one that this was found in.
        """
        steps = steps_of(transform_of(source))
        return with_transform(source, Steps(steps[: self.position])), Tail(steps[self.position :], self.places)


class Steps:
    """Some steps of a transform, called as a torchvision Compose is: one value in and out, or several in and out."""

    def __init__(self, steps: Sequence[Callable[..., Any]]) -> None:
        self.steps = list(steps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(step_name, self.steps))})"

    def __call__(self, *values: Any) -> Any:
        """Run the steps. Several values come back as a tuple."""
        for step in self.steps:
            values = run_step(step, values)
        return values if len(values) > 1 else values[0]


class Tail(Steps):
    """The random steps, applied to those objects of a sample that the head made. The given sample keeps its containers.

    Args:
        steps: The steps from the first random one on.
        places: Where they work, as `Cut` has it.
    """

    def __init__(self, steps: Sequence[Callable[..., Any]], places: Sequence[Sequence[Path]]) -> None:
        super().__init__(steps)
        self.places = places

    def __call__(self, sample: Any) -> Any:
        """Finish a sample of the split source."""
        for paths in self.places:
            values = super().__call__(*(_get(sample, path) for path in paths))
            for path, value in zip(paths, values if len(paths) > 1 else (values,), strict=True):
                sample = _put(sample, path, value)
        return sample


class UncuttableError(ValueError):
    """The source cannot be split; the message says why."""


def _attribute(dataset: Dataset[Any]) -> str | None:
    """The attribute that holds the dataset's own transform; `transforms` is a joint one of image and target."""
    return next((name for name in ("transform", "transforms") if callable(getattr(dataset, name, None))), None)


def transform_of(dataset: Dataset[Any]) -> Callable[..., Any]:
    """The transform of a dataset, or of what is inside its Subsets."""
    if name := _attribute(dataset):
        return cast(Callable[..., Any], getattr(dataset, name))
    if isinstance(dataset, Subset):
        return transform_of(dataset.dataset)
    raise UncuttableError(f"{type(dataset).__name__} has no `transform` or `transforms` that could be cut")


def with_transform(dataset: Dataset[Any], transform: Callable[..., Any]) -> Dataset[Any]:
    """A shallow copy with another transform, and of the Subsets around it."""
    clone: Any = copy.copy(dataset)
    name = _attribute(dataset)
    if name is None:
        clone.dataset = with_transform(clone.dataset, transform)
        return cast(Dataset[Any], clone)
    joint = getattr(clone, "transforms", None)
    if name == "transform" and joint is not None and getattr(joint, "transform", None) is clone.transform:
        # VisionDataset calls this one, a StandardTransform that holds the transform once more.
        clone.transforms = copy.copy(joint)
        clone.transforms.transform = transform
    setattr(clone, name, transform)
    return cast(Dataset[Any], clone)


def steps_of(transform: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The steps of nested Composes and Sequentials. A subclass that runs its steps in its own way is one step."""
    modules = (sys.modules.get(name) for name in ("torchvision.transforms", "torchvision.transforms.v2"))
    kinds = [nn.Sequential, *(module.Compose for module in modules if module is not None)]
    for kind in kinds:
        same = (getattr(type(transform), way, 0) is getattr(kind, way, 0) for way in ("__call__", "forward"))
        if isinstance(transform, kind) and all(same):
            steps = transform if isinstance(transform, nn.Sequential) else transform.transforms
            return [inner for step in steps for inner in steps_of(step)]
    return [transform]


def run_step(step: Callable[..., Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call one step; several values go in and come out as a tuple."""
    result = step(*values)
    return tuple(result) if len(values) > 1 else (result,)


def step_name(step: Any) -> str:
    """A step as its user knows it, for messages."""
    return str(getattr(step, "__name__", type(step).__name__))


def _get(sample: Any, path: Path) -> Any:
    for key in path:
        sample = sample[key]
    return sample


def _put(node: Any, path: Path, value: Any) -> Any:
    """The sample with another object at `path`; containers on the way are copied."""
    if not path:
        return value
    key, value = path[0], _put(node[path[0]], path[1:], value)
    if isinstance(node, tuple):
        items = (*node[:key], value, *node[key + 1 :])
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    node = copy.copy(node)
    node[key] = value
    return node
