"""Sets that are published as arrays of pixels: CIFAR-10 and CIFAR-100 in their binary form, and SVHN. Each picture
becomes a PNG, which loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from murmuration.data.pack.row import UNDECODABLE, BadPicture, Fault, PackError, Row, class_names, inner, png, require

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True)
class _Form:
    name: str
    folders: tuple[str, ...]
    splits: dict[str, tuple[str, ...]]
    names: str  # the file of class names
    coarse: str | None  # the file of names of the number before the class
    pickled: tuple[str, ...]

    @property
    def header(self) -> int:
        return 1 if self.coarse is None else 2

    @property
    def layout(self) -> str:
        files = [*(file for split in self.splits.values() for file in split), self.names]
        return f"{self.folders[0]}/ with {', '.join(files)} (the binary version, not the one for Python or Matlab)"


_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10 = _Form(
    "CIFAR-10", ("cifar-10-batches-bin",), {"train": _TRAIN, "test": ("test_batch.bin",)}, "batches.meta.txt", None,
    ("cifar-10-batches-py", "data_batch_1"),
)  # fmt: skip
CIFAR100 = _Form(
    "CIFAR-100", ("cifar-100-binary",), {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt",
    "coarse_label_names.txt", ("cifar-100-python",),
)  # fmt: skip


class Cifar:
    def __init__(self, source: Path, form: _Form, split: str) -> None:
        self._form, self._root = form, inner(source, *form.folders)
        if split not in form.splits:
            raise PackError(f"--split {split}: {form.name} has {' and '.join(form.splits)}")
        self._files = form.splits[split]
        needed = [*self._files, form.names, *([form.coarse] if form.coarse else [])]
        names = {source.name, *(path.name for path in source.iterdir())} if source.is_dir() else set[str]()
        pickled = names & {*CIFAR10.pickled, *CIFAR100.pickled}
        if pickled and not all((self._root / file).exists() for file in needed):
            raise PackError(
                f"{source}: this version of {form.name} is for Python; its files are pickles, which may run any code "
                "and are not opened: fetch the binary version, " + form.layout
            )
        require(self._root, form.name, needed, form.layout)
        self._split = split
        self.classes = class_names(self._root / form.names)
        self._coarse = class_names(self._root / form.coarse) if form.coarse is not None else ()
        self.told = f"{form.name}, {split}: {len(self.classes)} classes"

    def rows(self) -> Iterator[Row | Fault]:
        header, number = self._form.header, 0
        for file in self._files:
            path = self._root / file
            for labels in _labels(path, header):
                image = f"{self._split}/{number:05d}"
                fine, fields = labels[-1], {"coarse": _name(self._coarse, labels[0], path)} if self._coarse else {}
                yield Row(
                    f"{file} {number}", image, f"{file}#{number}", None, _name(self.classes, fine, path), None, fields
                )
                number += 1

    def identity(self, row: Row) -> tuple[str, int]:
        return row.image, _PIXELS

    def picture(self, at: str) -> bytes:
        file, _, number = at.rpartition("#")
        size = self._form.header + _PIXELS
        before = sum((self._root / each).stat().st_size // size for each in self._files[: self._files.index(file)])
        with (self._root / file).open("rb") as opened:
            opened.seek((int(number) - before) * size + self._form.header)
            raw = opened.read(_PIXELS)
        if len(raw) < _PIXELS:
            raise BadPicture(UNDECODABLE, "the file was cut while it was packed")
        return png(np.frombuffer(raw, np.uint8).reshape(3, _SIDE, _SIDE).transpose(1, 2, 0))


def _labels(path: Path, header: int) -> Iterator[bytes]:
    size = path.stat().st_size
    if not size or size % (header + _PIXELS):
        raise PackError(f"{path}: {size} bytes are no multiple of {header + _PIXELS}, so it is cut; fetch it again")
    with path.open("rb") as file:
        while block := file.read(header + _PIXELS):
            yield block[:header]


def _name(names: tuple[str, ...], number: int, path: Path) -> str:
    if number >= len(names):
        raise PackError(f"{path}: has a label {number}, but there are {len(names)} names; fetch the set again")
    return names[number]


SVHN = "train_32x32.mat, test_32x32.mat and extra_32x32.mat (cropped digits, format 2)"


class Svhn:
    """One file of MATLAB's version 5, which is read whole (extra_32x32.mat takes 1.6 GB)."""

    classes: tuple[str, ...] = ()  # labels are the digits

    def __init__(self, source: Path, split: str) -> None:
        if split not in ("train", "test", "extra"):
            raise PackError(f"--split {split}: SVHN has train, test and extra")
        file = f"{split}_32x32.mat"
        require(source, "SVHN", [file], SVHN)
        self._path, self._split = source / file, split
        self.told = f"SVHN, {split}: labels are the digits 0 to 9"

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        from scipy.io import loadmat

        try:
            found = loadmat(self._path)
            pixels, labels = np.asarray(found["X"]), np.asarray(found["y"]).reshape(-1)
        except OSError:
            raise
        except Exception as error:  # its parser raises nearly everything on damaged bytes
            raise PackError(f"{self._path}: not a file of SVHN ({error}); fetch it again") from None
        if pixels.dtype != np.uint8 or pixels.shape[:3] != (_SIDE, _SIDE, 3) or pixels.shape[3:] != labels.shape:
            raise PackError(
                f"{self._path}: pixels {pixels.shape} and labels {labels.shape} are not SVHN's; fetch it again"
            )
        return pixels, labels

    def rows(self) -> Iterator[Row | Fault]:
        for number, label in enumerate(self._arrays[1]):
            # SVHN calls the digit 0 by the number 10.
            yield Row(
                f"{self._path.name} {number}", f"{self._split}/{number:06d}", str(number), None, str(int(label) % 10)
            )

    def identity(self, row: Row) -> tuple[str, int]:
        return row.image, _PIXELS

    def picture(self, at: str) -> bytes:
        return png(np.ascontiguousarray(self._arrays[0][..., int(at)]))
