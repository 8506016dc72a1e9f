"""The command line: `python -m lightning_stocache <command>`.

Each command is one function, listed in `COMMANDS`: it is given its own parser, declares its arguments, and returns what
is to be run with them. Its docstring is its help. What a command needs is imported when it runs, so that `--help`
costs nothing. Input that is no good is one sentence on stderr and exit code 2; a traceback is a bug of ours.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightning_stocache.housekeeping import clean, doctor, list_
from lightning_stocache.terminal import add_png, numbers, one_line, progress, say

if TYPE_CHECKING:
    from lightning_stocache.insight.curves import Curves
    from lightning_stocache.insight.planner import Plan

__all__ = ["COMMANDS", "main"]

Action = Callable[[argparse.Namespace], None]
_BESIDE = Path()  # the page: what report's --png is without a path


def report(parser: argparse.ArgumentParser) -> Action:
    """Show what the cache gave: one HTML page of the runs in these folders."""
    parser.add_argument(
        "folders", metavar="RUN_DIR", nargs="+", type=Path, help="folder of a run, or one above several"
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    add_png(parser, _BESIDE, "the same panels as a picture, too; by default beside the page")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.insight.report import report
        from lightning_stocache.insight.runs import LogError

        png = arguments.output.with_suffix(".png") if arguments.png == _BESIDE else arguments.png
        try:
            left_out = report(arguments.folders, arguments.output, png)
        except (LogError, ModuleNotFoundError, OSError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        for sentence in left_out:
            sys.stderr.write(f"{parser.prog}: left out: {sentence}\n")
        for path in (arguments.output, png):
            if path is not None:
                sys.stdout.write(f"{path}\n")

    return run


def plan(parser: argparse.ArgumentParser) -> Action:
    """Say what a budget would give before it is paid, for your own data and model, by Hydra's configs."""
    _add_config(parser)
    parser.add_argument("--workers", type=numbers, default=[], metavar="N,N,..", help="measure these num_workers, too")
    parser.add_argument("--batch-sizes", type=numbers, default=[], metavar="N,N,..", help="and these batch sizes")
    threads = "threads of torch, if not those that the app beside your configs sets (torch.set_num_threads)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)
    parser.add_argument("--json", action="store_true", help="plain values instead of the table")
    drawn = "seconds per epoch over the budget, and the curves, as a picture; by default plan.png"
    add_png(parser, Path("plan.png"), drawn)

    def run(arguments: argparse.Namespace) -> None:
        import torch

        from lightning_stocache.insight.curves import as_text as curves_as_text
        from lightning_stocache.insight.plan_table import as_json, as_text, save

        before = torch.get_num_threads()
        logging.disable(logging.WARNING)
        ours, heard = logging.getLogger("lightning_stocache"), logging.NullHandler()
        ours.addHandler(heard)  # without one, the caches of the measurements are told of on stderr
        try:
            with warnings.catch_warnings(), TemporaryDirectory() as folder:
                warnings.simplefilter("ignore")  # Lightning's advice is about training, of which this is none
                made, curves = _planned(arguments, folder)
            if arguments.json:
                say(as_json(made, curves))
            else:  # the last line stays the plan's, for the config
                say(("" if curves is None else curves_as_text(curves) + "\n\n") + as_text(made))
            if arguments.png is not None:
                save(made, arguments.png, curves)
                sys.stderr.write(f"{arguments.png}\n")
        except Exception as error:  # configs, data and model are the user's, and may raise anything
            parser.exit(2, f"{parser.prog}: {one_line(error)}\n")
        finally:
            torch.set_num_threads(before)
            logging.disable(logging.NOTSET)
            ours.removeHandler(heard)

    return run


def pack(parser: argparse.ArgumentParser) -> Action:
    """Pack a source of your Hydra configs into one LMDB, for LMDBSource. Stopped, the same command goes on."""
    parser.add_argument("path", metavar="OUT.lmdb", type=Path, help="a file that does not exist, or is packed in part")
    _add_config(parser)
    which = "of the config: data.val, for instance; of a DataModule, as `data` is (the default), the training set"
    parser.add_argument("--source", default="data", metavar="KEY", help=which)
    parser.add_argument("--encoded", action="store_true", help="images as their files, without the source's transform")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load (default: this one)")
    parser.add_argument("--fingerprint", default="", help="a word for whatever else decides what the samples are")
    parser.add_argument("--allow-random", action="store_true", help="pack random samples, their first draw frozen")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.source.pack import pack
        from lightning_stocache.training.plan_inputs import source_in

        chosen = {name: getattr(arguments, name) for name in ("encoded", "workers", "fingerprint", "allow_random")}
        try:
            with TemporaryDirectory() as folder:
                source = source_in(_instantiated(arguments, folder))
            written = pack(source, arguments.path, progress=True, **chosen)
        except KeyboardInterrupt:
            parser.exit(130, f"{parser.prog}: stopped; the same command goes on where it was\n")
        except Exception as error:  # configs and data are the user's, and may raise anything
            parser.exit(2, f"{parser.prog}: {one_line(error)}\n")
        size = arguments.path.stat().st_size
        say(f"{arguments.path}: {len(source):,} samples, {written:,} of them now, {size:,} bytes")

    return run


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="as Hydra takes them: data=photos model=conv")
    parser.add_argument("--config-dir", type=Path, help="folder of your configs; modules beside it are found")
    parser.add_argument("--config-name", help="your primary config there (default: this package's `train`)")


