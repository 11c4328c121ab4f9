"""DICOM files are packed as PNG whose grey values are those of the standard's formula, worked out value by value."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from murmuration.data.pack.dicom import Window, as_png, is_dicom
from murmuration.data.pack.row import BadPicture
from tests.data.test_data_pack import ROOT, left_out, pack, records, write_csv


def dicom(pixels: np.ndarray, kind: str = "MONOCHROME2", **tags: Any) -> bytes:
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = SecondaryCaptureImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = generate_uid(entropy_srcs=["test"])
    colours = 3 if kind == "RGB" else 1
    frames = pixels.ndim - 2 - (colours == 3)
    made.Rows, made.Columns = pixels.shape[frames : frames + 2]
    made.SamplesPerPixel, made.PhotometricInterpretation = colours, kind
    made.BitsAllocated = made.BitsStored = 8 * pixels.dtype.itemsize
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, int(pixels.dtype.kind == "i")
    if frames:
        made.NumberOfFrames = len(pixels)
    if colours == 3:
        made.PlanarConfiguration = 0
    for name, value in tags.items():
        setattr(made, name, value)
    made.PixelData = pixels.tobytes()
    out = io.BytesIO()
    made.save_as(out, enforce_file_format=True)
    return out.getvalue()


def shown(raw: bytes, window: Window | None = None) -> np.ndarray:
    with Image.open(io.BytesIO(as_png(raw, window))) as image:
        return np.asarray(image)


def by_hand(value: float, centre: float, width: float) -> int:
    """PS3.3 C.11.2.1.2.1 as it is printed there, for ymin 0 and ymax 255."""
    if value <= centre - 0.5 - (width - 1) / 2:
        return 0
    if value > centre - 0.5 + (width - 1) / 2:
        return 255
    return round(((value - (centre - 0.5)) / (width - 1) + 0.5) * 255)


VALUES = np.arange(-400, 800, 24, dtype=np.int16).reshape(5, 10)


@pytest.mark.parametrize("kind", ["MONOCHROME2", "MONOCHROME1"])
@pytest.mark.parametrize("given", [None, (40.0, 400.0)])
def test_grey_values_are_those_of_the_standards_formula(kind: str, given: tuple[float, float] | None) -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": [300, 50], "WindowWidth": [600, 20]}
    found = shown(dicom(VALUES, kind, **tags), Window(*given) if given else None)
    centre, width = given or (300.0, 600.0)
    expected = [[by_hand(2 * int(value) - 100, centre, width) for value in row] for row in VALUES]
    turned = 255 - np.array(expected) if kind == "MONOCHROME1" else np.array(expected)
    assert found.dtype == np.uint8 and (found == turned).all() and 0 < np.unique(found).size > 5


def test_without_a_window_the_whole_range_is_shown_and_one_value_is_no_error() -> None:
    found = shown(dicom(VALUES))
    assert found.min() == 0 and found.max() == 255 and (np.diff(found.flatten().astype(int)) > 0).all()
    assert np.unique(shown(dicom(np.full((4, 4), 7, dtype=np.uint16)))).size == 1
    odd = dicom(VALUES, WindowCenter=100, WindowWidth=0)
    assert (shown(odd) == found).all(), "a window of no width is none"


def test_colours_stay_and_of_several_frames_the_first_is_taken() -> None:
    colours = np.random.default_rng(1).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    assert (shown(dicom(colours, "RGB")) == colours).all()
    frames = np.stack([VALUES, VALUES[::-1]])
    assert (shown(dicom(frames)) == shown(dicom(VALUES))).all()


@pytest.mark.parametrize("cut", [200, 400, -3])
def test_damaged_and_foreign_files_are_bad_pictures(cut: int) -> None:
    with pytest.raises(BadPicture):
        as_png(dicom(VALUES)[:cut], None)
    with pytest.raises(BadPicture):
        as_png(dicom(VALUES.astype(np.uint16), "PALETTE COLOR"), None)
    assert not is_dicom(b"") and not is_dicom(b"\x89PNG" * 40) and is_dicom(dicom(VALUES))


def test_a_table_may_name_dicom_files(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    for number in range(3):
        (tmp_path / "scans" / f"{number}.dcm").write_bytes(dicom(VALUES + number, WindowCenter=0, WindowWidth=300))
    (tmp_path / "scans" / "3.dcm").write_bytes(dicom(VALUES)[:400])
    rows = [["file_name", "caption"], *([f"{number}.dcm", f"scan {number}"] for number in range(4))]
    table = write_csv(tmp_path / "a.csv", rows)
    pack(tmp_path / "scans", "--csv", table, "--out", tmp_path / "out", "--window", "40", "400")
    found = records(tmp_path / "out")
    assert [each["txt"] for each in found] == [b"scan 0", b"scan 1", b"scan 2"]
    for number, each in enumerate(found):
        assert each["png"] == as_png(dicom(VALUES + number), Window(40, 400))
    assert [each["reason"] for each in left_out(tmp_path / "out")] == ["undecodable image"]


def test_without_pydicom_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "0.dcm").write_bytes(dicom(VALUES))
    table = write_csv(tmp_path / "a.csv", [["file_name", "caption"], ["0.dcm", "a scan"]])
    program = "import sys; sys.modules['pydicom'] = None; from murmuration.launch.prepare import main; sys.exit(main())"
    command = ["pack", str(tmp_path), "--csv", str(table), "--out", str(tmp_path / "out"), "--workers", "1"]
    done = subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'murmuration[dicom]'" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists() and json.dumps(done.stderr).count("error") <= 1
