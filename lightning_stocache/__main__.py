"""The command line: `stocache <command>`, or `python -m lightning_stocache <command>`.

Each command is one function in `COMMANDS`: it declares its arguments, and returns the function that runs with them. Its
docstring is its help. It imports its modules when it runs, so that `--help` is fast. Wrong input gives one sentence on
stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

__all__ = ["COMMANDS", "main"]

Action: TypeAlias = Callable[[argparse.Namespace], None]
# The extra that installs a module.
_EXTRAS = {"matplotlib": "report", "jinja2": "report", "tensorboard": "tensorboard", "lmdb": "lmdb"}
_STOPPED = "stopped; the same command continues from here"


def plan(parser: argparse.ArgumentParser) -> Action:
    """Measure your data and model, by your Hydra configs, and calculate the gain of each budget."""
    _add_config(parser)
    workers, sizes = "also measure these numbers of workers", "also measure these batch sizes"
    parser.add_argument("--workers", type=_numbers_from(0), default=[], metavar="N,N,..", help=workers)
    parser.add_argument("--batch-sizes", type=_numbers_from(1), default=[], metavar="N,N,..", help=sizes)
    pinning = "also measure with and without pin_memory"
    parser.add_argument("--pin-memory", action="store_const", const=[False, True], default=[], help=pinning)
    threads = "the number that your app gives torch.set_num_threads (default: torch's own number)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)
    picture = "also draw the table and the curves (default: plan.png); needs matplotlib"
    parser.add_argument("--png", type=Path, nargs="?", const=Path("plan.png"), help=picture)

    def run(arguments: argparse.Namespace) -> None:
        with _refusing(parser, Exception):  # configs, data and model belong to the user, and may raise any error
            _plan(arguments)

    return run


def fill(parser: argparse.ArgumentParser) -> Action:
    """Fill the caches of a name, by your Hydra configs, before a job. If you stop it, the same command goes on."""
    _add_config(parser)
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load (default: this one)")

    def run(arguments: argparse.Namespace) -> None:
        if arguments.workers < 0:
            parser.error(f"--workers must be a whole number from 0 on, got {arguments.workers}")
        from lightning_stocache.training.caches import CallCaches
        from lightning_stocache.training.fill import fill
        from lightning_stocache.training.plan_inputs import as_datamodule

        logging.disable(logging.INFO)
        is_complete = True
        with _refusing(parser, Exception), TemporaryDirectory() as folder, _continuing(parser):
            config = _composed(arguments, folder)
            datamodule = as_datamodule(_instantiated(config, "data"))
            caching = _caching_callback(config)
            caches = getattr(datamodule if caching is None else caching, "caches", None)
            if not isinstance(caches, CallCaches):
                raise ValueError("the config caches nothing: it has no StocacheDataModule and no StochasticCache")
            for line, is_whole in fill(datamodule, caches, arguments.workers):
                _say(line)
                is_complete = is_complete and is_whole
        if not is_complete:
            parser.exit(1)

    return run


def report(parser: argparse.ArgumentParser) -> Action:
    """Write one HTML page about the caches of the runs in these folders."""
    folders = "folder of a run, or a folder above several runs"
    parser.add_argument("folders", metavar="RUN_DIR", nargs="+", type=Path, help=folders)
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")

    def run(arguments: argparse.Namespace) -> None:
        with _refusing(parser, ValueError, ModuleNotFoundError, OSError):
            from lightning_stocache.insight.report import report

            left_out = report(arguments.folders, arguments.output)
        for sentence in left_out:
            sys.stderr.write(f"{parser.prog}: left out: {sentence}\n")
        _say(str(arguments.output))

    return run


def pack(parser: argparse.ArgumentParser) -> Action:
    """Pack a source of your Hydra configs into one LMDB for LMDBSource. If you stop it, the same command goes on."""
    parser.add_argument("path", metavar="OUT.lmdb", type=Path, help="a new file, or a file that is partly packed")
    _add_config(parser)
    key = "the source in the config, such as data.val (default: data). The source of a DataModule is its training set"
    parser.add_argument("--source", default="data", metavar="KEY", help=key)
    parser.add_argument("--encoded", action="store_true", help="pack image files, without the source's transform")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load (default: this one)")
    fingerprint = "a text for what else decides the samples; a file packed with another text is refused"
    parser.add_argument("--fingerprint", default="", help=fingerprint)
    random = "pack random samples; each sample stays as it is drawn now"
    parser.add_argument("--freeze-random", action="store_true", help=random)

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.source.pack import pack
        from lightning_stocache.training.plan_inputs import take_source

        chosen = {name: getattr(arguments, name) for name in ("encoded", "workers", "fingerprint", "freeze_random")}
        with _refusing(parser, Exception), TemporaryDirectory() as folder, _continuing(parser):
            source = take_source(_instantiated(_composed(arguments, folder), arguments.source))
            written = pack(source, arguments.path, progress=True, **chosen)
        size = arguments.path.stat().st_size
        _say(f"{arguments.path}: {len(source):,} samples, {written:,} of them now, {size:,} bytes")

    return run


def doctor(parser: argparse.ArgumentParser) -> Action:
    """Report how much memory a cache may take here, which processes hold memory, and how to get more of it."""
    _add_directories(parser, "also check a directory on a disk; may be repeated")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.insight.doctor import as_text, examine

        with _refusing(parser, OSError):
            _say(as_text(examine(directories=arguments.dir)))

    return run


def list_(parser: argparse.ArgumentParser) -> Action:
    """List the named caches of this user on this node, by job."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="only the caches or jobs of these names")
    _add_directories(parser, "also list the caches in a directory on a disk; may be repeated")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.insight.inventory import named_lines

        _check_directories(parser, arguments.dir)
        for directory in (None, *arguments.dir):
            for line in named_lines(arguments.names, directory):
                _say(line)

    return run


