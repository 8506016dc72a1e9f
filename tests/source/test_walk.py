"""What the code of a source reaches, and the values that it reaches by name."""

import dis
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.source.walk import MISSING, reachable, read_code, variables_of

gain = 1.0


class Holder:
    level = 0

    def __init__(self, held: Any) -> None:
        self.held: Any = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def closure(held: Any) -> Callable[[], Any]:
    return lambda: held


def module_of_the_user() -> Any:
    module = types.ModuleType("a_module_of_the_user")
    vars(module)["gain"] = 1.0
    return module


SETTINGS = module_of_the_user()


def of_globals() -> Any:
    return gain, SETTINGS.gain


NAMED: list[tuple[Any, str]] = [
    (Holder(1.0), "held"),
    (Holder, "level"),
    (Slotted(1.0), "held"),
    (closure(1.0), "held"),
    (of_globals, "gain"),
]


@pytest.mark.parametrize(("node", "name"), NAMED)
def test_values_by_name_are_read_written_and_removed(node: Any, name: str) -> None:
    """Attributes of objects and classes, in slots, too; closures; globals, also of a module that code names."""
    found = [variables for variables in variables_of("path", node) if name in variables.read()]
    assert len(found) == 1 + (node is of_globals)
    for variables in found:
        before = variables[name]
        variables[name] = 7.0
        assert variables[name] == 7.0
        variables[name] = MISSING
        assert variables[name] is MISSING
        variables[name] = before
        assert variables.only({name}).read() == {name: before}
        assert variables.only(()).read() == {}


def test_code_tells_its_names() -> None:
    """Of the functions inside it, too; a name of an attribute is no global."""

    def code(node: Any) -> Any:
        node.level = gain
        return [part.of_globals for part in node], lambda: SETTINGS["text"]

    found = read_code(code.__code__)
    assert found.globals == {"gain", "SETTINGS"}
    assert found.names >= {"gain", "SETTINGS", "level", "of_globals"}
    assert (found.written, "text" in found.texts) == ({"level"}, True)


def test_code_of_many_names_is_read_as_dis_reads_it() -> None:
    """An argument of more than a byte has its upper bits in operations before it."""
    lines = [f"    global made{number}\n    made{number} = given.a{number} = there{number}" for number in range(200)]
    scope: dict[str, Any] = {}
    exec("def code(given):\n" + "\n".join(lines), scope)
    steps = list(dis.get_instructions(scope["code"]))
    found = read_code(scope["code"].__code__)
    assert found.globals == {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    assert found.written == {step.argval for step in steps if step.opname == "STORE_ATTR"}
    assert len(found.globals) == 400


def test_a_large_or_circular_source_ends_and_a_proxy_is_not_made_to_load() -> None:
    """Of many items the first are looked at; an object that answers to every question by an error is passed over."""
    source = Holder([[] for _ in range(100_000)])
    source.me = source
    assert len(list(reachable(source))) < 20_001

    class Proxy:
        __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("loaded")

    assert len(list(reachable(Holder(Proxy())))) > 1


def test_an_installed_package_does_not_lead_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs for itself, for instance to draw charts, makes no sample. The code of users leads to it."""
    folder = tmp_path / "site-packages"
    for name, code in (
        ("charts", "colours = [1]"),
        ("shapes", "import charts\n\ndef turn(): return charts.colours, own"),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"{code}\nown = ['{name}']\n")
    monkeypatch.syspath_prepend(str(folder))
    shapes: Any = importlib.import_module("shapes")
    charts = sys.modules["charts"]
    try:
        found = {id(node) for _, node in reachable(Holder(shapes.turn))}
        assert id(shapes.own) in found
        assert id(charts.colours) not in found
        ours = eval("lambda: charts.colours", {"charts": charts})  # code of no installed package
        assert id(charts.colours) in {id(node) for _, node in reachable(Holder(ours))}
    finally:
        del sys.modules["shapes"], sys.modules["charts"]
