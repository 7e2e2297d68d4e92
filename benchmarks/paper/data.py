"""The data of the experiments: scikit-learn's digits, which need no download, and the paper's
CIFAR-10 and ImageNet from a local directory.

    load(None)                         digits
    load(Path("cifar-10-batches-py"))  data_batch_1 … data_batch_5, test_batch; or those with .bin
    load(Path("imagenet"))             train/<class>/*.JPEG, val/<class>/*.JPEG
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]
"""Images [batch, channels, height, width], normalized, and their labels [batch]."""


class Split(Protocol):
    def __len__(self) -> int: ...

    def batches(self, size: int, generator: Generator | None = None) -> Iterator[Batch]:
        """All images once, on the CPU. With a generator: for training, that is in random order and
        augmented, and without a last batch that is not full, where a few images would decide what
        batch norms do."""


@dataclass(frozen=True)
class Data:
    name: str
    train: Split
    test: Split
    classes: int
    channels: int = 3


@cache
def load(directory: Path | None) -> Data:
    """The data in ``directory``, recognized by its files; None: digits."""
    if directory is None:
        return digits()
    for files, read in FORMATS.items():
        if all((directory / file).exists() for file in files):
            return read(directory)
    known = "; or ".join(", ".join(files) for files in FORMATS)
    raise FileNotFoundError(f"no data set in {directory}: it needs {known}")


# ----------------------------------------------------------------------------------------- digits


def digits(train: int = 1000, seed: int = 0) -> Data:
    """8 × 8 pixels, ten classes: ``train`` of 1,797 images to train with, the others to test."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=Generator().manual_seed(seed))
    images = torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 8, 8)[order]
    targets = torch.from_numpy(labels)[order]
    seen = images[:train].float()
    mean, deviation = seen.mean().reshape(1), seen.std().reshape(1)
    return Data(
        "digits",
        Images(images[:train], targets[:train], mean, deviation),
        Images(images[train:], targets[train:], mean, deviation),
        classes=10,
        channels=1,
    )


@dataclass(frozen=True)
class Images:
    """A split in memory."""

    pixels: Tensor
    """uint8 [images, channels, height, width]."""
    labels: Tensor
    mean: Tensor
    """Of each channel, and the deviation: what images are normalized by."""
    deviation: Tensor
    augment: Callable[[Tensor, Generator], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, generator: Generator | None = None) -> Iterator[Batch]:
        if generator is None:
            order, end = torch.arange(len(self)), len(self)
        else:
            order, end = torch.randperm(len(self), generator=generator), full(len(self), size)
        for chosen in order[:end].split(size):
            x = self.pixels[chosen]
            if generator is not None and self.augment is not None:
                x = self.augment(x, generator)
            x = (x.float() - self.mean.view(-1, 1, 1)) / self.deviation.view(-1, 1, 1)
            yield x, self.labels[chosen]


def full(count: int, size: int) -> int:
    """How many of so many images are in full batches; all of them, if there is none."""
    return count // size * size or count


def noisy(data: Data, deviation: float, copies: int = 4) -> Data:
    """Training images get other noise whenever they are used, every test image ``copies`` times."""

    def add(pixels: Tensor, generator: Generator) -> Tensor:
        return pixels + deviation * torch.randn(pixels.shape, generator=generator)

    assert isinstance(data.train, Images)
    assert isinstance(data.test, Images)
    test = replace(
        data.test,
        pixels=add(data.test.pixels.repeat(copies, 1, 1, 1), Generator().manual_seed(0)),
        labels=data.test.labels.repeat(copies),
    )
    return replace(data, train=replace(data.train, augment=add), test=test)


# --------------------------------------------------------------------------------------- CIFAR-10


CIFAR_MEAN = 255 * torch.tensor([0.4914, 0.4822, 0.4465])
CIFAR_DEVIATION = 255 * torch.tensor([0.2470, 0.2435, 0.2616])
PICKLES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
BINARIES = [f"{name}.bin" for name in PICKLES]


def cifar10(directory: Path) -> Data:
    """Both versions of https://www.cs.toronto.edu/~kriz/cifar.html that need no MATLAB."""
    read, names = (
        (read_pickle, PICKLES) if (directory / PICKLES[0]).exists() else (read_binary, BINARIES)
    )
    *train, test = [read(directory / name) for name in names]
    seen = [torch.cat(parts) for parts in zip(*train, strict=True)]
    return Data(
        "CIFAR-10",
        Images(*seen, CIFAR_MEAN, CIFAR_DEVIATION, crop_and_flip),
        Images(*test, CIFAR_MEAN, CIFAR_DEVIATION),
        classes=10,
    )