def clean(parser: argparse.ArgumentParser) -> Action:
    """Remove named caches that no process uses."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="only the caches or jobs of these names")
    parser.add_argument("--dir", metavar="DIR", help="remove caches in this directory on a disk, not in memory")
    parser.add_argument("--yes", action="store_true", help="do not ask")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.console import wrapped
        from lightning_stocache.insight.inventory import caches_in, count, describe, of_jobs
        from lightning_stocache.node.named import clean

        _check_directories(parser, [] if arguments.dir is None else [arguments.dir])
        known = of_jobs(arguments.names, caches_in(arguments.dir))
        dead = [cache for cache in known if not cache.in_use]
        for name in arguments.names:
            if not of_jobs([name], dead):
                why = "is in use" if of_jobs([name], known) else "does not exist"
                parser.exit(2, f"{parser.prog}: the cache {name!r} {why}; stocache list\n")
        for cache in known:
            _say(wrapped(f"{'stays, ' if cache.in_use else ''}{describe(cache)}"))
        if dead and not arguments.yes:
            sys.stdout.write(f"remove {count(dead)}? [y/N] ")
            sys.stdout.flush()
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):  # a script that answers nothing: an empty line
                _say("nothing removed; --yes removes without asking")
                parser.exit(1)
        removed = [segment for cache in dead for segment in clean(cache.name, arguments.dir)]
        _say(f"removed {count(removed)}" if dead else "nothing to remove")

    return run


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Action]] = {
    "plan": plan,
    "fill": fill,
    "doctor": doctor,
    "report": report,
    "list": list_,
    "clean": clean,
    "pack": pack,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of these arguments (default: the command line of this process)."""
    import lightning_stocache

    about = "Stochastic caching for PyTorch Lightning."
    parser = argparse.ArgumentParser(prog="stocache", description=about)
    parser.add_argument("--version", action="version", version=f"lightning-stocache {lightning_stocache.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        text = command.__doc__ or ""
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.set_defaults(run=command(subparser))
    chosen, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(chosen, "overrides") or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides that stand between options
        chosen.overrides += rest
    try:
        chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`; Python flushes stdout once more when it exits
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="overrides of Hydra: data=photos model=conv")
    parser.add_argument("--config-dir", type=Path, help="folder of your configs; modules beside it can be imported")
    parser.add_argument("--config-name", help="your primary config there (default: this package's `train`)")


def _add_directories(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument("--dir", metavar="DIR", action="append", default=[], help=purpose)


def _check_directories(parser: argparse.ArgumentParser, directories: Sequence[str]) -> None:
    """End with one sentence where there can be no named caches."""
    if sys.platform == "win32":
        parser.exit(2, f"{parser.prog}: Windows has no named caches\n")
    for directory in directories:
        if not os.path.isdir(directory):
            parser.exit(2, f"{parser.prog}: --dir {directory!r} is not a directory\n")


def _numbers_from(least: int) -> Callable[[str], list[int]]:
    """Reads "1,2,4", numbers that are not below the least."""

    def numbers(text: str) -> list[int]:
        found = [int(word) for word in text.split(",")]
        if min(found) < least:
            raise argparse.ArgumentTypeError(f"must be whole numbers from {least} on, got {text!r}")
        return found

    return numbers


@contextmanager
def _continuing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Let Ctrl-C end a command that continues where it was stopped."""
    try:
        yield
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: {_STOPPED}\n")


@contextmanager
def _refusing(parser: argparse.ArgumentParser, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into one sentence on stderr and exit code 2."""
    try:
        yield
    except kinds as error:
        parser.exit(2, f"{parser.prog}: {_one_line(error)}\n")


def _one_line(error: Exception) -> str:
    """The message of an exception in one line, without Hydra's lines about classes.

    Hydra wraps an error of the user's own constructor. Then the line has the key in the config and the wrapped error.
    """
    words = []
    if type(error).__name__ == "InstantiationException":
        words.append(f"{str(error).partition('full_key: ')[2].strip()}:")
    while type(error).__name__ == "InstantiationException" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text, package = str(error).partition("\nConfig search path")[0], type(error).__module__.partition(".")[0]
    if package in ("hydra", "omegaconf"):
        about_classes = r"\s*(full_key|object_type|reference_type)[:=].*|, set env var.*"
        text = re.sub(about_classes, "", text)
    elif isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        text += f' (pip install "lightning-stocache[{extra}]")' if extra else ""
    elif package != "lightning_stocache":
        words.append(f"{type(error).__name__}:")
    return " ".join([*words, *text.split()])


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _plan(arguments: argparse.Namespace) -> None:
    """Print the plan for the data and model of the configs, and draw it.

    The warnings of Lightning and of this package are silenced: they are about training, and `plan` only measures.
    """
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from lightning_stocache.insight.measurement import measure, measure_curves
    from lightning_stocache.insight.plan import as_text, curves_as_text, plan, save
    from lightning_stocache.training import plan_inputs

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    steps, curves = None, None
    with TemporaryDirectory() as folder:  # into which a Trainer writes
        config = _composed(arguments, folder)
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        datamodule = plan_inputs.as_datamodule(_instantiated(config, "data"))
        options = dict(config.get("trainer") or {})
        nodes, ranks = plan_inputs.world(options)
        data = replace(plan_inputs.take_training_data(datamodule), nodes=nodes, ranks=ranks)
        paces = measure(data)
        if config.get("model") is not None:
            base = {"_target_": "lightning.pytorch.Trainer"}
            trainer = instantiate(OmegaConf.merge(base, options, plan_inputs.ARGUMENTS, {"default_root_dir": folder}))
            with redirect_stdout(sys.stderr):  # the Trainer's progress bar
                steps = plan_inputs.measure_steps(trainer, instantiate(config.model), datamodule, data)
        sweeps = arguments.workers, arguments.batch_sizes, arguments.pin_memory
        if any(sweeps):
            curves = measure_curves(data, *sweeps, progress=lambda line: sys.stderr.write(f"{line}\n"))
            _say(f"{curves_as_text(curves)}\n")
    epochs = options.get("max_epochs")
    planned = plan(data, paces, steps, epochs if isinstance(epochs, int) and epochs > 0 else None)
    # A config without a group `cache`, as that of a template's app, takes the option with a plus.
    _say(f"{as_text(planned)}\n\n{'' if 'cache' in config else '+'}cache.budget={planned.budget}")
    if arguments.png is not None:
        save(planned, arguments.png, curves)
        sys.stderr.write(f"{arguments.png}\n")


def _instantiated(config: Any, key: str) -> Any:
    """The object that the config describes under a key.

    Raises:
        PlanError: the config has nothing there.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from lightning_stocache.insight.measurement import PlanError

    if (node := OmegaConf.select(config, key)) is None:
        raise PlanError(f"the config has no `{key}`: give data=NAME of --config-dir, such as examples/configs")
    return instantiate(node)


def _caching_callback(config: Any) -> Any:
    """The StochasticCache among the callbacks of the config; None if there is none. No other callback is created."""
    from hydra.utils import get_object, instantiate

    from lightning_stocache.training.callbacks import StochasticCache

    for callback in (config.get("callbacks") or {}).values():
        target = get_object(callback["_target_"]) if callback and "_target_" in callback else None
        kind = getattr(target, "__self__", target)  # `StochasticCache.from_options` is a method of the class
        if isinstance(kind, type) and issubclass(kind, StochasticCache):
            return instantiate(callback)
    return None


def _composed(arguments: argparse.Namespace, folder: str) -> Any:
    """The config, composed as in a Hydra app that runs in this directory and writes its files into the folder."""
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from lightning_stocache.insight.measurement import PlanError

    overrides, where = list(arguments.overrides), arguments.config_dir
    if where is not None:
        if not where.is_dir():
            raise PlanError(f"--config-dir must be a folder of configs, got {where}")
        sys.path[:0] = [str(where.resolve().parent)]
    if arguments.config_name is not None:
        if where is None:
            raise PlanError(f"--config-name={arguments.config_name} needs the folder that it lies in: --config-dir")
        begun: Any = initialize_config_dir(str(where.resolve()), version_base="1.3")
    else:
        groups = {re.split("[.@=]", override.lstrip("+~"))[0] for override in overrides}
        if "data" not in groups:
            raise PlanError("name your data: data=NAME --config-dir FOLDER, for the file FOLDER/data/NAME.yaml")
        begun = initialize_config_module("lightning_stocache.configs", version_base="1.3")
        if "model" not in groups:
            Path(folder, "model").mkdir()  # a group that nobody has cannot be left out
            overrides.append("~model")
        places = [f"'file://{Path(place).resolve()}'" for place in (where, folder) if place is not None]
        overrides.append(f"hydra.searchpath=[{','.join(places)}]")
    with begun:
        config = compose(arguments.config_name or "train", overrides, return_hydra_config=True)
    with open_dict(config):
        config.hydra.runtime.output_dir, config.hydra.runtime.cwd = folder, os.getcwd()
        HydraConfig.instance().set_config(config)
        del config["hydra"]
    return config


if __name__ == "__main__":
    main()
