"""The notebook: its cells run, what it shows is a run of theirs, and a kernel that is interrupted goes on."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import descendants, memory_files

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
jupyter_client = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
SECONDS = 280  # for a cell; one that imports torch takes ten on a busy machine

TRAINING = """
import os, time
from torch.utils.data import DataLoader
from lightning_stocache import StochasticCache
from tests.sources import Made
from tests.training.tiny import Watcher, make_trainer

class Stopping(Watcher):
    def training_step(self, batch, batch_idx):
        if os.environ.get("STOPS") and batch_idx == 4:
            print("in the middle", flush=True)
            time.sleep(280)
        return super().training_step(batch, batch_idx)

cache, dataset = StochasticCache(keep_cache=True), Made(lambda index: time.sleep(0.01) or index, 64)
loader = DataLoader(dataset, 8, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True)

def fit():
    trainer = make_trainer(os.environ["JUPYTER_RUNTIME_DIR"], [cache], epochs=2, logger=False)
    trainer.fit(Stopping(), loader)
    print("hits", int(trainer.callback_metrics["stocache/hits"]))
"""


class Kernel:
    """A kernel of Jupyter's, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
        environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "JUPYTER_RUNTIME_DIR": str(folder)}
        self.manager, self._client = jupyter_client.start_new_kernel(
            kernel_name="python3", cwd=str(NOTEBOOK.parent), env=environment, startup_timeout=SECONDS
        )

    def run(self, cell: str) -> tuple[str, str]:
        """How a cell ends ("ok", or the name of an error), and what it prints; "in the middle" interrupts it."""
        said, errors = list[str](), list[str]()

        def hear(message: dict[str, Any]) -> None:
            said.append(message["content"].get("text", ""))
            errors.extend([message["content"]["ename"]] if message["msg_type"] == "error" else [])
            if "in the middle" in said[-1]:
                self.manager.interrupt_kernel()

        reply = self._client.execute_interactive(cell, timeout=SECONDS, output_hook=hear)
        return (*errors, reply["content"]["status"])[0], "".join(said)

    def end(self) -> None:
        if self.manager.has_kernel:
            self._client.stop_channels()
            self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")  # one imports torch for all tests
def kernel(tmp_path_factory) -> Iterator[Kernel]:
    made = Kernel(tmp_path_factory.mktemp("kernel"))
    yield made
    made.end()


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def lines(text: Any) -> str:
    return text if isinstance(text, str) else "".join(text)


@pytest.mark.processes
@pytest.mark.soak
def test_all_cells_run(kernel):
    """Every cell ends well, on a tenth of the files; a cell that is run again finds its cache warm."""
    whole = ""
    for cell in cells():
        source = lines(cell["source"]).replace("1200", "120").replace("240", "24")
        outcome, said = kernel.run(source)
        assert outcome == "ok", said
        whole += said
        if "draw(fit(" in source:
            outcome, again = kernel.run(source)
            assert (outcome, "epoch 0: 100 % from the cache" in again) == ("ok", True), again
    assert "epoch 3: 100 % from the cache" in whole  # one rank
    assert whole.count("epoch 2: 100 % from the cache") == 2  # and two
    assert "epoch 2: " in whole
    hits = re.search(r"(\d+) of 360 samples were hits", whole)
    assert hits is not None
    assert 240 + 4 <= int(hits.group(1)) <= 240 + 32


def test_what_it_shows_is_a_run_of_its_cells():
    """Each cell has been run, in this order and without an error, and what it shows names nobody's machine."""
    for number, cell in enumerate(cells(), 1):
        compile(lines(cell["source"]), f"cell {number}", "exec")
        assert cell["execution_count"] == number
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            shown = lines(output.get("text", "")) + lines(output.get("data", {}).get("text/plain", ""))
            assert not re.search(r"/(tmp|home|root|Users|usr)/", shown)
    assert "epoch 3: 100 % from the cache" in NOTEBOOK.read_text()


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")
def test_a_fit_that_was_interrupted_goes_on_in_the_next_cell(kernel):
    """Nothing but the kernel is left of it, what it cached is there; and the memory goes when the kernel is killed."""
    assert kernel.run(TRAINING)[0] == "ok"
    for _ in range(2):
        outcome, said = kernel.run("os.environ['STOPS'] = 'yes'\nfit()")
        assert outcome in ("SystemExit", "KeyboardInterrupt"), said  # which of them, Lightning decides
        assert kernel.run("del os.environ['STOPS']\nloader = DataLoader(loader.dataset, 8, shuffle=True)")[0] == "ok"
        assert len(descendants()) == 1, said  # the kernel itself
    outcome, said = kernel.run("fit()")
    assert (outcome, said.splitlines()[-1]) == ("ok", "hits 64"), said
    assert kernel.run("print(cache.cache_state()[0]['filled'])") == ("ok", "64\n")
    assert "/dev/shm/#" in str(memory_files(descendants()))
    kernel.end()  # as a restart begins
    assert "/dev/shm/#" not in str(memory_files(descendants()))
