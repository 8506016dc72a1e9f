"""The example's data: made once and whole, decoded to one form, replaced by the user's own folder."""

import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest
import torch
from torchvision.io import encode_jpeg

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def photos(monkeypatch, tmp_path):
    """The module, with its cache folder in tmp_path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import photos

    yield photos
    sys.modules.pop("photos")


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}


def test_files_are_made_once_and_whole(photos, monkeypatch):
    """A run that dies while it writes leaves no file under its final name; the next makes only what is missing."""
    folder = photos.folder_of(None)
    with monkeypatch.context() as patch:
        patch.setattr(photos.os, "replace", lambda source, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            photos.make(train_files=4, val_files=2)
    assert files(folder) == {}
    photos.make(train_files=4, val_files=2)
    before, source = files(folder), photos.images("train", size=48)
    assert [source[index][1] for index in range(4)] == [0, 0, 1, 1]
    assert (source[0][0].shape, source[0][0].dtype) == ((3, 48, 48), torch.uint8)
    missing = Path(source.samples[1][0])
    content = missing.read_bytes()
    missing.unlink()
    photos.make(train_files=4, val_files=2)
    assert [path for path, made in files(folder).items() if before[path] != made] == [missing]
    assert missing.read_bytes() == content


def test_a_folder_of_ones_own(photos, tmp_path):
    """With a root nothing is made; a file that cannot be decoded, another layout, other classes in val are named."""
    root = tmp_path / "mine"
    for name in ("train/ant/1.jpg", "train/bee/1.jpg", "val/ant/1.jpg", "val/bee/1.jpg"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(encode_jpeg(torch.zeros(1, 40, 50, dtype=torch.uint8)).numpy().tobytes())
    before = files(tmp_path)
    photos.make(root=str(root))
    assert files(tmp_path) == before
    assert photos.images("train", size=32, root=str(root)).classes == ["ant", "bee"]
    assert photos.load(str(root / "val/ant/1.jpg"), size=32).shape == (3, 32, 32)
    (root / "val/ant/1.jpg").write_bytes(b"\xff\xd8 and no more")
    with pytest.raises(RuntimeError, match=r"cannot read .*1\.jpg"):
        photos.load(str(root / "val/ant/1.jpg"), size=32)
    with pytest.raises(FileNotFoundError, match=r"train/<class>/<image> and val/<class>/<image>; .*nowhere does not"):
        photos.make(root=str(tmp_path / "nowhere"))
    (root / "val/bee").rename(root / "val/cat")
    with pytest.raises(ValueError, match=r"val has the classes \['ant', 'cat'\].*\['ant', 'bee'\]"):
        photos.images("val", root=str(root))
