"""Lists of captions and URLs without pictures, as CC3M and SBU are published. Nothing is downloaded: a picture is the
file that has the last part of its URL as its name, as torchvision stores SBU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from murmuration.data.pack.row import UNREADABLE, Fault, Files, PackError, Row, require

SBU = "dataset/ with SBU_captioned_photo_dataset_urls.txt, SBU_captioned_photo_dataset_captions.txt and the pictures"
_URLS, _CAPTIONS = "SBU_captioned_photo_dataset_urls.txt", "SBU_captioned_photo_dataset_captions.txt"
_TRIED = 1000
_FETCH = (
    "its rows name URLs, and nothing is downloaded here: fetch the pictures first (img2dataset writes tar shards, "
    "which prepare.py index takes as they are)"
)


class Urls(Files):
    """Rows of a caption and a URL, or the other way round."""

    def __init__(self, root: Path, told: str) -> None:
        super().__init__(root)
        self.told = f"{told}: pictures are named as the ends of their URLs"

    def _require_some(self, listing: Path) -> None:
        first = [each.at for each in islice(self.rows(), _TRIED) if isinstance(each, Row)]
        if not any((self.root / name).is_file() for name in first):
            raise PackError(f"{listing}: none of the first {len(first)} pictures is in {self.root}; {_FETCH}")

    def _row(self, where: str, caption: str, url: str) -> Row | Fault:
        try:
            file = urlsplit(url.strip()).path.rpartition("/")[2]
        except ValueError as error:
            return Fault(where, "", UNREADABLE, str(error))
        # Two URLs that end alike name one file, which is the picture of one of them: such rows disagree about the URL.
        return (
            Row(where, file, file, [caption], fields={"url": url.strip()})
            if file
            else Fault(where, "", UNREADABLE, "no URL of a file")
        )

    def rows(self) -> Iterator[Row | Fault]:
        raise NotImplementedError


class Tsv(Urls):
    """CC3M: a caption, a tab and a URL in each line, without quotes and without a header."""

    def __init__(self, root: Path, listing: Path) -> None:
        self._listing = listing
        super().__init__(root, listing.name)
        self._require_some(listing)

    def rows(self) -> Iterator[Row | Fault]:
        with _opened(self._listing) as file:
            for number, line in enumerate(file, start=1):
                cells = line.rstrip("\r\n").split("\t")
                where = f"{self._listing.name}:{number}"
                if len(cells) < 2:
                    yield Fault(where, "", UNREADABLE, "no tab between caption and URL")
                else:
                    caption, url = cells[:2] if is_url(cells[1]) else cells[1::-1]
                    yield self._row(where, caption, url)


class Sbu(Urls):
    """Two files whose lines belong together."""

    def __init__(self, source: Path) -> None:
        root = source / "dataset" if (source / "dataset").is_dir() else source
        require(root, "SBU", [_URLS, _CAPTIONS], SBU)
        super().__init__(root, "SBU")
        self._require_some(root / _URLS)

    def rows(self) -> Iterator[Row | Fault]:
        with _opened(self.root / _URLS) as urls, _opened(self.root / _CAPTIONS) as captions:
            for number, (url, caption) in enumerate(zip_longest(urls, captions), start=1):
                if url is None or caption is None:
                    raise PackError(
                        f"{self.root}: {_URLS} and {_CAPTIONS} differ in their number of lines; fetch them again"
                    )
                yield self._row(f"{_URLS}:{number}", caption, url)


def _opened(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="surrogateescape", newline="\n")


def is_url(text: str) -> bool:
    return text.strip().lower().startswith(("http://", "https://"))


def names_urls(table: Path) -> bool:
    """Whether the first line is a caption and a URL, with a tab between them, and no header."""
    with table.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        cells = file.readline(1 << 20).split("\t")
    return len(cells) >= 2 and any(is_url(cell) for cell in cells[:2])
