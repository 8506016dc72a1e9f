"""Check that an installed wheel is complete: `python check_wheel.py CHECKOUT ENVIRONMENT`, run outside the checkout."""

import sys
from importlib.metadata import files
from importlib.resources import files as resources
from pathlib import Path

import lightning_stocache

checkout, environment = (Path(argument).resolve() for argument in sys.argv[1:])
home = Path(lightning_stocache.__file__).resolve().parent
assert home.is_relative_to(environment), f"{home} is not the installed wheel"
assert {"torch", "lightning"}.isdisjoint(sys.modules), "importing the package imports torch or Lightning"

for name in lightning_stocache.__all__:
    getattr(lightning_stocache, name)
assert (home / "py.typed").is_file()
assert (home / "insight" / "report.html").is_file()

configs = resources("lightning_stocache.configs")
shipped = {str(path.relative_to(str(configs))) for path in Path(str(configs)).rglob("*.yaml")}
written = {str(path.relative_to(checkout / "configs")) for path in (checkout / "configs").rglob("*.yaml")}
assert shipped == written, f"the wheel differs from configs/ in {sorted(shipped ^ written)}"

installed = list(files("lightning-stocache") or ())
tops = {path.parts[0] for path in installed if ".dist-info" not in path.parts[0]}
assert tops == {"lightning_stocache", ".."}, f"the wheel installs {sorted(tops)}"
scripts = [path.name for path in installed if path.parts[0] == ".."]
assert scripts == ["stocache"], f"the wheel installs the commands {scripts}"

from hydra import compose, initialize_config_module  # noqa: E402
from hydra.utils import instantiate  # noqa: E402

with initialize_config_module("lightning_stocache.configs", version_base="1.3"):
    callbacks = instantiate(compose("callbacks/stochastic_cache").callbacks)
print(f"lightning-stocache {lightning_stocache.__version__}: {len(shipped)} YAML files, {', '.join(callbacks)}")
