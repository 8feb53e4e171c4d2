"""Image readers: real files where they are, tiny written ones elsewhere, and every refusal."""

import gzip
import io
import lzma
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from etdyn.datasets import (
    ImageSet,
    cifar10,
    digits,
    from_array,
    image_folder,
    image_tar,
    load_images,
    mnist,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ETDYN_DATA", ROOT / "../shared/data")) / "images"
TAR = DATA / "imagenet-sample" / "imagenet-sample-250-224.tar"
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"{path} absent; set ETDYN_DATA")


def numbered(n: int = 10) -> np.ndarray:
    """n images of which image i is constantly i."""
    return np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 1, 2, 3))


def numbers(images: torch.Tensor) -> list[int]:
    return (images[:, 0, 0, 0] * 255).round().int().tolist()


def idx(array: np.ndarray) -> bytes:
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_mnist(folder: Path, train: int = 5, test: int = 2) -> dict[str, bytes]:
    """The four IDX files of a tiny set, image i constantly i; returns name -> bytes."""
    files = {}
    for prefix, n in (("train", train), ("t10k", test)):
        files[f"{prefix}-images-idx3-ubyte"] = idx(numbered(n)[:, 0])
        files[f"{prefix}-labels-idx1-ubyte"] = idx(np.arange(n, dtype=np.uint8))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def records(labels: list[int]) -> bytes:
    """CIFAR-10 records: red plane 10 + label, green 20, blue 30."""
    planes = [bytes([10 + k] * 1024 + [20] * 1024 + [30] * 1024) for k in labels]
    return b"".join(bytes([k]) + plane for k, plane in zip(labels, planes, strict=True))


def stripes(horizontal: bool = True) -> Image.Image:
    """12 x 8 (or 8 x 12): two red lines, eight blue, two green along the long side."""
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[:, :2], pixels[:, 2:10], pixels[:, 10:] = RED, BLUE, GREEN
    return Image.fromarray(pixels if horizontal else pixels.transpose(1, 0, 2).copy())


def write_tar(path: Path, mode: str = "w", files: int = 4) -> list[tarfile.TarInfo]:
    """Grey squares img0 (value 0), img1 (10), ..., stored in reverse order; and a text file."""
    with tarfile.open(path, mode) as archive:
        for i in reversed(range(files)):
            add(archive, f"set/img{i}.png", encode(Image.new("L", (8, 8), 10 * i)))
        add(archive, "set/readme.txt", b"no image")
    with tarfile.open(path) as archive:
        return archive.getmembers()


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


# -- real data ---------------------------------------------------------------------------------


def test_digits_counts_range_and_stratification() -> None:
    data = digits()
    assert (len(data.train), len(data.test), data.shape) == (1437, 360, (1, 8, 8))
    images = torch.cat([data.train, data.test])
    assert (images.min(), images.max()) == (0, 1)
    assert torch.equal(images * 16, (images * 16).round())
    total = torch.bincount(torch.cat([data.train_labels, data.test_labels]))
    shares = torch.bincount(data.test_labels) - total * 360 / 1797
    assert shares.abs().max() < 1  # each class within one image of its share


def test_digits_split_is_the_seeds() -> None:
    assert torch.equal(digits(3).test, digits(3).test)
    assert not torch.equal(digits(3).test_labels, digits(4).test_labels)


