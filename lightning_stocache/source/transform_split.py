"""Where a source is cut, and how: its transform ends before the cut, and the tail goes on after it.

A source is cut by its `transform` (or the joint `transforms` of a VisionDataset), through any depth of Subset. Nested
Composes and Sequentials of torchvision are one flat list of steps; a Compose of albumentations or MONAI has the steps
that it holds itself. Steps are called as the whole transform is: with one value, with several, or by keywords.

A `Cut` holds nothing but numbers and keys, so a process that has read nothing cuts its own source in the same way. The
user's objects are not modified, and the tail works with them: a `worker_init_fn` that seeds the transform's generators
seeds the tail's. `split` finds a cut and proves that it is sound.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import nn
from torch.utils.data import Dataset, Subset

from lightning_stocache.source.samples import Path, part_at, with_part

__all__ = [
    "Cut",
    "Head",
    "Part",
    "Places",
    "Tail",
    "UncuttableError",
    "Values",
    "draws_by_itself",
    "step_name",
    "steps_of",
    "transform_of",
    "with_transform",
]

Values: TypeAlias = dict[int | str, Any]
"""What a transform is called with, and what it returns: by position, or by keyword."""

Places: TypeAlias = tuple[tuple[int | str, Path], ...]
"""Where the values of one call lie in a sample."""


class UncuttableError(ValueError):
    """The source cannot be split; the message says why."""


@dataclass(frozen=True)
class Cut:
    """Where a source is cut. Found by `split` in one process, it can be applied to the same source in another.

    Args:
        position: how many steps of the transform stay in the source.
        places: per call of the transform for a sample, where its values lie.
    """

    position: int
    places: tuple[Places, ...]

    def apply(self, source: Dataset[Any]) -> tuple[Dataset[Any], Tail]:
        """The deterministic copy of `source` and the tail, without a read.

        Raises:
            ValueError: `source` has no transform that could be cut.
        """
        transform = transform_of(source)
        return with_transform(source, Head(transform, self.position)), Tail(transform, self.position, self.places)


class Part:
    """Some consecutive steps of a transform, from `begin` on; to the last one if there is no `end`."""

    def __init__(self, transform: Callable[..., Any], begin: int, end: int | None = None) -> None:
        self.transform: Any = transform
        self.begin, self.end = begin, end
        self.steps = steps_of(transform)[begin:end]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(step_name, self.steps))})"

    def run(self, values: Values) -> Values:
        """Run the steps on the values of a call."""
        # A copy for each call: new generators of the whole transform reach the copy.
        if _is_compose(self.transform) and not (draws_by_itself(self.transform) and self.end is not None):
            section: Any = copy.copy(self.transform)
            section.transforms = self.transform.transforms[self.begin : self.end]
            return _called(section, values)
        for step in self.steps:
            values = _called(step, values)
        return values


class Head(Part):
    """The first `end` steps of a transform, called as the transform is."""

    def __init__(self, transform: Callable[..., Any], end: int) -> None:
        super().__init__(transform, 0, end)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Run the steps. Several values come back as a tuple, named ones as a dict."""
        call: dict[Any, Any] = {**dict(enumerate(values)), **named}
        result = self.run(call)
        if named:
            return result
        return tuple(result.values()) if len(result) > 1 else result[0]


class Tail(Part):
    """The steps from `position` on, applied to those objects of a sample that the head made, which lie at `places`.

    The given sample keeps its containers.
    """

    def __init__(self, transform: Callable[..., Any], position: int, places: Sequence[Places]) -> None:
        super().__init__(transform, position)
        self.places = places

    def __call__(self, sample: Any) -> Any:
        """Finish a sample of the split source."""
        for places in self.places:
            values = self.run({key: part_at(sample, path) for key, path in places})
            for key, path in places:
                sample = with_part(sample, path, values[key])
        return sample


def _called(step: Callable[..., Any], values: Values) -> Values:
    named = {key: value for key, value in values.items() if isinstance(key, str)}
    if not named:
        result = step(*values.values())
        return dict(enumerate(result if len(values) > 1 else (result,)))
    if isinstance(result := step(**named), dict):
        return result
    raise UncuttableError(
        f"its transform is called with keyword arguments ({', '.join(named)}), and {step_name(step)} returns no dict "
        "for them"
    )


# ---- the transform of a dataset ----


def transform_of(dataset: Dataset[Any]) -> Callable[..., Any]:
    """The transform of a dataset, or of the dataset inside its Subsets."""
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


def _attribute(dataset: Dataset[Any]) -> str | None:
    """The attribute that holds the dataset's own transform; `transforms` is a joint one of image and target."""
    return next((name for name in ("transform", "transforms") if callable(getattr(dataset, name, None))), None)


# ---- its steps ----


def steps_of(transform: Any, *, inside: bool = False) -> list[Callable[..., Any]]:
    """The steps of a transform. A subclass that runs its steps in its own way is one step.

    Args:
        transform: any callable.
        inside: whether it is a step itself: a Compose of albumentations or MONAI then stays whole.
    """
    if _is_compose(transform):
        prepares = getattr(transform, "processors", None)  # boxes and key points, before albumentations' first step
        return [transform] if inside or prepares else list(transform.transforms)
    modules = (sys.modules.get(name) for name in ("torchvision.transforms", "torchvision.transforms.v2"))
    for kind in (nn.Sequential, *(module.Compose for module in modules if module is not None)):
        same = (getattr(type(transform), way, 0) is getattr(kind, way, 0) for way in ("__call__", "forward"))
        if isinstance(transform, kind) and all(same):
            steps = transform if isinstance(transform, nn.Sequential) else transform.transforms
            return [inner for step in steps for inner in steps_of(step, inside=True)]
    return [transform]


def step_name(step: Any) -> str:
    """A step as its user knows it, for messages."""
    return str(getattr(step, "__name__", type(step).__name__))


def draws_by_itself(transform: Any) -> bool:
    """Whether it is a Compose of albumentations: it draws whether to run at all, even where it always does."""
    return _is_of(transform, "albumentations") and transform.p >= 1


def _is_compose(transform: Any) -> bool:
    """Whether it is a Compose of albumentations that always runs, or one of MONAI that is not lazy."""
    return draws_by_itself(transform) or (_is_of(transform, "monai.transforms") and not transform.lazy)


def _is_of(transform: Any, module: str) -> bool:
    library = sys.modules.get(module)  # not imported: then nobody made one
    return library is not None and type(transform) is getattr(library, "Compose", None)
