"""Finished runs in the forms of other packages: loaded by those alone, they compute what our model computes."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import murmuration
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.data.index.folders import build_folder
from murmuration.launch import use
from murmuration.model.released import load_dpcap, load_vip_mae
from murmuration.model.weight_files import read_weights
from murmuration.train.commands import export
from tests.support import forking
from tests.support.evaluation_world import class_folders, class_list, evaluate, result, shards, tokenizer
from tests.support.foreign_models import ENCODER, TIMM_TOYS
from tests.support.launching import ROOT, Launch

COLOURS = {"blue", "green", "grey", "red", "white"}
KINDS = ("classify", "mae", "caption")
OWNED = {
    "classify": ("timm", "hf"),
    "mae": ("timm", "hf", "vip"),
    "caption": ("timm", "hf", "dpcap"),
}
# Imports nothing of ours: the packages and the files must be enough.
CLEAN = """
import os, sys, timm, torch, transformers
from pathlib import Path
from PIL import Image
root = Path(sys.argv[1])
given = torch.load(root / "given.pt")
images, noise, found = given["images"], given["noise"], {}
with torch.no_grad():
    for kind in ("classify", "mae", "caption"):
        model = timm.create_model(f"local-dir:{root / kind}-timm", pretrained=True).eval()
        found[f"{kind}-timm"] = model(images)
        program = (root / f"{kind}-timm" / "README.md").read_text().split("```python")[1].split("```")[0]
        os.chdir(root / f"{kind}-timm")
        namespace = {}
        exec(program, namespace)
        found[f"{kind}-timm-page"] = namespace["model"](images)
    folder = root / "classify-hf"
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    found["classify-hf"], found["names"] = model(images).logits, list(model.config.id2label.values())
    see = transformers.AutoImageProcessor.from_pretrained(folder)
    found["seen"] = see(Image.new("RGB", (30, 20), "white"), return_tensors="pt").pixel_values
    model, told = transformers.ViTMAEForPreTraining.from_pretrained(root / "mae-hf", output_loading_info=True)
    found["told mae"], found["mae-hf"] = told, model.eval()(images, noise=noise).loss
    model = transformers.AutoModel.from_pretrained(root / "mae-hf", mask_ratio=0.0).eval()
    order = torch.arange(float(noise.shape[1]))[None].expand(len(images), -1)
    found["mae-hf tokens"] = model(images, noise=order).last_hidden_state
    model, told = transformers.ViTModel.from_pretrained(root / "caption-hf", output_loading_info=True)
    seen = model.eval()(images)
    found["told caption"], found["caption-hf"], found["pooled"] = told, seen.last_hidden_state, seen.pooler_output
    words = transformers.AutoTokenizer.from_pretrained(root / "caption-hf")
    found["words"] = words("a photo of a red square", add_special_tokens=False).input_ids
for told in ("told mae", "told caption"):
    found[told] = [name for name, keys in found[told].items() if keys]
assert not [name for name in sys.modules if name.split(".")[0] in ("murmuration", "deepspeed")]
torch.save(found, root / "found.pt")
"""


def config(kind: str, root: Path) -> dict[str, Any]:
    """The captioner's is ZeRO-3 on two ranks, neither of which has the whole model."""
    pictures = {"path": str(root / "private")}
    captions = {"path": str(root / "shards"), "tokenizer": str(tokenizer(root))}
    model, data, held = {
        "classify": ({"family": "classifier", "classes": 5, "pixels": "half"},
                     {**pictures, "label": "cls", "classes": str(class_list(root))}, "public"),
        "mae": ({"family": "mae", "mae_decoder_width": 24, "mae_decoder_depth": 1, "mae_decoder_heads": 2}, pictures,
                "public"),
        "caption": ({"family": "captioner", "decoder_width": 24, "decoder_heads": 4, "decoder_depth": 1,
                     "text_length": 9, "vocabulary": 32}, captions, "held"),
    }[kind]  # fmt: skip
    phase = {
        "name": "private", "objective": kind, "data": data,
        "privacy": {"epsilon": 8.0, "expected_batch": 10, "noise_multiplier": 2.0, "clip": {"norm": 1.0}},
        "schedule": {"peak": 1e-2, "shape": "constant"}, "steps": 3,
        "evaluation": {"path": str(root / held), "public": True},
    }  # fmt: skip
    run = {"engine": "deepspeed", "keep_key": True} if kind == "caption" else {"engine": "local"}
    zero = {"zero_optimization": {"stage": 3}} if kind == "caption" else {}
    return {"train_micro_batch_size_per_gpu": 8, **zero, "model": {**ENCODER, **model}, "phases": [phase], "run": run}