@needs(DATA / "mnist")
def test_mnist_matches_the_raw_bytes() -> None:
    data = mnist(DATA / "mnist")
    assert (len(data.train), len(data.test), data.shape) == (60000, 10000, (1, 28, 28))
    assert data.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert torch.bincount(data.test_labels).tolist()[:2] == [980, 1135]
    raw = gzip.decompress((DATA / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())
    assert sum(raw[16 : 16 + 784]) == 27525
    assert (data.train[0] * 255).double().sum() == pytest.approx(27525, abs=1e-3)
    assert (data.train.min(), data.train.max()) == (0, 1)


@needs(DATA / "cifar10")
def test_cifar10_matches_the_raw_bytes() -> None:
    data = cifar10(DATA / "cifar10")
    assert (len(data.train), len(data.test), data.shape) == (4000, 1000, (3, 32, 32))
    assert (data.train_labels[0], data.test_labels[0]) == (6, 3)  # the frog, the cat
    raw = lzma.decompress((DATA / "cifar10" / "data_batch_first4000.bin.xz").read_bytes())
    green_corner = raw[3073 + 1 + 1024]  # second record
    assert data.train[1, 1, 0, 0] * 255 == pytest.approx(green_corner, abs=1e-4)
    assert data.train.max() == 1


@needs(TAR)
def test_imagenet_tar() -> None:
    data = image_tar(TAR, size=32)
    assert (len(data.train), len(data.test), data.shape) == (200, 50, (3, 32, 32))
    assert 0.3 < data.train.mean() < 0.6
    assert not torch.equal(data.train[:, 0], data.train[:, 1])  # colours survive


@needs(DATA / "olivetti")
def test_olivetti_through_from_array() -> None:
    path = DATA / "olivetti" / "olivetti_faces.npz"
    with np.load(path, allow_pickle=False) as file:
        data = from_array(file["images"][:, None], held_out=40, labels=file["target"])
    assert (len(data.train), len(data.test), data.shape) == (360, 40, (1, 64, 64))
    with pytest.raises(ValueError, match=r"olivetti_faces.npz: .*\(400, 64, 64\)"):
        load_images(str(path))


# -- arrays and splits -------------------------------------------------------------------------


@pytest.mark.parametrize(("held_out", "count"), [(0.2, 2), (0.5, 5), (1, 1), (9, 9)])
def test_split_is_complete_and_disjoint(held_out: float, count: int) -> None:
    data = from_array(numbered(), held_out, labels=range(10))
    train, test = numbers(data.train), numbers(data.test)
    assert len(test) == count
    assert sorted(train + test) == list(range(10))
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == (train, test)


def test_split_is_the_seeds() -> None:
    first, again, other = (numbers(from_array(numbered(), 0.5, s).test) for s in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "array",
    [
        np.full((2, 3, 4, 5), 51, np.uint8),
        np.full((2, 3, 4, 5), 0.2),
        np.full((2, 3, 4, 5), 0.2, ">f4")[::-1, ..., ::-1],
        torch.full((2, 3, 4, 5), 51, dtype=torch.uint8),
        torch.full((2, 3, 4, 5), 0.2, dtype=torch.float64, requires_grad=True),
    ],
    ids=["bytes", "float64", "foreign-order-reversed", "byte tensor", "float64 tensor"],
)
def test_from_array_takes(array: np.ndarray | torch.Tensor) -> None:
    data = from_array(array, 1)
    assert data.shape == (3, 4, 5)
    assert data.train.dtype == torch.float32
    assert not data.train.requires_grad
    assert torch.equal(data.test, torch.full((1, 3, 4, 5), 0.2))


def test_from_array_copies() -> None:
    array = torch.zeros(2, 1, 2, 2)
    data = from_array(array, 1)
    array += 1
    assert data.train.max() == 0


def with_value(value: float) -> np.ndarray:
    array = np.full((4, 1, 2, 2), 0.5)
    array[1, 0, 1, 1] = value
    return array


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"array": with_value(np.nan)}, ValueError, "array: expected finite values, got 1 NaN"),
        ({"array": with_value(np.inf)}, ValueError, "array: expected finite"),
        ({"array": with_value(-0.5)}, ValueError, r"in \[0, 1\], got -0.5 to 0.5"),
        ({"array": with_value(1 + 1e-12)}, ValueError, r"in \[0, 1\], got 0.5 to 1.0000"),
        ({"array": np.zeros((4, 8, 8))}, ValueError, r"height, width\), got shape \(4, 8, 8\)"),
        ({"array": np.zeros((0, 1, 8, 8))}, ValueError, r"got shape \(0, 1, 8, 8\)"),
        ({"array": np.zeros((4, 1, 8, 8), int)}, TypeError, "float array.*got ndarray of int64"),
        ({"array": torch.zeros(4, 1, 8, 8).bool()}, TypeError, "got Tensor of torch.bool"),
        ({"array": [[0.0]]}, TypeError, "array: .*got list"),
        ({"held_out": 0.0}, ValueError, "held_out: .*got 0.0 of 10 images"),
        ({"held_out": 1.0}, ValueError, "held_out: .*got 1.0 of"),
        ({"held_out": 0.01}, ValueError, "held_out: .*got 0.01 of"),
        ({"held_out": 10}, ValueError, "held_out: .*got 10 of"),
        ({"held_out": -1}, ValueError, "held_out: .*got -1 of"),
        ({"held_out": "a"}, TypeError, "held_out: .*got str"),
        ({"held_out": True}, TypeError, "held_out: .*got bool"),
        ({"seed": -1}, ValueError, "seed: "),
        ({"seed": 0.5}, TypeError, "seed: "),
        ({"labels": [1, 2, 3]}, ValueError, r"labels: expected shape \(10,\).*got \(3,\)"),
        ({"labels": np.zeros((10, 1), int)}, ValueError, r"labels: .*got \(10, 1\)"),
        ({"labels": np.zeros(10)}, TypeError, "labels: expected integers, got dtype float64"),
    ],
)
def test_from_array_refuses(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_array(**{"array": numbered(), **arguments})


GOOD = {"train": torch.ones(3, 1, 2, 2), "test": torch.zeros(2, 1, 2, 2), "name": "good"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"train": np.zeros((3, 1, 2, 2))}, TypeError, "train: .*got ndarray of float64"),
        ({"test": GOOD["test"].double()}, TypeError, "test: expected a float32.*torch.float64"),
        ({"test": torch.zeros(2, 2, 2)}, ValueError, r"test: .*got shape \(2, 2, 2\)"),
        ({"train": torch.zeros(0, 1, 2, 2)}, ValueError, "train: expected a non-empty"),
        ({"test": torch.zeros(2, 1, 2, 3)}, ValueError, r"\(1, 2, 2\), got \(1, 2, 3\)"),
        ({"test": GOOD["test"] / 0}, ValueError, "test: expected finite values, got 8 NaN"),
        ({"train": GOOD["train"] * 3}, ValueError, r"train: .*got 3.0 to 3.0"),
        ({"train_labels": torch.zeros(2).long()}, ValueError, r"train_labels: .*\(3,\)"),
        ({"test_labels": torch.zeros(2).int()}, TypeError, "test_labels: .*torch.int32"),
    ],
)
def test_image_set_refuses(arguments: dict, error: type[Exception], message: str) -> None:
    assert ImageSet(**GOOD).shape == (1, 2, 2)
    with pytest.raises(error, match=message):
        ImageSet(**{**GOOD, **arguments})


