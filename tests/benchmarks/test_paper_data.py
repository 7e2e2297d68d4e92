"""The data of benchmarks/paper, on tiny directories of the real formats."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import data
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Generator, Tensor


def pixels_of(split: data.Split) -> Tensor:
    """All images in their order, as they were before normalization."""
    x = torch.cat([x for x, _ in split.batches(2)])
    assert isinstance(split, data.Images)
    return (x * split.deviation.view(-1, 1, 1) + split.mean.view(-1, 1, 1)).round().byte()


def labels_of(split: data.Split) -> list[int]:
    return torch.cat([y for _, y in split.batches(2)]).tolist()


# ----------------------------------------------------------------------------------------- digits


def test_digits_are_split_once_and_for_all() -> None:
    first, second, other = data.load(None), data.digits(), data.digits(seed=1)
    assert (len(first.train), len(first.test)) == (1000, 797)
    assert (first.classes, first.channels) == (10, 1)
    assert torch.equal(pixels_of(first.train), pixels_of(second.train))
    assert not torch.equal(pixels_of(first.train), pixels_of(other.train))
    everything = torch.cat([pixels_of(first.train), pixels_of(first.test)]).flatten(1)
    again = torch.cat([pixels_of(other.train), pixels_of(other.test)]).flatten(1)
    assert sorted(everything.tolist()) == sorted(again.tolist())


def test_digits_are_normalized() -> None:
    x = torch.cat([x for x, _ in data.digits().train.batches(100)])
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-5


def test_training_batches_are_full_and_in_an_order_decided_by_the_generator() -> None:
    split = data.digits().train

    def epoch(seed: int) -> list[Tensor]:
        return [x for x, _ in split.batches(300, Generator().manual_seed(seed))]

    assert [len(x) for x in epoch(0)] == [300, 300, 300]
    assert torch.equal(epoch(0)[0], epoch(0)[0])
    assert not torch.equal(epoch(0)[0], epoch(1)[0])
    assert [len(x) for x, _ in split.batches(300)] == [300, 300, 300, 100]


# --------------------------------------------------------------------------------------- CIFAR-10


def cifar(directory: Path, binary: bool) -> tuple[Tensor, list[int]]:
    """Writes batches of two images; returns all pixels and labels."""
    pixels = torch.randint(256, (12, 3, 32, 32), dtype=torch.uint8)
    labels = [i % 10 for i in range(12)]
    for i, name in enumerate(data.PICKLES):
        rows = pixels[2 * i : 2 * i + 2].flatten(1).numpy()
        two = labels[2 * i : 2 * i + 2]
        if binary:
            np.column_stack([np.array(two, np.uint8), rows]).tofile(directory / f"{name}.bin")
        else:
            content = {b"batch_label": b"tiny", b"labels": two, b"data": rows}
            (directory / name).write_bytes(pickle.dumps(content))
    return pixels, labels


@pytest.mark.parametrize("binary", [False, True])
def test_cifar_is_read_as_it_was_written(tmp_path: Path, binary: bool) -> None:
    pixels, labels = cifar(tmp_path, binary)
    found = data.load(tmp_path)
    assert (found.name, found.classes, found.channels) == ("CIFAR-10", 10, 3)
    assert torch.equal(torch.cat([pixels_of(found.train), pixels_of(found.test)]), pixels)
    assert labels_of(found.train) + labels_of(found.test) == labels


def test_training_images_of_cifar_are_crops_and_half_of_them_mirrored(tmp_path: Path) -> None:
    pixels = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    result = data.crop_and_flip(pixels, Generator().manual_seed(0))
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    places, mirrored = set(), 0
    for image, whole in zip(result, padded, strict=True):
        found = [
            (top, left, mirror)
            for top in range(9)
            for left in range(9)
            for mirror in (False, True)
            if torch.equal(
                image.flip(2) if mirror else image, whole[:, top : top + 32, left : left + 32]
            )
        ]
        assert len(found) == 1
        places.add(found[0][:2])
        mirrored += found[0][2]
    assert len(places) > 30
    assert 16 < mirrored < 48
    cifar(tmp_path, False)
    found_data = data.load(tmp_path)
    epoch, _ = next(found_data.train.batches(10, Generator().manual_seed(0)))
    again, _ = next(found_data.train.batches(10, Generator().manual_seed(0)))
    assert torch.equal(epoch, again)
    assert not any(torch.equal(x, y) for x in epoch for y in next(found_data.train.batches(10))[0])


# --------------------------------------------------------------------------------------- ImageNet


COLOURS = {"n01440764": (250, 10, 10), "n01443537": (10, 250, 10)}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes, each of one colour; wide, high and grey pictures."""
    for part, count in (("train", 2), ("val", 1)):
        for name, colour in COLOURS.items():
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                size = [(300, 260), (240, 400)][i]
                Image.new("RGB", size, colour).save(folder / f"{i}.JPEG", quality=95)
    Image.new("L", (230, 230), 128).save(tmp_path / "train" / "n01443537" / "grey.JPEG")
    return tmp_path


