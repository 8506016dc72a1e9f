"""The tables of messages in docs/troubleshooting.md: every warning of the package has a row, every row a warning."""

import ast
import re
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted((ROOT / "lightning_stocache").rglob("*.py"))
}
ANY = "\0"  # stands for what is known only while the program runs
DEEP = 10
# Functions that warn, or keep the reason of a warning, and which of their arguments has the words.
WORDS: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(["warning", "warn", "_warn_once", "_tell", "_report", "pass_through"], (0,)),
    **{
        "warn_of_odd": (1,),
        "Look": (2,),
        "pass_by": (1, 2),
        "warnings.append": (0,),
        "reports.send": (0,),
    },
    **{"Finding": ("reason", "note"), "Split": ("reason",)},
    # Errors whose words become the reason of a warning.
    **dict.fromkeys(["UncuttableError", "UnsupportedSampleError", "SampleMismatchError", "FirstSampleError"], (0,)),
    **dict.fromkeys(["ChildProcessError", "HungError", "UnsharedError", "NoProcessError", "FaultError"], (0,)),
    **dict.fromkeys(["FingerprintError", "ManifestError", "CacheMemoryError", "DiskError", "PermissionError"], (0,)),
}
# Functions whose results, or the errors that they raise, are reasons.
REASONS = {
    *("cacheable_length", "check_loader", "length_of", "finding", "reason_of"),
    *("check_stream", "why_not_worth", "_look_at_batch", "stream_difference", "look_at_files"),
}
UNSEEN = ("manifest must fit", "which cannot be packed", "the new part of", f"{ANY} cannot be cached: ")  # no warnings
# What stands before a reason. A row may show it.
BEFORE = (
    *("passes through uncached: ", "cannot be split: ", "loaded every time. ", "as bytes: "),
    *("uncounted: ", "be cached: "),
)
BEFORE_ANY = tuple(f"{before}{ANY}" for before in BEFORE if before not in ("cannot be split: ", "uncounted: "))


class Scope(NamedTuple):
    """Where a name is looked up: in a function of a module, then in the module, then where it is imported from."""

    module: str
    function: Any

    def values(self, node: Any) -> list[Any]:
        """What a name or attribute is set to."""
        name, is_name = _name(node), isinstance(node, ast.Name)
        found = _assigned(self.function).get(name, [])
        homes = self.homes(name) if not found else []
        return found or [value for home in homes for value in _assigned(MODULES[home], is_name).get(name, [])]

    def homes(self, name: str) -> list[str]:
        """The modules where a name may come from."""
        imports = (node for node in ast.walk(MODULES[self.module]) if isinstance(node, ast.ImportFrom))
        others = [str(node.module) for node in imports if name in [alias.name for alias in node.names]]
        return [self.module, *(module for module in others if module in MODULES)]

    def results(self, function: Any) -> list[tuple[Any, "Scope"]]:
        """What a function that is called may return, and the scope of that."""
        name = _name(function)
        if name == "format_bytes":
            return []
        homes = self.homes(name) if isinstance(function, ast.Name) else MODULES
        return [result for home in homes for result in _results(home).get(name, [])]


def _name(node: Any) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


@cache
def _assigned(inside: Any, at_its_level: bool = False) -> dict[str, list[Any]]:
    """What the names and attributes in a function or module are set to."""
    found: dict[str, list[Any]] = {}
    for node in ast.iter_child_nodes(inside) if at_its_level else ast.walk(inside):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs: Any = zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
            for each, value in pairs:
                found.setdefault(_name(each), []).append(value)
    return found


@cache
def _results(module: str) -> dict[str, list[tuple[Any, Scope]]]:
    """What the functions of a module may return."""
    found: dict[str, list[tuple[Any, Scope]]] = {}
    for function in (node for node in ast.walk(MODULES[module]) if isinstance(node, ast.FunctionDef)):
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        found.setdefault(function.name, []).extend((value, Scope(module, function)) for value in returned)
    return found


@cache
def texts(node: Any, scope: Scope, deep: int = DEEP) -> set[str]:
    """What an expression may be, with ANY for whatever is not known."""
    if deep == 0:
        return {ANY}
    if isinstance(node, ast.Constant):
        return {re.sub(r"%(\.\d+)?[a-z]|{}", ANY, node.value)} if isinstance(node.value, str) else {ANY}
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
        several = product(*(sorted(texts(part, scope, deep - 1)) for part in parts))
        return {"".join(words) for words in islice(several, 64)}
    if isinstance(node, ast.Call) and _name(node.func) == "format":
        alternatives = [texts(node.func.value, scope, deep - 1)]  # type: ignore[attr-defined]
    elif isinstance(node, ast.Call):
        alternatives = [texts(value, inside, deep - 2) for value, inside in scope.results(node.func) if deep > 2]
    else:
        alternatives = [texts(value, scope, deep - 1) for value in _alternatives(node, scope)]
    return set().union(*alternatives) or {ANY}


def _alternatives(node: Any, scope: Scope) -> list[Any]:
    match node:
        case ast.FormattedValue(format_spec=None) | ast.Subscript():
            return [node.value]
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BinOp(op=ast.Mod()):
            return [node.left]
        case ast.BoolOp() | ast.Dict():
            return node.values
        case ast.Tuple() | ast.List():
            return node.elts
        case ast.Name() | ast.Attribute():
            return scope.values(node)
    return []


@cache
def messages() -> set[str]:
    """Every warning of the package, and every reason in one."""
    found = set[str]()
    for module, tree in MODULES.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            scope, gives_reasons = Scope(module, function), function.name in REASONS
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    name, owner = _name(node.func), _name(getattr(node.func, "value", None))
                    named = {keyword.arg: keyword.value for keyword in node.keywords} | dict(enumerate(node.args))
                    where = WORDS.get(f"{owner}.{name}", WORDS.get(name, ()))
                    if isinstance(named.get(0), ast.Constant) and named[0].value == "%s: %s":
                        where = (2,)
                    given = [named[key] for key in where if key in named]
                elif gives_reasons and isinstance(node, ast.Return | ast.Raise):
                    raised = getattr(node, "exc", None)
                    given = list(raised.args) if isinstance(raised, ast.Call) else [getattr(node, "value", None)]
                else:
                    continue
                found |= {words for value in given if value is not None for words in texts(value, scope)}
    said = {words for words in found if len(re.findall("[A-Za-z]{2,}", words)) > 1 and not words.endswith(BEFORE_ANY)}
    return {words for words in said if not any(unseen in words for unseen in UNSEEN)}


def rows() -> list[str]:
    """The messages in the first column of the tables."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    return [row for cell in cells for row in re.findall("`([^`]+)`", cell)]


def begins_as(row: str) -> re.Pattern[str]:
    """The pattern of what a row shows. If it shows a reason, this alone."""
    for before in BEFORE:
        reason = row.rpartition(before)[2]
        row = reason if reason.strip(". ") else row
    return re.compile(".*".join(map(re.escape, row.split("..."))), re.DOTALL)


def test_every_message_has_a_row():
    """A warning that begins in another way than all rows is not in the tables yet."""
    patterns = list(map(begins_as, rows()))
    missing = [words for words in sorted(messages()) if not any(pattern.match(words) for pattern in patterns)]
    assert not missing


def test_every_row_has_a_message():
    """A row that shows no message of the package is about one that has left, or was changed."""
    known = messages()
    assert not [row for row in rows() if not any(begins_as(row).match(words) for words in known)]
