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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(path: Path, image: Tensor) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((encode_jpeg if path.suffix == ".jpg" else encode_png)(image).numpy().tobytes())
    return str(path)


def picture(channels: int = 3) -> Tensor:
    return torch.arange(channels * 40 * 50).reshape(channels, 40, 50).div(channels * 8).to(torch.uint8)


def test_files_are_jpeg_of_320_in_both_classes(photos):
    """Files lie in train/<class> and val/<class>, and are RGB JPEG files of 320x320."""
    photos.make(train_files=4, val_files=2)
    files = sorted(contents(photos.folder_of(None)))
    assert files == [
        "train/clouds/00001.jpg",
        "train/clouds/00002.jpg",
        "train/streaks/00001.jpg",
        "train/streaks/00002.jpg",
        "val/clouds/00001.jpg",
        "val/streaks/00001.jpg",
    ]
    assert decode_image(read_file(str(photos.folder_of(None) / files[0]))).shape == (3, 320, 320)


def test_a_run_goes_on_where_it_stopped(photos):
    """A second call makes only what is missing, and makes it as the first would have."""
    photos.make(train_files=4, val_files=2)
    folder = photos.folder_of(None)
    before = contents(folder)
    (folder / "train/clouds/00002.jpg").unlink()
    kept = folder / "train/clouds/00001.jpg"
    kept_at = kept.stat().st_mtime_ns
    photos.make(train_files=4, val_files=2)
    assert contents(folder) == before
    assert kept.stat().st_mtime_ns == kept_at


def test_no_file_is_ever_half(photos, monkeypatch):
    """A run that dies while it writes leaves no file under its final name."""

    def die(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(photos.os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        photos.make(train_files=4, val_files=2)
    assert [name for name in contents(photos.folder_of(None)) if name.endswith(".jpg")] == []
    monkeypatch.undo()


def test_a_sample_is_an_image_and_its_class(photos):
    """images() gives (uint8 [3, size, size], int), the classes in the order of their folders."""
    photos.make(train_files=4, val_files=2)
    source = photos.images("train", size=48)
    image, label = source[0]
    assert (image.shape, image.dtype, label, type(label)) == ((3, 48, 48), torch.uint8, 0, int)
    assert [source[i][1] for i in range(4)] == [0, 0, 1, 1]
    images, _ = photos.normalise((image[None], torch.tensor([label])))
    assert images.dtype == torch.float32
    assert images.abs().max() <= 1


@pytest.mark.parametrize(("channels", "name"), [(1, "grey.jpg"), (1, "grey.png"), (3, "rgb.png")])
def test_any_colours_become_rgb(photos, tmp_path, channels, name):
    """Grey files are decoded to three channels."""
    assert photos.load(write(tmp_path / name, picture(channels)), size=32).shape == (3, 32, 32)


def test_cmyk_becomes_rgb(photos, tmp_path):
    """A CMYK file is decoded to three channels that look like the RGB file."""
    image = pytest.importorskip("PIL.Image")
    image.fromarray(picture().movedim(0, -1).numpy()).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    rgb = photos.load(write(tmp_path / "rgb.png", picture()), size=32)
    cmyk = photos.load(str(tmp_path / "cmyk.jpg"), size=32)
    assert cmyk.shape == (3, 32, 32)
    assert (cmyk.float() - rgb.float()).abs().mean() < 20


def test_a_corrupt_file_is_named(photos, tmp_path):
    """The error for a file that cannot be decoded says which one it is."""
    path = write(tmp_path / "broken.jpg", picture())
    Path(path).write_bytes(Path(path).read_bytes()[:200])
    with pytest.raises(RuntimeError, match=r"cannot read .*broken\.jpg"):
        photos.load(path, size=32)


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


def test_a_root_without_the_layout_is_refused(photos, tmp_path):
    """The error says which layout is meant and where it was looked for."""
    with pytest.raises(FileNotFoundError, match=r"train/<class>/<image> and val/<class>/<image>; .*nowhere does not"):
        photos.make(root=str(tmp_path / "nowhere"))


def test_splits_must_have_the_same_classes(photos, tmp_path):
    """A val folder with other classes would number them differently, and is refused."""
    for name in ("train/ant", "train/bee", "val/bee"):
        write(tmp_path / name / "1.jpg", picture())
    with pytest.raises(ValueError, match=r"val has the classes \['bee'\].*\['ant', 'bee'\]"):
        photos.images("val", root=str(tmp_path))