def test_image_set_repr_has_no_pixels() -> None:
    assert repr(ImageSet(**GOOD)) == "ImageSet('good', train=3, test=2, shape=(1, 2, 2))"


# -- binary formats ----------------------------------------------------------------------------


def test_mnist_plain_files_and_optional_labels(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = mnist(tmp_path)
    assert (numbers(data.train), data.train_labels.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert data.shape == (1, 2, 3)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert mnist(tmp_path).train_labels is None
    assert mnist(tmp_path).test_labels.tolist() == [0, 1]


GZ = gzip.compress(idx(numbered(5)[:, 0]))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train-images-idx3-ubyte", b"hello, I am a text", "magic number: .*got 68 65 6c"),
        ("train-images-idx3-ubyte", b"", "magic number: .*got an empty file"),
        ("train-images-idx3-ubyte", idx(numbered(5)[:, 0])[:-1], "data: expected 5 x 2 x 3 = 30"),
        ("train-images-idx3-ubyte", idx(numbered(5)[:, 0]) + b"0", "data: .*got 31"),
        ("train-images-idx3-ubyte", idx(numbered(5)[:, 0])[:9], "sizes: expected a header of 16"),
        ("train-images-idx3-ubyte", idx(numbered(0)[:, 0]), "data: .*0 x 2 x 3"),
        ("train-images-idx3-ubyte", idx(numbered(5)), r"dimension count: expected 3, got \[4\]"),
        ("train-images-idx3-ubyte", b"\0\0\x0d" + idx(numbered()[:, 0])[3:], "magic number"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(3, np.uint8)), "number of labels: expected 2"),
        ("t10k-labels-idx1-ubyte", idx(numbered(2)[:, 0]), r"dimension count: expected 1, got"),
        ("train-images-idx3-ubyte.gz", GZ[:-4], "damaged or truncated"),
        ("train-images-idx3-ubyte.gz", GZ[: len(GZ) // 2], "damaged or truncated"),
        ("train-images-idx3-ubyte.gz", b"not gzip", "damaged or truncated"),
    ],
)
def test_mnist_names_the_damaged_file(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        mnist(tmp_path)


def test_mnist_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: .*train-images-idx3-ubyte"):
        mnist(tmp_path)
    with pytest.raises(ValueError, match=r"folder: expected an existing folder, got .*absent"):
        mnist(tmp_path / "absent")


def test_cifar10_joins_batches_of_any_compression(tmp_path: Path) -> None:
    (tmp_path / "data_batch_2.bin.xz").write_bytes(lzma.compress(records([3])))
    (tmp_path / "data_batch_1.bin").write_bytes(records([1, 2]))
    (tmp_path / "data_batch_1.bin.gz").write_bytes(gzip.compress(records([8])))  # passed over
    (tmp_path / "test_batch.bin.gz").write_bytes(gzip.compress(records([9])))
    data = cifar10(tmp_path)
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == ([1, 2, 3], [9])
    assert (data.train[1] * 255).flatten(1).unique(dim=1).round().tolist() == [[12], [20], [30]]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("test_batch.bin", records([1])[:-1], "size: .*3073 bytes, got 3072"),
        ("test_batch.bin", b"", "size: .*got 0"),
        ("test_batch.bin", records([1, 10]), "label: expected 0 to 9, .*got 10"),
        ("test_batch.bin.xz", lzma.compress(records([1]))[:-8], "damaged or truncated"),
    ],
)
def test_cifar10_names_the_damaged_file(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(records([1]))
    with pytest.raises(ValueError, match=r"folder: .*test_batch\*.bin"):
        cifar10(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        cifar10(tmp_path)


# -- image files -------------------------------------------------------------------------------


def test_folder_colours_and_centred_crop(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    stripes().save(tmp_path / "a.png")
    stripes(horizontal=False).save(tmp_path / "b.BMP")
    Image.new("RGB", (9, 9), GREEN).save(tmp_path / "c.jpeg", quality=100)
    Image.new("RGB", (20, 40), RED).save(tmp_path / "sub" / "d.webp", lossless=True)
    stripes().save(tmp_path / "sub" / "e.gif")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._a.png").write_text("macOS leaves these")
    data = image_folder(tmp_path, size=8, held_out=1)
    assert (data.name, data.shape) == (tmp_path.name, (3, 8, 8))
    images = torch.cat([data.train, data.test])
    colours = images[:, :, 0, 0]
    assert (images - colours[..., None, None]).abs().max() < 0.01  # of stripes the blue centre
    pure = torch.eye(3)[[2, 2, 2, 1, 0]]
    assert torch.allclose(colours[colours.argmax(1).argsort(descending=True)], pure, atol=0.01)


def test_folder_order_is_by_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for i, name in reversed(list(enumerate(["a.png", "b/a.png", "b/c.png", "c.png"]))):
        Image.new("L", (4, 4), 10 * i).save(tmp_path / name)
    rest = {0, 10, 20, 30} - set(numbers(image_folder(tmp_path, 4, held_out=1).test))
    assert numbers(image_folder(tmp_path, 4, held_out=1).train) == sorted(rest)


def test_folder_antialiases(tmp_path: Path) -> None:
    checker = (np.indices((16, 16)).sum(0) % 2 * 255).astype(np.uint8)
    for name in ("a.png", "b.png"):
        Image.fromarray(checker).save(tmp_path / name)
    data = image_folder(tmp_path, size=8, channels=1, held_out=1)
    assert data.shape == (1, 8, 8)
    assert ((data.train - 0.5).abs() < 0.06).all()  # nearest neighbour gives 0 and 1


def test_folder_grey_and_exif(tmp_path: Path) -> None:
    half = np.zeros((8, 8, 3), np.uint8)
    half[:4] = RED
    upside_down = Image.Exif()
    upside_down[274] = 3
    for name in ("a.png", "b.png"):
        Image.fromarray(half).save(tmp_path / name, exif=upside_down)
    column = image_folder(tmp_path, size=8, channels=1, held_out=1).train[0, 0, :, 0]
    assert (column * 255).round().tolist() == [0] * 4 + [76] * 4  # ITU-R 601 luma of red


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_tar_equals_folder(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "set.tar"
    write_tar(path, mode)
    (tmp_path / "out" / "set").mkdir(parents=True)
    for i in range(4):
        Image.new("L", (8, 8), 10 * i).save(tmp_path / "out" / "set" / f"img{i}.png")
    tar, folder = image_tar(path, 4, 1, 0.5), image_folder(tmp_path / "out", 4, 1, 0.5)
    assert sorted(numbers(tar.train) + numbers(tar.test)) == [0, 10, 20, 30]
    assert numbers(tar.train) == sorted(numbers(tar.train))  # by name, not as stored
    assert torch.equal(tar.train, folder.train)
    assert torch.equal(tar.test, folder.test)


def test_damaged_tars(tmp_path: Path) -> None:
    path = tmp_path / "set.tar"
    second = write_tar(path)[1]
    whole = path.read_bytes()
    scribbled = bytearray(whole)
    scribbled[second.offset : second.offset + 8] = b"\xff" * 8
    write_tar(path, "w:gz")
    zipped = path.read_bytes()
    damaged = {
        "inside a member": whole[: second.offset_data + 10],
        "between members": whole[: second.offset],
        "inside a header": whole[: second.offset + 100],
        "header overwritten": bytes(scribbled),
        "two joined": whole + whole,
        "gzip cut": zipped[:-6],
        "gzip halved": zipped[: len(zipped) // 2],
        "no tar": b"hello" * 1000,
        "empty": b"",
    }
    for what, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"set.tar: damaged or truncated tar"):
            image_tar(path, 4)
            pytest.fail(f"read a damaged tar: {what}")


def test_image_files_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: expected image files \(.png"):
        image_folder(tmp_path, 8)
    with pytest.raises(ValueError, match="path: expected an existing folder"):
        image_folder(tmp_path / "absent", 8)
    with pytest.raises(ValueError, match="path: expected a tar file"):
        image_tar(tmp_path / "absent.tar", 8)
    stripes().save(tmp_path / "good.png")
    for size, channels, error in ((0, 3, ValueError), (8.0, 3, TypeError), (8, 2, ValueError)):
        with pytest.raises(error, match=r"(size|channels): expected"):
            image_folder(tmp_path, size, channels)
    with pytest.raises(ValueError, match=r"held_out: .* of 1 images"):
        image_folder(tmp_path, 8)


def test_unreadable_image_is_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    jpeg = encode(Image.fromarray(noise), "JPEG")
    sixteen_bits = encode(Image.fromarray(np.full((8, 8), 40000, np.uint16)))
    for data in (jpeg[: len(jpeg) // 2], b"hello", b"", sixteen_bits):
        (tmp_path / "bad.jpg").write_bytes(data)
        with pytest.raises(ValueError, match=r"bad.jpg: unreadable image"):
            image_folder(tmp_path, 8)
        with tarfile.open(tmp_path / "set.tar", "w") as archive:
            add(archive, "x/bad.jpg", data)
        with pytest.raises(ValueError, match=r"set.tar: x/bad.jpg: unreadable image"):
            image_tar(tmp_path / "set.tar", 8)


# -- load_images -------------------------------------------------------------------------------


def test_load_images_recognises_each_source(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("idx", "bin", "png")}
    for folder in folders.values():
        folder.mkdir()
    write_mnist(folders["idx"])
    for batch in ("data_batch_1", "test_batch"):
        (folders["bin"] / f"{batch}.bin.xz").write_bytes(lzma.compress(records([1])))
    for i in range(4):
        stripes().save(folders["png"] / f"{i}.png")
    write_tar(tmp_path / "set.tar.gz", "w:gz")
    np.save(tmp_path / "a.npy", numbered())
    assert load_images("digits").name == "digits"
    assert load_images(str(folders["idx"])).name == "mnist"
    assert load_images(str(folders["bin"])).name == "cifar10"
    assert load_images(str(folders["png"]), 4).shape == (3, 4, 4)
    assert load_images(str(tmp_path / "set.tar.gz"), 4, 1).shape == (1, 4, 4)
    splits = [numbers(load_images(str(tmp_path / "a.npy"), seed=s).test) for s in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


def test_load_images_picks_the_array_of_an_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, first=numbered(3), second=np.zeros(3))
    assert len(load_images(str(path)).train) == 2
    np.savez(path, first=np.zeros(3), images=numbered(5))
    assert len(load_images(str(path)).train) == 4


def test_load_images_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'source: expected "digits", a folder.*does not exist'):
        load_images("nonsense")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"source: .*\.npz file.*none of these"):
        load_images(str(tmp_path / "a.txt"))
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "whole.npz", numbered())
    np.savez(tmp_path / "none.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:100])
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("pickled.npy", "cut.npz", "none.npz", "text.npy", "empty.npy"):
        with pytest.raises(ValueError, match=f"{name}: not an array of images"):
            load_images(str(tmp_path / name))