def read_pickle(path: Path) -> Batch:
    """Pixels and labels. The file is a pickle: read none that you do not trust."""
    with path.open("rb") as file:
        content = pickle.load(file, encoding="bytes")
    pixels = torch.from_numpy(np.asarray(content[b"data"])).view(-1, 3, 32, 32)
    return pixels, torch.tensor(content[b"labels"])


def read_binary(path: Path) -> Batch:
    """Rows of a label and 3 × 32 × 32 pixels."""
    rows = torch.from_numpy(np.fromfile(path, np.uint8)).view(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def crop_and_flip(pixels: Tensor, generator: Generator) -> Tensor:
    """The standard augmentation of CIFAR: four black pixels around, a random crop of the former
    size, and half of the images mirrored."""
    count, _, height, width = pixels.shape
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, count, 1), generator=generator)
    rows = top + torch.arange(height)
    columns = left + torch.arange(width)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(count).view(-1, 1, 1)
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


# --------------------------------------------------------------------------------------- ImageNet


IMAGENET_MEAN = torch.tensor([0.485, 0.456, 0.406])
IMAGENET_DEVIATION = torch.tensor([0.229, 0.224, 0.225])


def imagenet(directory: Path) -> Data:
    """A folder per class in train and in val, with the same names."""
    classes = sorted(folder.name for folder in (directory / "train").iterdir() if folder.is_dir())
    unknown = {folder.name for folder in (directory / "val").iterdir()} - set(classes)
    if unknown:
        raise FileNotFoundError(
            f"{directory / 'val'} needs folders named as those in train, not {min(unknown)}"
        )
    train, test = (Pictures(directory / part, classes) for part in ("train", "val"))
    return Data("ImageNet", train, test, classes=len(classes))


class Pictures:
    """A split of files that are opened when they are needed, in processes of their own."""

    def __init__(self, folder: Path, classes: list[str], workers: int | None = None) -> None:
        self.files = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).glob("*.JPEG"))
        ]
        if not self.files:
            raise FileNotFoundError(f"no *.JPEG in the folders of {folder}")
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, size: int, generator: Generator | None = None) -> Iterator[Batch]:
        indices, seeds = list(range(len(self))), None
        if generator is not None:
            order = torch.randperm(len(self), generator=generator)
            indices = order[: full(len(self), size)].tolist()
            seeds = torch.randint(2**62, (len(self),), generator=generator).tolist()
        loader = DataLoader(
            Opened(self.files, seeds), size, sampler=indices, num_workers=self.workers
        )
        return iter(loader)


class Opened(Dataset[tuple[Tensor, int]]):
    """Pictures as tensors; augmented, if there are seeds: one per picture, so that it does not
    matter which process opens it."""

    def __init__(self, files: list[tuple[Path, int]], seeds: list[int] | None) -> None:
        self.files, self.seeds = files, seeds

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            picture = file.convert("RGB")
        if self.seeds is None:
            picture = centre_crop(picture)
        else:
            picture = random_crop(picture, Generator().manual_seed(self.seeds[index]))
        x = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        x = (x - IMAGENET_MEAN.view(-1, 1, 1)) / IMAGENET_DEVIATION.view(-1, 1, 1)
        return x, label


def centre_crop(picture: Image.Image, short: int = 256, size: int = 224) -> Image.Image:
    """The middle, after the shorter side was brought to ``short`` pixels."""
    width, height = (max(short, round(side * short / min(picture.size))) for side in picture.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


def random_crop(picture: Image.Image, generator: Generator, size: int = 224) -> Image.Image:
    """A rectangle of 8 to 100 % of the area, 3:4 to 4:3 in shape, resized to a square; half of them
    mirrored. Where ten such rectangles do not fit into the picture, the square in its middle."""

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    whole_width, whole_height = picture.size
    side = min(picture.size)
    width, height = side, side
    left, top = (whole_width - side) // 2, (whole_height - side) // 2
    for _ in range(10):
        area = whole_width * whole_height * uniform(0.08, 1)
        ratio = math.exp(uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= whole_width and 0 < h <= whole_height:
            width, height = w, h
            left = int(uniform(0, whole_width - w + 1))
            top = int(uniform(0, whole_height - h + 1))
            break
    box = (left, top, left + width, top + height)
    cropped = picture.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if uniform(0, 1) < 0.5:
        cropped = cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return cropped


FORMATS: dict[tuple[str, ...], Callable[[Path], Data]] = {
    tuple(PICKLES): cifar10,
    tuple(BINARIES): cifar10,
    ("train", "val"): imagenet,
}
