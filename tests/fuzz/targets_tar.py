"""Tar shards, as `prepare.py index` scans them and as training then reads them, compared with Python's tarfile."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from random import Random

from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import ShardError
from murmuration.data.store.tar import split_name
from murmuration.launch import prepare
from tests.fuzz.engine import Broken, Target
from tests.fuzz.mutate_tar import mutate_tar
from tests.fuzz.targets_index import said_where, shard

LONG = "a" * 60 + "/" + "b" * 70 + "/"


class Shards(Target):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.source = folder / "shards"

    def seeds(self) -> list[bytes]:
        forms = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
        return [shard(range(2)), *(shard(range(2), form, LONG) for form in forms), shard(range(2), forms[0], "é/")]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_tar(chance, data, other)

    def act(self, data: bytes) -> int:
        shutil.rmtree(self.source, ignore_errors=True)
        self.source.mkdir()
        path = self.source / "000000.tar"
        path.write_bytes(data)
        code = said_where(lambda: prepare.main(["index", str(self.source), "--workers", "1"]), self.folder)
        if code == 0:
            index = ShardIndex.open(self.source)
            self._readable(index)
            self._as_tarfile(index, data)
        return code

    def _readable(self, index: ShardIndex) -> None:
        """A record that was indexed and can never be read would end every run that draws it."""
        reader = ShardReader(index, tries=1, pause=0)
        for record in range(index.records):
            try:
                reader.read(record)
            except ShardError as error:
                raise Broken("a shard is indexed of which a record cannot be read") from error

    def _as_tarfile(self, index: ShardIndex, data: bytes) -> None:
        """The same members at the same places, where tarfile reads to the end."""
        theirs = []
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8") as archive:
                members = [member for member in archive if member.isreg() and split_name(member.name) is not None]
                theirs = [data[member.offset_data : member.offset_data + member.size] for member in members]
                ended = archive.offset
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError):
            return
        if ended < len(data.rstrip(b"\0")):
            return  # it ended silently, which is why it is not what the index is built with
        reader = ShardReader(index, tries=1, pause=0)
        ours = [content for record in range(index.records) for content in reader.read(record).values()]
        if sorted(ours) != sorted(theirs):
            raise Broken("the index holds other members than tarfile finds")
