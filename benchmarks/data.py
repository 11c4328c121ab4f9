"""The data plane against plain webdataset streaming, its parts, and range requests over a slow network.

    python benchmarks/data.py --quick --out benchmarks/results/data.json
    python benchmarks/data.py --large        how long one huge picture takes, in ordinary ones; in seconds
    python benchmarks/data.py --shrunk       the same pictures as they are and shrunk by `prepare.py pack`

Both read the same shards, make the same crops with equally many worker processes, and take turns within one process;
where other programs share the machine, only ratios of medians are meaningful. webdataset's crops are Pillow's, as its
users make them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its data.py would hide the package `data`

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import webdataset  # noqa: E402
from PIL import Image  # noqa: E402
from webdataset.writer import TarWriter  # noqa: E402

from murmuration.data.batch.loader import Loader  # noqa: E402
from murmuration.data.batch.reader import BatchReader, DataSpec  # noqa: E402
from murmuration.data.batch.shard_reader import ReadOptions, ShardReader, open_source  # noqa: E402
from murmuration.data.channels import IMAGENET_MEAN, IMAGENET_STD  # noqa: E402
from murmuration.data.decode.augment import choose_view  # noqa: E402
from murmuration.data.decode.record import PictureMaker  # noqa: E402
from murmuration.data.draw.poisson import LANES, Draw, PoissonSampler  # noqa: E402
from murmuration.data.index.shard_index import ShardIndex, build  # noqa: E402

KEY, SIDE, BATCH = b"k" * 32, 224, 64
PICTURES = PictureMaker(SIDE, "random_resized_crop", KEY)
HOST = torch.device("cpu")
LOADS = (2.0, 1.0, 0.7, 0.5)  # of a step, in units of what the workers can read
WAITING = 6  # batches that a loader may have ready when its turn begins; they are not counted


def make_pictures(side: int, quality: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(200):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize((side, side), Image.BICUBIC)
        noisy = np.clip(np.asarray(coarse).astype(int) + rng.normal(0, 6, (side, side, 3)), 0, 255).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(noisy).save(out, "JPEG", quality=quality)
        pictures.append(out.getvalue())
    return pictures


def make_shards(folder: Path, shards: int, records: int, side: int = 256, quality: int = 95) -> ShardIndex:
    """img2dataset's layout: JPEGs of about 30 kB (56 kB of 512 px), caption and json; webdataset's writer."""
    folder.mkdir(exist_ok=True)
    pictures = make_pictures(side, quality)
    for shard in range(shards):
        with TarWriter(str(folder / f"{shard:06d}.tar"), encoder=False) as writer:
            for record in range(records):
                key = f"{shard:06d}{record:04d}"
                about = json.dumps({"key": key, "status": "success", "width": side, "height": side}).encode()
                picture = pictures[(shard * records + record) % len(pictures)]
                writer.write({"__key__": key, "jpg": picture, "txt": f"picture {key}".encode(), "json": about})
    return build(folder)


def streamed(index: ShardIndex, workers: int) -> Iterator[int]:
    """webdataset used as its documentation shows; yields batch sizes forever."""
    urls = [str(index.place(number)) for number in range(len(index.shards))]

    def make(sample: dict[str, Any]) -> np.ndarray:
        image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
        view = choose_view("random_resized_crop", *image.size, SIDE, KEY, 0, int(sample["__key__"]))
        pixels = np.asarray(image.crop(tuple(map(int, view.box))).resize((SIDE, SIDE), Image.BICUBIC))
        return np.ascontiguousarray(pixels[:, ::-1]) if view.flip else pixels

    dataset = webdataset.WebDataset(urls, shardshuffle=100, seed=1).shuffle(1000).map(make).repeat()
    batches = torch.utils.data.DataLoader(dataset, BATCH, num_workers=workers, collate_fn=np.stack)
    scale, shift = 1 / (255 * np.array(IMAGENET_STD)), -np.array(IMAGENET_MEAN) / np.array(IMAGENET_STD)
    scale, shift = (each.astype(np.float32).reshape(3, 1, 1) for each in (scale, shift))
    for pixels in batches:
        images = np.empty((len(pixels), 3, SIDE, SIDE), np.float32)
        for image, picture in zip(images, pixels, strict=True):  # as our reader does
            np.multiply(picture.transpose(2, 0, 1), scale, out=image, dtype=np.float32)
            image += shift
        yield len(torch.from_numpy(images))


def loader_of(index: ShardIndex, reader: BatchReader, rate: float, device: torch.device = HOST) -> Loader[Draw]:
    """Poisson draws at random positions in all shards."""
    sampler = PoissonSampler(KEY, KEY, index.records, round(rate * LANES))
    return Loader(reader, sampler, 0, 1, BATCH, last=10**9, device=device)


def sampled(loader: Loader[Draw]) -> Iterator[int]:
    for step in range(1, 10**9):
        for batch in loader.step(step)[1]:
            yield int(batch.present.sum())


def cpu_seconds() -> float:
    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def one_turn(batches: Iterator[int], records: int) -> tuple[float, float]:
    """Records per second, and CPU milliseconds per record (workers included)."""
    for _ in range(WAITING):
        next(batches)
    began, burnt, done = time.perf_counter(), cpu_seconds(), 0
    while done < records:
        done += next(batches)
    return done / (time.perf_counter() - began), 1000 * (cpu_seconds() - burnt) / done


def compare(index: ShardIndex, workers: int, turns: int, records: int) -> dict[str, Any]:
    streaming = streamed(index, workers)
    one_turn(streaming, BATCH)  # its workers are forked before ours start any thread
    reader = BatchReader(index, DataSpec(SIDE, "random_resized_crop"), augment_key=KEY,
                         reading=ReadOptions(workers=workers, in_flight=workers + 2))  # fmt: skip
    poisson = sampled(loader_of(index, reader, 0.25))
    one_turn(poisson, BATCH)
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "webdataset": []}
    for _ in range(turns):
        found["webdataset"].append(one_turn(streaming, records))
        found["ours"].append(one_turn(poisson, records))
    own, normalising = trainer_alone(reader, index, turns, records)
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(found["ours"], found["webdataset"], strict=True)]
    cpu = {name: statistics.median(turn[1] for turn in each) for name, each in found.items()}
    reader.close()
    return {
        "workers": workers,
        "samples_per_second": {name: statistics.median(turn[0] for turn in each) for name, each in found.items()},
        "cpu_ms_per_sample": cpu,
        "trainer_cpu_ms_without_normalising": own,
        "normalising_cpu_ms": normalising,
        "samples_per_second_of_a_core": {name: 1000 / spent for name, spent in cpu.items()},
        "ratio_of_throughput": statistics.median(ratios),
        "ratio_of_cpu": cpu["webdataset"] / cpu["ours"],
        "all_ratios": ratios,
    }


def trainer_alone(reader: BatchReader, index: ShardIndex, turns: int, records: int) -> tuple[float, float]:
    """Milliseconds of this process per record, up to pixels as bytes: what feeding a GPU takes of a rank's trainer. And
    those of normalising, which a GPU does itself."""
    rng = np.random.default_rng(0)
    fetching, normalising = [], []
    for turn in range(turns):
        rows = np.sort(rng.choice(index.records, (max(1, records // BATCH), BATCH)))
        spent = [0.0, 0.0]
        for row in rows:
            began = time.process_time()
            batch = reader.fetch(row, turn).batch
            fetched = time.process_time()
            batch.to(HOST)
            spent = [spent[0] + fetched - began, spent[1] + time.process_time() - fetched]
        fetching.append(1000 * spent[0] / rows.size)
        normalising.append(1000 * spent[1] / rows.size)
    return statistics.median(fetching), statistics.median(normalising)


def shrunk(folder: Path, side: int, workers: int, turns: int, records: int) -> dict[str, Any]:
    """The same pictures packed as they are and shrunk, read in turns."""
    source = folder / "pictures"
    source.mkdir(parents=True)
    for number, picture in enumerate(make_pictures(side, 85)):
        for copy in range(5):
            (source / f"{number:03d}{copy}.jpg").write_bytes(picture)
    readers, loaders, kilobytes = [], {}, {}
    for name, more in (("packed", []), ("shrunk", ["--max-shorter-side", "256"])):
        command = [
            sys.executable,
            str(ROOT / "launch" / "prepare.py"),
            "pack",
            str(source),
            "--out",
            str(folder / name),
        ]
        subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL)
        index = ShardIndex.open(folder / name)
        kilobytes[name] = sum(shard.bytes for shard in index.shards) / index.records / 1000
        reader = BatchReader(index, DataSpec(SIDE, "random_resized_crop"), augment_key=KEY,
                             reading=ReadOptions(workers=workers, in_flight=workers + 2))  # fmt: skip
        loaders[name] = sampled(loader_of(index, reader, 0.25))
        readers.append(reader)
    found: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(turns + 1):
        for name, batches in loaders.items():
            found[name].append(one_turn(batches, records)[1])
    for reader in readers:
        reader.close()
    cpu = {name: statistics.median(each[1:]) for name, each in found.items()}
    ratios = [whole / small for whole, small in zip(found["packed"][1:], found["shrunk"][1:], strict=True)]
    return {"side": side, "kilobytes": kilobytes, "cpu_ms_per_sample": cpu, "ratio_of_cpu": statistics.median(ratios)}


def waiting(index: ShardIndex, workers: int, turns: int, records: int) -> dict[str, Any]:
    """The share of its time that a step waits for records, if a device computes for so long that records come at
    `load` times the rate at which it takes them; 1 waits as long as reading takes, and 0.5 should hardly wait."""
    reader = BatchReader(index, DataSpec(SIDE, "random_resized_crop"), augment_key=KEY,
                         reading=ReadOptions(workers=workers, in_flight=workers + 2))  # fmt: skip
    loader = loader_of(index, reader, 0.25)
    batches = sampled(loader)
    shares: dict[float, list[float]] = {load: [] for load in LOADS}
    try:
        one_turn(batches, BATCH)
        for _ in range(turns):
            seconds = BATCH / one_turn(batches, records)[0]  # of a full micro-batch, by what the machine gives now
            for load, found in shares.items():
                began, waited, done = time.perf_counter(), loader.waited, 0
                while done < records:
                    count = next(batches)
                    done += count
                    time.sleep(seconds * count / BATCH / load)  # the device computes; the host is free
                found.append((loader.waited - waited) / (time.perf_counter() - began))
    finally:
        loader.close()
    return {"waiting_share": {str(load): statistics.median(found) for load, found in shares.items()}}


def per_record(act: Callable[[int], Any], records: list[int], clock: Callable[[], float]) -> float:
    """Milliseconds per record: the median over ten parts, some of which a busy machine may spoil."""
    parts = []
    for part in np.array_split(np.array(records), 10):
        began = clock()
        for record in part.tolist():
            act(record)
        parts.append(1000 * (clock() - began) / len(part))
    return statistics.median(parts)


def large_picture(index: ShardIndex, count: int) -> dict[str, float]:
    """One grey picture of nine megapixels against ordinary ones: what it costs, though it has fewer bytes."""
    out = io.BytesIO()
    Image.new("L", (3000, 3000)).save(out, "PNG", optimize=True)
    large, reader = out.getvalue(), ShardReader(index)
    pictures = [reader.read(record)["jpg"] for record in range(count)]
    records = list(range(count))
    ordinary = per_record(lambda record: PICTURES.make(pictures[record], 0, record), records, time.thread_time)
    alone = per_record(lambda record: PICTURES.make(large, 0, record), records[:20], time.thread_time)
    return {
        "bytes": len(large), "ordinary_bytes": statistics.median(map(len, pictures)),
        "time_in_ordinary_pictures": alone / ordinary,
    }  # fmt: skip


def io_share(index: ShardIndex, count: int) -> dict[str, float]:
    """The cost of reading against that of making the picture; cold means that the page cache was dropped first."""
    rng = np.random.default_rng(1)
    records = rng.choice(index.records, count, replace=False).tolist()
    reader = ShardReader(index)
    pictures = {record: reader.read(record)["jpg"] for record in records}
    make = per_record(lambda record: PICTURES.make(pictures[record], 0, record), records, time.thread_time)
    read = per_record(reader.read, records, time.thread_time)
    slots, picture = np.zeros((BATCH, SIDE, SIDE, 3), np.uint8), PICTURES.make(pictures[records[0]], 0, 0)
    copy = per_record(lambda record: np.copyto(slots[record % BATCH], picture), records, time.thread_time)
    for number in range(len(index.shards)):
        descriptor = os.open(index.place(number), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    cold = per_record(ShardReader(index).read, records, time.perf_counter)
    return {
        "read_cpu_ms": read, "picture_cpu_ms": make, "cpu_share": read / (read + make), "read_cold_wall_ms": cold,
        "copy_to_slot_cpu_ms": copy,
    }  # fmt: skip


def draw_cost(records: int, draws: int) -> dict[str, float]:
    sampler = PoissonSampler(KEY, KEY, records, round(1_310_720 / 233_804_767 * LANES))
    times = []
    for step in range(draws):
        began = time.process_time()
        sampler.draw(step)
        times.append(time.process_time() - began)
    seconds = statistics.median(times)
    return {"records": records, "cpu_seconds": seconds, "cpu_seconds_per_1e8": seconds * 1e8 / records}


def ranges(folder: Path, latency: float, count: int) -> dict[str, Any]:
    """Records per second over HTTP from a server process with injected latency."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "range_server.py"), str(folder), "--latency", str(latency)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        index = build([f"{url}/{path.name}" for path in sorted(folder.glob("*.tar"))], folder / "remote")
        reader = ShardReader(index, open_source(index, ReadOptions()))
        found: dict[str, Any] = {"latency_ms": 1000 * latency}
        rng = np.random.default_rng(2)
        for in_flight in (1, 16, 64):
            chosen = rng.choice(index.records, min(count, 12 * in_flight + 40), replace=False).tolist()
            with ThreadPoolExecutor(in_flight) as threads:
                list(threads.map(reader.read, chosen[:in_flight]))
                rates = []
                for _ in range(3):
                    began, burnt = time.perf_counter(), time.process_time()
                    list(threads.map(reader.read, chosen))
                    rates.append((len(chosen) / (time.perf_counter() - began), time.process_time() - burnt))
            found[f"in_flight_{in_flight}"] = {
                "records_per_second": statistics.median(rate for rate, _ in rates),
                "client_cpu_ms": 1000 * statistics.median(burnt for _, burnt in rates) / len(chosen),
            }
        return found
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under three minutes")
    parser.add_argument("--large", action="store_true", help="one huge picture against ordinary ones, and nothing else")
    parser.add_argument(
        "--shrunk", action="store_true", help="pictures packed as they are and shrunk, and nothing else"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.large:
            print(json.dumps(large_picture(make_shards(folder / "256", 1, 200), 200)))
            return
        if arguments.shrunk:
            for side in (512, 1024):
                print(json.dumps(shrunk(folder / str(side), side, arguments.workers, 9, 384)), flush=True)
            return
        index = make_shards(folder / "256", 4, 500 if quick else 5000)
        large = make_shards(folder / "512", 4, 250 if quick else 2500, 512, 85)
        steps: dict[str, Callable[[], Any]] = {
            "loader": partial(compare, index, arguments.workers, 5 if quick else 9, 384 if quick else 2000),
            "loader_512": partial(compare, large, arguments.workers, 5 if quick else 9, 384 if quick else 2000),
            "waiting": partial(waiting, index, arguments.workers, 3 if quick else 9, 384 if quick else 2000),
            "io": partial(io_share, index, 300 if quick else 2000),
            "draw": partial(draw_cost, 100_000_000 if quick else 233_804_767, 3),
            "http_ranges": partial(ranges, folder / "256", 0.025, 800),
        }
        found: dict[str, Any] = {"command": f"python benchmarks/data.py{' --quick' if quick else ''}"}
        found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        found["load_average_before"] = os.getloadavg()[0]
        for name, act in steps.items():
            found[name] = act()
            print(f"{name:12s} {json.dumps(found[name])}", flush=True)
    for side, loader in ((256, found["loader"]), (512, found["loader_512"])):
        throughput, cpu = loader["ratio_of_throughput"], loader["ratio_of_cpu"]
        print(f"\n{side} px, throughput against webdataset: {throughput:.2f}   CPU: {cpu:.2f}")
        print(f"records/s of a core: {loader['samples_per_second_of_a_core']['ours']:.0f}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
