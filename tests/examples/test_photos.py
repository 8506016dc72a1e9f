"""The example's data: made once and whole, decoded to one form, replaced by the user's own folder."""

import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest
import torch
from torchvision.io import decode_image, encode_jpeg, read_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def photos(monkeypatch, tmp_path):
    """The module, with its cache folder in tmp_path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import photos

    yield photos
    sys.modules.pop("photos")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_are_made_once_and_whole(photos, monkeypatch):
    """A run that dies while it writes leaves no file under its final name; the next makes only what is missing."""

    def die(source, target):
        raise KeyboardInterrupt

    folder = photos.folder_of(None)
    with monkeypatch.context() as patch:
        patch.setattr(photos.os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            photos.make(train_files=4, val_files=2)
    assert [name for name in contents(folder) if name.endswith(".jpg")] == []
    photos.make(train_files=4, val_files=2)
    before = {name: data for name, data in contents(folder).items() if name.endswith(".jpg")}
    train = [f"train/{name}/0000{number}.jpg" for name in ("clouds", "streaks") for number in (1, 2)]
    assert sorted(before) == [*train, "val/clouds/00001.jpg", "val/streaks/00001.jpg"]
    assert decode_image(read_file(str(folder / train[0]))).shape == (3, 320, 320)
    (folder / train[1]).unlink()
    made_at = (folder / train[0]).stat().st_mtime_ns
    photos.make(train_files=4, val_files=2)
    assert before.items() <= contents(folder).items()
    assert (folder / train[0]).stat().st_mtime_ns == made_at
    source = photos.images("train", size=48)
    image, label = source[0]
    assert (image.shape, image.dtype, label, type(label)) == ((3, 48, 48), torch.uint8, 0, int)
    assert [source[index][1] for index in range(4)] == [0, 0, 1, 1]
    images, _ = photos.normalise((image[None], torch.tensor([label])))
    assert images.dtype == torch.float32
    assert images.abs().max() <= 1


def test_a_folder_of_ones_own(photos, tmp_path):
    """With a root nothing is made; a file that cannot be decoded, another layout, other classes in val are named."""
    root = tmp_path / "mine"
    for name in ("train/ant/1.jpg", "train/bee/1.jpg", "val/ant/1.jpg", "val/bee/1.jpg"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(encode_jpeg(torch.zeros(1, 40, 50, dtype=torch.uint8)).numpy().tobytes())
    before = contents(tmp_path)
    photos.make(root=str(root))
    assert contents(tmp_path) == before
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
