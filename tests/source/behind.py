"""Datasets whose code goes on behind their transform: what it does with the result is named by its function.

The transforms return few rows, none at all, or None now and then, as detection transforms do.
"""

import copy
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from torchvision.transforms import Compose

LENGTH = 150
WHOLE = torch.zeros(1, 4)
ANOTHER = False  # whether results have another form now
log = logging.getLogger(__name__)


class Boxes(Dataset[Any]):
    """Three boxes per sample, which `behind` makes the sample of, after the transform or without it."""

    def __init__(self, behind: Callable[[Any, int], Any], transform: Any = None, length: int = LENGTH) -> None:
        self.boxes = torch.rand(length, 3, 4, generator=torch.Generator().manual_seed(0))
        self.behind, self.transform, self.sizes = behind, transform or drop, []

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Any:
        return self.behind(self, index)

    def drawn(self, index: int) -> Any:
        return self.transform(self.boxes[index])

    def drawn_dict(self, index: int) -> Any:
        return self.transform({"boxes": self.boxes[index], "image_id": index})


# ---- transforms ----


def drop(boxes: Any) -> Any:
    """Drops all boxes of few samples, and moves the others."""
    if isinstance(boxes, dict):
        return {**boxes, "boxes": drop(boxes["boxes"])}
    moved = boxes + torch.rand(())
    return moved if torch.rand(()) < 0.93 else moved[:0]


def drop_to_none(boxes: Any) -> Any:
    boxes = drop(boxes)
    return boxes if len(boxes) else None


def drop_to_one_none(sample: Any) -> Any:
    sample = drop(sample)
    return sample if len(sample["boxes"]) else None


def drop_as_list(boxes: Any) -> Any:
    return list(drop(boxes))


def rows_of_numpy(boxes: Any) -> Any:
    return drop(boxes).numpy()


def shift(boxes: Any) -> Any:
    """Never changes a shape."""
    return boxes + torch.rand(())


def shift_dict(sample: Any) -> Any:
    return {**sample, "boxes": shift(sample["boxes"])}


class Views(NamedTuple):
    first: Any
    second: Any


def two(boxes: Any) -> Any:
    return [shift(boxes), shift(boxes)]


def two_of_few(boxes: Any) -> Any:
    return [drop(boxes), drop(boxes)]


def one_seldom_none(boxes: Any) -> Any:
    return [drop_to_none(boxes) if torch.rand(()) < 0.1 else shift(boxes), shift(boxes)]


def two_dicts(sample: Any) -> Any:
    return [{"boxes": shift(sample["boxes"]), "flip": torch.rand(()) < 0.5} for _ in range(2)]


def two_named(boxes: Any) -> Any:
    return Views(shift(boxes), {"boxes": shift(boxes)})


def crops(boxes: Any) -> Any:
    """Two large crops and four small ones, as DINO has them."""
    return {"global": (shift(boxes), shift(boxes)), "local": [{"boxes": shift(boxes[:1])} for _ in range(4)]}


def two_of(boxes: Any, index: Any) -> Any:
    return shift(boxes), {"boxes": shift(boxes), "index": index}


def some(boxes: Any) -> Any:
    """A view more, now and then."""
    return [shift(boxes) for _ in range(2 + int(torch.rand(()) < 0.05))]


def with_a_key(sample: Any) -> Any:
    sample = shift_dict(sample)
    return sample | {"mirrored": True} if torch.rand(()) < 0.05 else sample


def one_or_two(boxes: Any) -> Any:
    return two(boxes) if torch.rand(()) < 0.95 else tuple(two(boxes))


def two_or_none(boxes: Any) -> Any:
    return [shift(boxes), shift(boxes) if torch.rand(()) < 0.5 else None]


# ---- code that depends on the result ----