def test_imagenet_is_read_by_folders(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = data.load(pictures)
    assert (found.name, found.classes, found.channels) == ("ImageNet", 2, 3)
    assert (len(found.train), len(found.test)) == (5, 2)
    monkeypatch.setattr(found.test, "workers", 0)
    (x, labels), *others = found.test.batches(2)
    assert not others
    assert x.shape == (2, 3, 224, 224)
    assert labels.tolist() == [0, 1]
    mean, deviation = (v.view(-1, 1, 1) for v in (data.IMAGENET_MEAN, data.IMAGENET_DEVIATION))
    seen = (255 * (x * deviation + mean)).mean((2, 3))
    torch.testing.assert_close(seen, torch.tensor([*COLOURS.values()]).float(), atol=4, rtol=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_training_pictures_repeat_with_the_seed_whoever_opens_them(
    pictures: Path, workers: int
) -> None:
    split = data.Pictures(pictures / "train", list(COLOURS), workers)

    def epoch(seed: int) -> list[Tensor]:
        batches = list(split.batches(2, Generator().manual_seed(seed)))
        return [torch.cat(parts) for parts in zip(*batches, strict=True)]

    x, labels = epoch(0)
    assert x.shape == (4, 3, 224, 224)
    alone = data.Pictures(pictures / "train", list(COLOURS), 0)
    (first, _), *_ = alone.batches(2, Generator().manual_seed(0))
    assert torch.equal(x[:2], first)
    assert {tuple(epoch(seed)[1].tolist()) for seed in range(4)} != {tuple(labels.tolist())}


def test_a_picture_is_augmented_by_its_own_seed(tmp_path: Path) -> None:
    path = tmp_path / "noise.JPEG"
    Image.effect_noise((300, 300), 80).save(path)
    same, again, other = (data.Opened([(path, 0)], [seed])[0][0] for seed in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_random_crops_show_a_part_of_the_picture_in_its_proportions() -> None:
    # Red grows with the column and green with the row, so that colours tell where a pixel was.
    columns, rows = np.meshgrid(np.arange(256), np.arange(256))
    image = Image.fromarray(np.stack([columns, rows, 0 * rows], 2).astype(np.uint8))
    mirrored = 0
    for seed in range(40):
        crop = np.array(data.random_crop(image, Generator().manual_seed(seed))).astype(float)
        width, height = np.ptp(crop[112, :, 0]) + 1, np.ptp(crop[:, 112, 1]) + 1
        assert 0.07 < width * height / 256**2 <= 1
        assert 0.73 < width / height < 1.36
        mirrored += crop[112, 0, 0] > crop[112, -1, 0]
    assert 8 < mirrored < 32


def test_a_picture_too_narrow_for_random_crops_gives_its_middle() -> None:
    narrow = Image.new("RGB", (2000, 20), (0, 0, 0))
    narrow.paste((200, 0, 0), (990, 0, 1010, 20))
    crop = np.array(data.random_crop(narrow, Generator().manual_seed(0)))
    assert (crop[..., 0] == 200).all()


def test_the_centre_crop_is_the_middle_of_the_resized_picture() -> None:
    columns, rows = np.meshgrid(np.arange(512), np.arange(300))
    image = Image.fromarray((np.stack([columns, rows, 0 * rows], 2) / 2).astype(np.uint8))
    crop = np.array(data.centre_crop(image)).astype(float)
    assert crop.shape == (224, 224, 3)
    assert abs(crop[112, 112, 0] - 128) <= 1  # the middle of the columns
    assert abs(crop[112, 112, 1] - 75) <= 1
    assert abs(np.ptp(crop[112, :, 0]) - 224 * (300 / 256) / 2) <= 2


# ------------------------------------------------------------------------------------------ errors


def no_files(directory: Path) -> None:
    pass


def one_batch_missing(directory: Path) -> None:
    cifar(directory, False)
    (directory / "data_batch_3").unlink()


def no_pictures(directory: Path) -> None:
    for part in ("train", "val"):
        (directory / part / "n0").mkdir(parents=True)


def other_classes(directory: Path) -> None:
    (directory / "train" / "n0").mkdir(parents=True)
    (directory / "val" / "n1").mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_files, "no data set in .*data_batch_1.*data_batch_1.bin.*train, val"),
        (one_batch_missing, "no data set in"),
        (no_pictures, r"no \*.JPEG in the folders of .*train"),
        (other_classes, "val needs folders named as those in train, not n1"),
    ],
)
def test_a_directory_without_data_is_refused(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        data.load(tmp_path)
