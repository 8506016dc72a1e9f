"""The example's data: made once and whole, decoded to one form, replaced by the user's own folder."""

import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest
import torch
from torch import Tensor
from torchvision.io import decode_image, encode_jpeg, encode_png, read_file
from tqdm import tqdm

tqdm.get_lock()  # made once per process, and not what a test leaves behind

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def photos(monkeypatch, tmp_path):
    """The module, with its cache folder in tmp_path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import photos

    yield photos
    sys.modules.pop("photos")


@pytest.fixture
def folder(photos):
    """Where the module has made six files."""
    photos.make(train_files=4, val_files=2)
    return photos.folder_of(None)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(path: Path, image: Tensor) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((encode_jpeg if path.suffix == ".jpg" else encode_png)(image).numpy().tobytes())
    return str(path)


def picture(channels: int = 3) -> Tensor:
    return torch.arange(channels * 40 * 50).reshape(channels, 40, 50).div(channels * 8).to(torch.uint8)


def test_files_are_jpeg_of_320_in_both_classes(folder):
    """Files lie in train/<class> and val/<class>, and are RGB JPEG files of 320x320."""
    train = [f"train/{name}/0000{number}.jpg" for name in ("clouds", "streaks") for number in (1, 2)]
    assert sorted(contents(folder)) == [*train, "val/clouds/00001.jpg", "val/streaks/00001.jpg"]
    assert decode_image(read_file(str(folder / train[0]))).shape == (3, 320, 320)


def test_a_run_goes_on_where_it_stopped(photos, folder):
    """A second call makes only what is missing, and makes it as the first would have."""
    before = contents(folder)
    (folder / "train/clouds/00002.jpg").unlink()
    made_at = (folder / "train/clouds/00001.jpg").stat().st_mtime_ns
    photos.make(train_files=4, val_files=2)
    assert contents(folder) == before
    assert (folder / "train/clouds/00001.jpg").stat().st_mtime_ns == made_at


def test_no_file_is_ever_half(photos, monkeypatch):
    """A run that dies while it writes leaves no file under its final name."""

    def die(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(photos.os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            photos.make(train_files=4, val_files=2)
    assert [name for name in contents(photos.folder_of(None)) if name.endswith(".jpg")] == []


def test_a_sample_is_an_image_and_its_class(photos, folder):
    """images() gives (uint8 [3, size, size], int), the classes in the order of their folders."""
    source = photos.images("train", size=48)
    image, label = source[0]
    assert (image.shape, image.dtype, label, type(label)) == ((3, 48, 48), torch.uint8, 0, int)
    assert [source[index][1] for index in range(4)] == [0, 0, 1, 1]
    images, _ = photos.normalise((image[None], torch.tensor([label])))
    assert images.dtype == torch.float32
    assert images.abs().max() <= 1


def test_any_colours_become_rgb(photos, tmp_path):
    """Grey files are decoded to three channels, and a CMYK file to three that look like the RGB file."""
    image = pytest.importorskip("PIL.Image")
    for name in ("grey.jpg", "grey.png"):
        assert photos.load(write(tmp_path / name, picture(1)), size=32).shape == (3, 32, 32)
    image.fromarray(picture().movedim(0, -1).numpy()).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    rgb = photos.load(write(tmp_path / "rgb.png", picture()), size=32)
    cmyk = photos.load(str(tmp_path / "cmyk.jpg"), size=32)
    assert cmyk.shape == rgb.shape == (3, 32, 32)
    assert (cmyk.float() - rgb.float()).abs().mean() < 20


def test_a_folder_of_ones_own(photos, tmp_path):
    """With a root nothing is made, and the classes are the names of the folders."""
    root = tmp_path / "mine"
    for split in ("train", "val"):
        for name in ("ant", "bee", "cat"):
            write(root / split / name / "1.jpg", picture())
    before = contents(tmp_path)
    photos.make(root=str(root))
    assert photos.images("train", root=str(root)).classes == ["ant", "bee", "cat"]
    assert photos.count_classes(str(root)) == 3
    assert contents(tmp_path) == before


def test_what_cannot_be_used_is_named(photos, tmp_path):
    """A file that cannot be decoded, a root without the layout, and a val folder with other classes, which would
    number them differently."""
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 and no more")
    with pytest.raises(RuntimeError, match=r"cannot read .*broken\.jpg"):
        photos.load(str(tmp_path / "broken.jpg"), size=32)
    with pytest.raises(FileNotFoundError, match=r"train/<class>/<image> and val/<class>/<image>; .*nowhere does not"):
        photos.make(root=str(tmp_path / "nowhere"))
    for name in ("train/ant", "train/bee", "val/bee"):
        write(tmp_path / name / "1.jpg", picture())
    with pytest.raises(ValueError, match=r"val has the classes \['bee'\].*\['ant', 'bee'\]"):
        photos.images("val", root=str(tmp_path))
