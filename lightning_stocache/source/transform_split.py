"""Where a source is cut, and how: its transform ends before the cut, and the tail goes on after it.

A source is cut by its `transform` (or the joint `transforms` of a VisionDataset), through any depth of Subset. Nested
Composes and Sequentials of torchvision are one flat list of steps; a Compose of albumentations or MONAI has the steps
that it holds itself. `Part` runs some of the steps, called as the whole transform is: with one value, with several, or
by keywords.

A `Cut` says how many steps stay in the source and where in a sample the values of each call lie; it holds nothing but
numbers and keys, so a process that has read nothing cuts its own source in the same way. `apply` gives a shallow copy
of the source that runs the steps before the cut, and the `Tail`, which runs the others on the sample. The user's
objects are not modified, and the tail works with them: who seeds the transform's generators anew, as `worker_init_fn`
may, seeds the tail's.

Whether a cut is sound is not known here: `split` finds it and proves it.
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


@dataclass(frozen=True)
class Cut:
    """Where a source is cut. Found by `split` in one process, it can be applied to the same source in another.

    Args:
        position: How many steps of the transform stay in the source.
        places: Per call of the transform for a sample, where its values lie.
    """

    position: int
    places: tuple[Places, ...]

    def apply(self, source: Dataset[Any]) -> tuple[Dataset[Any], Tail]:
        """The deterministic copy of `source` and the tail, without a read.

        Raises:
            ValueError: If `source` has no transform that could be cut: it is not the one that this was found in.
        """
        transform = transform_of(source)
        return with_transform(source, Part(transform, 0, self.position)), Tail(transform, self.position, self.places)


class Part:
    """Some consecutive steps of a transform, called as the transform is.

    Args:
        transform: The whole.
        begin: The first step.
        end: The one after the last; None for all that follow.
    """

    def __init__(self, transform: Callable[..., Any], begin: int, end: int | None = None) -> None:
        self.transform: Any = transform
        self.begin, self.end = begin, end
        self.steps = steps_of(transform)[begin:end]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(step_name, self.steps))})"

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Run the steps. Several values come back as a tuple, named ones as a dict."""
        call: dict[Any, Any] = {**dict(enumerate(values)), **named}
        result = self.run(call)
        if named:
            return result
        return tuple(result.values()) if len(result) > 1 else result[0]

    def run(self, values: Values) -> Values:
        """Run the steps on the values of a call."""
        # A copy for each call: who has given the whole transform new generators has given them to it.
        if _is_monai(self.transform) or (draws_by_itself(self.transform) and self.end is None):
            section: Any = copy.copy(self.transform)
            section.transforms = self.transform.transforms[self.begin : self.end]
            return _called(section, values)
        for step in self.steps:
            values = _called(step, values)
        return values


class Tail:
    """The random steps, applied to those objects of a sample that the head made. The given sample keeps its containers.

    Args:
        transform: The whole transform.
        position: Its first random step.
        places: Where they work, as `Cut` has it.
    """

    def __init__(self, transform: Callable[..., Any], position: int, places: Sequence[Places]) -> None:
        self.part, self.places = Part(transform, position), places

    def __repr__(self) -> str:
        return repr(self.part).replace("Part", "Tail", 1)

    @property
    def steps(self) -> list[Callable[..., Any]]:
        """The steps that it runs."""
        return self.part.steps

    def __call__(self, sample: Any) -> Any:
        """Finish a sample of the split source."""
        for places in self.places:
            values = self.part.run({key: part_at(sample, path) for key, path in places})
            for key, path in places:
                sample = with_part(sample, path, values[key])
        return sample


class UncuttableError(ValueError):
    """The source cannot be split; the message says why."""


def _called(step: Callable[..., Any], values: Values) -> Values:
    named = {key: value for key, value in values.items() if isinstance(key, str)}
    if not named:
        result = step(*values.values())
        return dict(enumerate(result if len(values) > 1 else (result,)))
    if not isinstance(came := step(**named), dict):
        raise UncuttableError(
            f"its transform is called with keyword arguments ({', '.join(named)}), and {step_name(step)} returns no "
            "dict for them"
        )
    return came


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


def steps_of(transform: Any) -> list[Callable[..., Any]]:
    """The steps of a transform. A subclass that runs its steps in its own way is one step."""
    if _is_monai(transform) or _has_steps(transform):
        return list(transform.transforms)
    modules = (sys.modules.get(name) for name in ("torchvision.transforms", "torchvision.transforms.v2"))
    kinds = [nn.Sequential, *(module.Compose for module in modules if module is not None)]
    for kind in kinds:
        same = (getattr(type(transform), way, 0) is getattr(kind, way, 0) for way in ("__call__", "forward"))
        if isinstance(transform, kind) and all(same):
            steps = transform if isinstance(transform, nn.Sequential) else transform.transforms
            return [inner for step in steps for inner in _flat(step)]
    return [transform]


def draws_by_itself(transform: Any) -> bool:
    """Whether it is a Compose of albumentations: it draws whether to run at all, even where it always does."""
    return _is_compose(transform, "albumentations") and transform.p >= 1


def step_name(step: Any) -> str:
    """A step as its user knows it, for messages."""
    return str(getattr(step, "__name__", type(step).__name__))


def _flat(step: Any) -> list[Callable[..., Any]]:
    return [step] if _is_monai(step) or draws_by_itself(step) else steps_of(step)


def _has_steps(transform: Any) -> bool:
    """Whether it is a Compose of albumentations whose steps can be run one by one: boxes and key points it prepares."""
    return draws_by_itself(transform) and not transform.processors


def _is_monai(transform: Any) -> bool:
    return _is_compose(transform, "monai.transforms") and not transform.lazy


def _is_compose(transform: Any, module: str) -> bool:
    """Whether it is of the class Compose of a library, which need not be installed."""
    library = sys.modules.get(module)  # never imported: then nobody made one
    return library is not None and type(transform) is getattr(library, "Compose", None)