def exported(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["export.py", *map(str, arguments)])
    return export.main()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind, NAME-run, and all forms that each can have, NAME-FORM."""
    root = tmp_path_factory.mktemp("forms")
    build_folder(class_folders(root / "private", 20))
    build_folder(class_folders(root / "public", 4, seed=100))
    shards(root / "shards", 100)
    shards(root / "held", 20)
    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            launcher = "forked" if kind == "caption" else "python"
            job, run_dir = Launch.written(config(kind, root), root, kind, launcher=launcher)
            code, output = job.run()
            assert code == 0, output
            for form in (*OWNED[kind], "safetensors"):
                assert exported(patch, run_dir, root / f"{kind}-{form}", "--form", form) == 0
    return root


def test_the_packages_alone_compute_what_our_model_computes(root: Path) -> None:
    models = {kind: murmuration.load(root / f"{kind}-run") for kind in KINDS}
    images = models["classify"].see(sorted((root / "public").rglob("*.png"))[:6])
    noise = torch.rand(len(images), 16, generator=torch.Generator().manual_seed(2))
    torch.save({"images": images, "noise": noise}, root / "given.pt")
    done = subprocess.run([sys.executable, "-I", "-c", CLEAN, str(root)], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found = torch.load(root / "found.pt", weights_only=False)

    def same(name: str, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-5)

    tokens = {kind: models[kind].body.tokens(images) for kind in ("mae", "caption")}
    for way in ("timm", "timm-page"):
        same(f"classify-{way}", models["classify"](images))
        for kind in ("mae", "caption"):
            same(f"{kind}-{way}", tokens[kind][:, 1:].mean(dim=1))
    same("classify-hf", models["classify"](images))
    assert set(found["names"]) == COLOURS and found["names"] == list(models["classify"].class_names)
    assert torch.equal(found["seen"], torch.ones(1, 3, 16, 16)), "resized, cropped, and normalised by half"
    same("mae-hf", models["mae"].body({"images": images, "mask_noise": noise}).mean())
    same("mae-hf tokens", tokens["mae"])
    same("caption-hf", tokens["caption"])
    same("pooled", tokens["caption"][:, 0])
    assert found["told mae"] == found["told caption"] == [], "every tensor has its place"
    assert found["words"] == models["caption"].text.words("a photo of a red square")


def test_an_encoder_of_timm_with_adapters_after_an_export_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_folder(class_folders(tmp_path / "private", 4))
    build_folder(class_folders(tmp_path / "public", 2, seed=100))
    name, sizes = TIMM_TOYS["timm dinov2"]
    given = config("classify", tmp_path)
    own = {key: value for key, value in sizes.items() if key != "img_size"}
    given["model"] = {"family": "timm", "name": name, "model_args": own, "image_size": 56, "classes": 5}
    given["phases"][0] |= {"trainable": "lora", "steps": 2}
    job, run_dir = Launch.written(given, tmp_path, "named", launcher="python")
    code, output = job.run()
    assert code == 0, output

    program = (
        "import os\nfrom murmuration.train.commands.export import main\nfrom murmuration.train.export import export\n"
        "export.write_card = lambda *given: os._exit(9)\nmain()"
    )
    arguments = (str(run_dir), str(tmp_path / "timm"), "--form", "timm")
    assert forking.run([sys.executable, "-c", program, *arguments]).returncode == 9 and (tmp_path / "timm").is_dir()
    model = murmuration.load(run_dir)
    images = model.see(sorted((tmp_path / "public").rglob("*.png"))[:6])
    for form in ("timm", "peft"):
        assert exported(monkeypatch, run_dir, tmp_path / form, "--form", form) == 0
        assert {path.name for path in (tmp_path / form).iterdir()} >= {"README.md", "certificate.json"}
        assert not (tmp_path / form / ".part").exists()
    attached = verify(tmp_path / "peft").attached
    assert attached is not None and any(each.startswith("adapter_model.safetensors holds") for each in attached.checked)
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(
        timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()(images), model(images), **close
    )
    # Rank 8 beside query-key-value (32 to 96), the projection (32 to 32) and both layers of the MLP (32 to 128), twice.
    trained = 2 * 8 * (32 + 96 + 32 + 32 + 2 * (32 + 128)) + 5 * 33
    parameters = sum(each.numel() for each in model.parameters())
    page = (tmp_path / "timm" / "README.md").read_text()
    assert f'{name}"; pictures of 56 pixels; {parameters:,} parameters' in page
    assert f"trained {trained:,} weights" in page
    assert "PeftModel.from_pretrained(base" in (tmp_path / "peft" / "README.md").read_text()
    assert exported(monkeypatch, run_dir, tmp_path / "timm", "--form", "timm") == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert exported(monkeypatch, tmp_path / "private", tmp_path / "private" / "x") == 2
    assert "name the run directory of a finished run" in capsys.readouterr().err
    for form in ("timm", "peft"):
        assert exported(monkeypatch, tmp_path / form, tmp_path / "again") == 2
        assert f"{form} is an export, which has no checkpoints; name the run" in capsys.readouterr().err


def test_published_files_are_read_back_bit_by_bit(root: Path) -> None:
    for kind, form, read in (("mae", "vip", load_vip_mae), ("caption", "dpcap", load_dpcap)):
        ours = murmuration.load(root / f"{kind}-run").body
        heads = {
            "heads": ours.shape.encoder.heads,
            "decoder_heads": (ours.shape.pixels if kind == "mae" else ours.shape.text).heads,
        }
        again = read(read_weights(root / f"{kind}-{form}" / "checkpoint.pth"), **heads, say=str)
        state = again.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items()), kind


def test_each_export_says_what_is_promised_and_holds_no_key(root: Path) -> None:
    key = (root / "caption-run" / "secret" / "run.key").read_bytes()
    for kind in KINDS:
        claim = json.loads((root / f"{kind}-run" / "certificate.json").read_text())["claim"]["statement"]
        for form in OWNED[kind]:
            out = root / f"{kind}-{form}"
            page = (out / "README.md").read_text()
            assert claim in page and "license: unknown" in page and "loss on public held-out records" in page
            assert ("top-1" in page) == (kind == "classify")
            assert "the shorter side resized to 16 (bicubic), the middle 16 x 16" in page and "closer view" not in page
            assert (out / "certificate.md").is_file() and verify(out).claimed is not None
            assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o644}
            assert stat.S_IMODE(out.stat().st_mode) == 0o755
            assert not any(key in path.read_bytes() for path in out.iterdir())


def test_pictures_are_seen_as_the_run_measured_them(root: Path, tmp_path: Path) -> None:
    """Weights that were trained on whole pictures and measured on closer crops lose several points of accuracy."""
    assert json.loads((root / "classify-timm" / "config.json").read_text())["pretrained_cfg"]["crop_pct"] == 1
    sizes = json.loads((root / "classify-hf" / "preprocessor_config.json").read_text())
    assert sizes["size"]["shortest_edge"] == sizes["crop_size"]["height"] == 16
    assert murmuration.load(root / "classify-safetensors").view == "center"
    common = ["--public", "--data", root / "public"]
    for number, (asked, view) in enumerate((([], "center"), (["--resize", 384], "resize-crop"))):
        for name in ("classify-run", "classify-safetensors"):
            out = tmp_path / f"{number} {name}"
            assert evaluate("classify", root / name, *common, *asked, "--out", out) == 0
            assert result(out)["settings"]["view"] == view


def test_verify_follows_renamed_tensors_and_finds_another_one(root: Path, tmp_path: Path) -> None:
    checked = verify(root / "classify-hf").attached
    assert checked is not None and "model.safetensors holds certified weights" in checked.checked
    encoder = verify(root / "caption-timm").attached
    assert encoder is not None and any("pos_embed" in each for each in encoder.unchecked)
    for path in (root / "classify-hf").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    state = load_file(tmp_path / "model.safetensors")
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    state[name] = state[name] + 1e-6
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CertificateError, match=r"blocks\.1\.attn\.qkv\.weight"):
        verify(tmp_path)
    (tmp_path / "renamed.json").unlink()
    with pytest.raises(CertificateError, match="is not the one that was certified"):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("kind", "form", "said"),
    [
        ("classify", "vip", "vip is the published form of masked autoencoders, and this is a classifier"),
        ("caption", "vip", "and this is a captioner"),
        ("mae", "dpcap", "dpcap is the published form of captioners, and this is a masked autoencoder"),
    ],
)
def test_a_form_that_a_model_cannot_have_is_refused_and_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    kind: str, form: str, said: str,
) -> None:  # fmt: skip
    assert exported(monkeypatch, root / f"{kind}-run", tmp_path / "out", "--form", form) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_strange_licence_and_averages_that_were_not_kept_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [root / "mae-run", tmp_path / "out", "--form", "timm"]
    for more, said in ((["--licence", "mine\nall"], "--licence"), (["--averaged"], "kept no averages")):
        assert exported(monkeypatch, *asked, *more) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_run_and_its_export_are_loaded_as_one_model(root: Path) -> None:
    picture = sorted((root / "public").rglob("*.png"))[0]
    for kind in KINDS:
        run, out = (murmuration.load(root / f"{kind}-{form}") for form in ("run", "safetensors"))
        assert not out.training and not any(each.requires_grad for each in out.parameters())
        images = out.see([picture, picture.read_bytes()])
        assert images.shape == (2, 3, 16, 16) and torch.equal(images[0], images[1])
        assert torch.equal(run(images), out(images)) and torch.equal(run.features(images), out.features(images))


def test_use_needs_no_deepspeed(root: Path) -> None:
    code = (
        "import sys; from murmuration.launch.use import main; assert main(sys.argv[1:]) == 0\n"
        "assert 'deepspeed' not in sys.modules"
    )
    asked = [root / "caption-safetensors", root / "public" / "red" / "000.png"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, asked)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split() == ["picture", "caption"] and row.startswith(str(asked[1]))


def test_use_tells_what_the_model_says_and_skips_what_is_no_picture(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    pictures = [str(root / "public" / "red"), str(bad), str(tmp_path / "gone.jpg")]

    def told(kind: str, *more: str) -> list[dict[str, Any]]:
        assert use.main([str(root / f"{kind}-safetensors"), *pictures, "--json", *more]) == 0
        out, err = capsys.readouterr()
        assert "bad.png was skipped" in err and "gone.jpg was skipped" in err
        found = json.loads(out)
        assert len(found["pictures"]) == 4 and len(found["unreadable"]) == 2
        return found["pictures"]

    classes = told("classify", "--features", str(tmp_path / "f.npz"), "--page", str(tmp_path / "page.html"))[0][
        "classes"
    ]
    assert {each["name"] for each in classes} == COLOURS and abs(sum(each["share"] for each in classes) - 1) < 1e-5
    kept = np.load(tmp_path / "f.npz")
    assert kept["features"].shape == (4, 24) and kept["pictures"][0].endswith("red/000.png")
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png") == 4 and "http" not in page and "Certified" in page
    assert all(isinstance(each["caption"], str) for each in told("caption", "--beam", "2"))
    ranked = told("caption", "--names", "red", "blue", "green")[0]["names"]
    assert {each["name"] for each in ranked} == {"red", "blue", "green"}
    assert [each["nats"] for each in ranked] == sorted(each["nats"] for each in ranked)
    assert all(each["error"] > 0 for each in told("mae", "--page", str(tmp_path / "mae.html")))
    assert use.main([str(root / "mae-safetensors"), str(bad)]) == 2
    assert "none of the 1 pictures can be read" in capsys.readouterr().err
    assert use.main([str(root / "classify-safetensors"), str(root / "public" / "red"), "--names", "red"]) == 2
    assert "--names is for captioners" in capsys.readouterr().err