def replaces_if_short(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return (boxes if len(boxes) else WHOLE), index


def replaces_in_the_dict(held: Boxes, index: int) -> Any:
    sample = held.drawn_dict(index)
    if not sample["boxes"].numel():
        sample["boxes"] = WHOLE
    return sample


def replaces_after_an_error(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    try:
        boxes.amax(0)
    except Exception:
        boxes = WHOLE
    return boxes, index


def replaces_after_any_error(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    try:
        boxes[0]
    except BaseException:
        boxes = WHOLE
    return boxes, index


def replaces_what_cannot_be_stacked(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    try:
        torch.cat([boxes, WHOLE])[len(WHOLE)]
        np.asarray(boxes)[0]
    except Exception as error:
        log.debug("no box", exc_info=error)
        boxes = WHOLE
    return boxes, index


def takes_the_next(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return held[(index + 1) % len(held)] if boxes.shape[0] == 0 else (boxes, index)


def takes_the_next_in_a_loop(held: Boxes, index: int) -> Any:
    while not len(boxes := held.drawn(index)):
        index = (index + 1) % len(held)
    return boxes, index


def tries_ten_times(held: Boxes, index: int) -> Any:
    for _ in range(10):
        boxes = held.drawn(index)
        if boxes.any():
            break
    return boxes, index


def counts(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return boxes, len(boxes)


def counts_in_the_dict(held: Boxes, index: int) -> Any:
    sample = held.drawn_dict(index)
    sample["count"] = sample["boxes"].size(0)
    return sample


def counts_rows(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return {"boxes": boxes, "labels": [1 for _ in boxes]}


def replaces_none(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return (WHOLE if boxes is None else boxes), index


def takes_the_next_for_none(held: Boxes, index: int) -> Any:
    while (boxes := held.drawn(index)) is None:
        index = (index + 1) % len(held)
    return boxes, index


def leaves_none_out(held: Boxes, index: int) -> Any:
    return [boxes for boxes in [held.drawn(index)] if boxes is not None], index


def asks_for_one_none(held: Boxes, index: int) -> Any:
    sample = held.drawn_dict(index)
    return {"boxes": WHOLE, "image_id": index} if sample is None else sample


def asks_for_its_class(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return (boxes if isinstance(boxes, torch.Tensor) else WHOLE), index


def asks_for_a_dunder_class(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return (boxes if boxes.__class__ is torch.Tensor else WHOLE), index


def asks_for_its_type(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return (boxes if type(boxes) is torch.Tensor else WHOLE), index


def notes_its_type(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return boxes, type(boxes).__name__


def compares(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return (WHOLE if (boxes > 1.93).any() else boxes), index


def compares_the_sum(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return (WHOLE if boxes.sum() < 6 else boxes), index


def matches(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    match boxes:
        case []:
            boxes = [WHOLE[0]]
    return boxes, index


def only_later(held: Boxes, index: int) -> Any:
    return held.drawn(index) if index < 20 else replaces_if_short(held, index)[0]


def takes_other_keys(held: Boxes, index: int) -> Any:
    sample = held.drawn_dict(index)
    return {"boxes": sample["boxes"], "has_boxes": bool(next(iter(sample.values())).numel())}


def computes_with_a_view(held: Boxes, index: int) -> Any:
    first, second = held.drawn(index)
    return first / 2, second


def drops_an_empty_view(held: Boxes, index: int) -> Any:
    return [view for view in held.drawn(index) if len(view)], index


def drops_no_view(held: Boxes, index: int) -> Any:
    first, second = held.drawn(index)
    return [first] if second is None else [first, second]


def notes_the_type_of_a_view(held: Boxes, index: int) -> Any:
    first, second = held.drawn(index)
    return first, second, type(first).__name__


def takes_views_as_they_come(held: Boxes, index: int) -> Any:
    return list(held.drawn(index)), index


def asks_for_a_key(held: Boxes, index: int) -> Any:
    sample = held.drawn_dict(index)
    return sample["boxes"], "mirrored" in sample


def notes_a_class(held: Boxes, index: int) -> Any:
    views = held.drawn(index)
    return [*views], type(views).__name__


LOST: dict[str, Boxes] = {
    behind.__name__: Boxes(behind, transform)
    for transform, functions in {
        drop: (
            *(replaces_if_short, replaces_in_the_dict, replaces_after_an_error, replaces_after_any_error),
            *(replaces_what_cannot_be_stacked, takes_the_next, takes_the_next_in_a_loop, tries_ten_times),
            *(counts, counts_in_the_dict, counts_rows, only_later, takes_other_keys),
        ),
        drop_to_none: (
            *(replaces_none, takes_the_next_for_none, leaves_none_out),
            *(asks_for_its_class, asks_for_a_dunder_class, asks_for_its_type, notes_its_type),
        ),
        drop_to_one_none: (asks_for_one_none,),
        drop_as_list: (matches,),
        shift: (compares, compares_the_sum),
        two: (computes_with_a_view,),
        two_of_few: (drops_an_empty_view,),
        two_or_none: (drops_no_view,),
        one_seldom_none: (notes_the_type_of_a_view,),
        some: (takes_views_as_they_come,),
        with_a_key: (asks_for_a_key,),
        one_or_two: (notes_a_class,),
    }.items()
    for behind in functions
}
"""Datasets that a cut would change."""


# ---- code that does not ----


def hands_on(held: Boxes, index: int) -> Any:
    return held.drawn(index), index


def hands_a_dict_on(held: Boxes, index: int) -> Any:
    return held.drawn_dict(index)


def takes_a_key(held: Boxes, index: int) -> Any:
    return [held.drawn_dict(index)["boxes"]], {"label": index}


def draws_two_views(held: Boxes, index: int) -> Any:
    return [held.drawn(index), held.drawn(index)], index


def draws_a_clip(held: Boxes, index: int) -> Any:
    return [held.drawn(index) for _ in range(100)]


def checks(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    assert boxes.ndim == 2
    return boxes, index


def logs(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    log.debug("boxes of %s", boxes.shape)
    return boxes, index


def remembers(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    held.sizes[:] = [boxes.nbytes]
    return boxes, index


def writes_into_the_dict(held: Boxes, index: int) -> Any:
    sample = held.drawn_dict(index)
    sample["area"] = 3
    return sample


def replaces_if_short_but_never_is(held: Boxes, index: int) -> Any:
    return replaces_if_short(held, index)


def notes_a_type(held: Boxes, index: int) -> Any:
    boxes = held.drawn(index)
    return boxes, type(boxes).__name__


def keeps_the_last(held: Any, index: int) -> Any:
    held.last = held.drawn(index)
    return held.last, index


def takes_two(held: Boxes, index: int) -> Any:
    first, second = held.drawn(index)
    return {"views": (first, second), "index": index}


def takes_one(held: Boxes, index: int) -> Any:
    views = held.drawn(index)
    return views[1], index


def takes_parts_of_each(held: Boxes, index: int) -> Any:
    """As lightly-train does."""
    views = held.drawn_dict(index)
    sample = {"name": f"{index}.jpg", "views": [view["boxes"] for view in views]}
    if views and all("flip" in view for view in views):
        sample["flips"] = [view["flip"] for view in views]
    return sample


def takes_by_name(held: Boxes, index: int) -> Any:
    views = held.drawn(index)
    return views.first, views.second["boxes"], index


def takes_all_crops(held: Boxes, index: int) -> Any:
    crops = held.drawn(index)
    return {"crops": [*crops["global"], *(crop["boxes"] for crop in crops["local"])], "index": index}


def takes_out(held: Boxes, index: int) -> Any:
    first, second = held.drawn_dict(index)
    return {"boxes": first.pop("boxes"), "rest": first, "others": [*second.values()]}


def zips(held: Boxes, index: int) -> Any:
    return [list(views) for views in zip(held.drawn(index), held.drawn(index), strict=True)]


def calls_by_keywords(held: Boxes, index: int) -> Any:
    view, other = held.transform(boxes=held.boxes[index], index=torch.tensor(index))
    return {"view": view, **other}


def calls_by_keyword(held: Boxes, index: int) -> Any:
    return held.transform(boxes=held.boxes[index]), index


def calls_all_by_keyword(held: Boxes, index: int) -> Any:
    return held.transform(img=held.boxes[index]), index


def makes_a_dict_of(held: Boxes, index: int) -> Any:
    return {**held.drawn_dict(index), "label": index}


BLIND: dict[str, Boxes] = {
    "two": Boxes(takes_two, two),
    "two of few": Boxes(takes_two, two_of_few),
    "one of two": Boxes(takes_one, two),
    "two dicts": Boxes(takes_parts_of_each, two_dicts),
    "two dicts, one of them changed": Boxes(takes_out, two_dicts),
    "two by name": Boxes(takes_by_name, two_named),
    "crops": Boxes(takes_all_crops, crops),
    "zipped": Boxes(zips, two),
    "by keywords": Boxes(calls_by_keywords, two_of),
    "by keyword": Boxes(calls_by_keyword, shift),
    "steps by keyword": Boxes(calls_all_by_keyword, Compose([nn.Identity(), shift, shift])),
    "another dict": Boxes(makes_a_dict_of, shift_dict),
    "two of parts": Boxes(takes_two, two) + Subset(Boxes(takes_one, two), range(5, 100)),  # type: ignore[dict-item]
    "hands_on": Boxes(hands_on),
    "hands_a_dict_on": Boxes(hands_a_dict_on),
    "draws_two_views": Boxes(draws_two_views),
    "draws_a_clip": Boxes(draws_a_clip, shift, length=20),
    "a list": Boxes(hands_on, drop_as_list),
    "of a subset": Subset(Boxes(hands_on), range(3, 70, 2)),  # type: ignore[dict-item]
    "of parts": Boxes(hands_on) + Boxes(hands_a_dict_on, shift_dict),  # type: ignore[dict-item]
}
"""Datasets whose code does not look at the results of their transform."""

LOOKING: dict[str, Boxes] = {
    behind.__name__: Boxes(behind, shift_dict if behind is writes_into_the_dict else shift)
    for behind in (
        checks,
        logs,
        remembers,
        notes_a_type,
        writes_into_the_dict,
        replaces_if_short_but_never_is,
        keeps_the_last,
    )
}
"""Datasets whose code looks at them, and makes nothing of it."""


# ---- operations ----

LOOKS: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "bool": bool,
    "not": lambda result: not result,
    "iter": iter,
    "next": next,
    "==": lambda result: result == 3,
    "== from the right": lambda result: 3 == result,  # noqa: SIM300
    "<": lambda result: result < 3,
    "in": lambda result: 3 in result,
    "in a list": lambda result: result in [1, 2],
    "in a set": lambda result: {result},
    "str": str,
    "format": lambda result: f"{result}",
    "%": lambda result: f"{result!r}",
    "getattr": lambda result: getattr(result, "shape", None),
    "hasattr": lambda result: hasattr(result, "shape"),
    "setattr": lambda result: setattr(result, "label", 1),
    "isinstance": lambda result: isinstance(result, torch.Tensor),
    "isinstance of an abstract class": lambda result: isinstance(result, Sequence),
    "__class__": lambda result: result.__class__,
    "a method": lambda result: result.numel(),
    "item": lambda result: result[0],
    "item to": lambda result: result.__setitem__(0, 1),
    "+": lambda result: result + 1,
    "+ from the right": lambda result: 1 + result,
    "-": lambda result: -result,
    "abs": abs,
    "int": int,
    "float": float,
    "index": lambda result: [1, 2][result],
    "hash": hash,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "numpy": np.asarray,
    "torch": torch.numel,
    "torch.is_tensor": torch.is_tensor,
    "dir": dir,
    "vars": vars,
    "with": lambda result: result.__enter__(),
    "unpack": lambda result: [*result],
}
"""Operations on a result."""

LOOKS_AT_A_DICT: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "bool": bool,
    "in": lambda result: "boxes" in result,
    "keys": lambda result: result.keys(),
    "values": lambda result: list(result.values()),
    "items": lambda result: dict(result.items()),
    "iter": list,
    "get": lambda result: result.get("mask"),
    "missing": lambda result: result["mask"],
    "set": lambda result: result.__setitem__("label", 1),
    "pop": lambda result: result.pop("image_id"),
    "update": lambda result: result.update(label=1),
    "dict": dict,
    "**": lambda result: {**result},
    "|": lambda result: result | {"label": 1},
    "==": lambda result: result == {},
    "copy": copy.copy,
    "str": str,
}
"""Operations on a result that is a dict."""