def _instantiated(arguments: argparse.Namespace, folder: str) -> Any:
    """What the config has under the key that was asked for."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from lightning_stocache.insight.measurement import PlanError

    if (node := OmegaConf.select(_composed(arguments, folder), arguments.source)) is None:
        raise PlanError(f"the config has no `{arguments.source}`; data=photos --config-dir examples/configs gives one")
    return instantiate(node)


def _planned(arguments: argparse.Namespace, folder: str) -> tuple[Plan, Curves | None]:
    """The plan for what the configs describe, and curves if asked for; what a Trainer leaves goes to the folder."""
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from lightning_stocache.insight.curves import check_numbers, measure_curves
    from lightning_stocache.insight.measurement import PlanError, cached_bytes, measure
    from lightning_stocache.insight.planner import Job, plan
    from lightning_stocache.node.free import FreeMemory
    from lightning_stocache.training.plan_inputs import (
        ARGUMENTS,
        app_threads,
        datamodule_of,
        measure_step,
        training_data,
        world,
    )

    asked = arguments.workers, arguments.batch_sizes
    check_numbers(*asked)
    config = _composed(arguments, folder)
    if config.get("data") is None:
        raise PlanError("the config has no `data`; give yours, for instance data=photos --config-dir examples/configs")
    if arguments.threads is not None:
        threads_from = "--threads"
        torch.set_num_threads(arguments.threads)
    elif arguments.config_dir is not None and (read := app_threads(arguments.config_dir.resolve().parent, config)):
        threads_from = f"as {read[1]} sets them"
        torch.set_num_threads(read[0])
    else:
        threads_from = "torch's default; --threads if your app sets others"
    trainer = dict(config.get("trainer") or {})
    datamodule = datamodule_of(instantiate(config.data))
    data = training_data(datamodule)
    nodes, ranks = world(trainer)
    paces = measure(data, ranks=ranks)
    step = None
    if config.get("model") is not None:
        base = {"_target_": "lightning.pytorch.Trainer"}
        made = instantiate(OmegaConf.merge(base, trainer, ARGUMENTS, {"default_root_dir": folder}))
        step = measure_step(made, instantiate(config.model), datamodule, data)
    job = Job(
        samples=len(data.source),  # type: ignore[arg-type]
        batch_size=data.batch_size,
        num_workers=data.num_workers,
        nodes=nodes,
        ranks=ranks,
        mode=data.mode,
        other_bytes=sum(map(cached_bytes, data.others)),
        safe_bytes=data.safe_bytes(paces.codec.nbytes if paces.codec is not None else 0, ranks),
        free_bytes=FreeMemory.measure(None).bytes,
        threads=torch.get_num_threads(),
        threads_from=threads_from,
    )
    curves = measure_curves(data, *asked, progress=progress) if any(asked) else None
    return plan(job, paces, step), curves


def _composed(arguments: argparse.Namespace, folder: str) -> Any:
    """The config, resolved as in a Hydra app that runs in this directory and leaves its files in the folder."""
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
        begun = initialize_config_module("lightning_stocache.configs", version_base="1.3")
        if where is not None:
            overrides.append(f"hydra.searchpath=['file://{where.resolve()}']")
        named = [override.lstrip("+~").partition("=")[0] for override in overrides]
        if not any(re.split("[.@]", name)[0] == "model" for name in named):
            overrides.append("~model")
    with begun:
        config = compose(arguments.config_name or "train", overrides, return_hydra_config=True)
    with open_dict(config):
        config.hydra.runtime.output_dir, config.hydra.runtime.cwd = folder, os.getcwd()
        HydraConfig.instance().set_config(config)
        del config["hydra"]
    return config


COMMANDS: tuple[Callable[[argparse.ArgumentParser], Action], ...] = (report, plan, pack, doctor, list_, clean)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: The command line, without the program's name; None: that of this process.

    Raises:
        SystemExit: With code 2, for arguments or input that are no good.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_stocache", description="Stochastic caching for PyTorch Lightning."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        text = command.__doc__ or ""
        subparser = commands.add_parser(command.__name__.rstrip("_"), help=text, description=text)
        subparser.set_defaults(run=command(subparser))
    chosen, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(chosen, "overrides") or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides that stand between options
        chosen.overrides += rest
    try:
        chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`: what is left goes nowhere, and at exit without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
