"""Builds the model that a subject's weights belong to, and fills it; refused unless every tensor is there and fits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from murmuration.accounting.certificate.attached import lists_tensors_of
from murmuration.accounting.certificate.weights import AVERAGED, RENAMED, read_lists
from murmuration.accounting.errors import RunError
from murmuration.data.decode.augment import PUBLISHED, SteadyView
from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.text.encoder import TextEncoder
from murmuration.data.text.vocabulary import TokenizerError
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.hugging_face import open_hugging_face
from murmuration.evaluation.models.library import HEAD, LibraryClassifier, filled
from murmuration.evaluation.models.subject import Subject, undescribed
from murmuration.model.build import Model, Objective, build
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.encoder import Encoder
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.named import Named, reads_texts, sees_and_writes
from murmuration.model.released import TEXT_EMBEDDING, read_dpcap, read_vip_mae
from murmuration.model.settings import ModelSettings, NamedPixels, PixelSettings, SettingsError, Shape
from murmuration.model.warm_start import initialise_from, initialise_with
from murmuration.model.weight_files import read_weights
from murmuration.train.recipe.pixels import IMAGENET, Told, in_words, of_settings, of_weights, settled
from murmuration.train.storage.checkpoint import Checkpoints, best_checkpoint
from murmuration.train.storage.checkpoint_read import hash_of, listed_digest
from murmuration.train.storage.model_note import ModelNote, ModelNoteError
from murmuration.train.storage.run_dir import RunDir

CERTIFICATE = "certificate.json"
OURS = ("run", "export")
SAME = 1e-4
"""Share of the largest feature: far more than how sums are rounded, far less than what another activation changes."""
Way = Literal["dpcap", "vip"]
OBJECTIVES: tuple[Objective, ...] = ("mae", "caption", "classify")
TEXTUAL: tuple[Objective, ...] = ("text",)
LENGTH = 512
"""Tokens of a text, where no training says it."""


@dataclass(frozen=True)
class Sizes:
    """What weights do not show, given by hand."""

    heads: int | None = None
    decoder_heads: int | None = None
    image_size: int | None = None
    text_length: int | None = None

    def of_captions(self) -> dict[str, int]:
        given = {"image_size": self.image_size, "text_length": self.text_length}
        return {name: size for name, size in given.items() if size is not None}


@dataclass(frozen=True)
class Evaluated:
    model: Model
    objective: str
    digest: str
    """SHA-256 of the file of weights, or of the checkpoint's manifest."""
    report: LoadReport
    pixels: Normalisation = IMAGENET
    view: SteadyView = PUBLISHED
    """By which its run measured, where what lies beside the weights says so; the published one otherwise."""
    tokenizer: str | None = None
    """The one trained with, where a note beside the weights names it."""
    class_names: tuple[str, ...] = ()
    """As the weights' own folder names a classifier's outputs; empty if it does not."""
    certified: bool = False
    """Whether the certificate beside the weights names these very tensors."""

    @property
    def shape(self) -> Shape:
        return self.model.shape

    @property
    def description(self) -> dict[str, Any]:
        encoder, named = self.shape.encoder, self.shape.named
        tensors = sum(parameter.numel() for parameter in self.model.parameters())
        if named is not None:
            return {
                "objective": self.objective, "architecture": str(named), "image_size": self.shape.image_size,
                "width": encoder.width, "parameters": tensors, "pixels": in_words(self.pixels),
            }  # fmt: skip
        return {
            "objective": self.objective, "image_size": self.shape.image_size, "patch_size": self.shape.patch_size,
            "width": encoder.width, "depth": encoder.depth, "heads": encoder.heads, "parameters": tensors,
            "pixels": in_words(self.pixels),
        }  # fmt: skip


def features_of(model: Evaluated, images: Tensor, way: Way) -> Tensor:
    """[B, width]: ViP's are the means of all tokens but the class token after each block, side by side; DP-Cap's the
    mean of all tokens that a text decoder would see, or of the encoder's where there is none."""
    body = model.model
    if way == "vip":
        if not isinstance(body, Encoder) or body.shape.named is not None:
            what = body.shape.named or "a ResNet"
            raise EvaluationError(
                f"ViP's probe reads the blocks of a transformer of ours, and this is {what}; choose --way dpcap"
            )
        return torch.cat([tokens[:, 1:].mean(dim=1) for tokens in body.layers(images)], dim=1)
    if isinstance(body, Captioner):
        return body.encode_images(images).mean(dim=1)
    if isinstance(body, Encoder):
        return body.tokens(images).mean(dim=1)
    assert isinstance(body, Classifier), "a language model is opened for texts alone"
    return body.features(images)


def width_of(model: Evaluated, way: Way) -> int:
    shape = model.shape
    if way == "vip":
        return shape.encoder.width * shape.encoder.depth
    return shape.text.width if isinstance(model.model, Captioner) else shape.encoder.width


Reader = Callable[[Mapping[str, Tensor], int | None], tuple[Classifier, LoadReport] | None]
"""A published file's tensors and --image-size -> its model; None if the file is another's."""


def open_model(
    subject: Subject, sizes: Sizes, pixels: NamedPixels | PixelSettings | None = None, headless: bool = False,
    readers: Iterable[Reader] = (), texts: bool = False,
) -> Evaluated:  # fmt: skip
    """`pixels` is what --pixels says. `headless`: a classifier may lack its head, because only its body is used.
    `readers`: of published files beside ViP's and DP-Cap's. `texts`: a language model is wanted, and else none."""
    try:
        statistics, known = (IMAGENET, Told(IMAGENET, "")) if texts else _statistics(subject, pixels)
        state, digest, told = _state(subject)
        note = _note(subject, told)
        settings = _settings(subject, note)
        if settings is not None:
            objective = told.get("objective") or (subject.config.phases[-1].objective if subject.config else None)
            found = _configured(subject, settings, objective, state, digest, sizes, texts)
        elif texts or (subject.kind == "hugging-face" and sees_and_writes(subject.note)):
            found = _language_model(subject, digest, sizes, "text" if texts else "caption")
        elif subject.kind == "hugging-face":
            found = _hugging_face(subject, state, digest, sizes)
        elif subject.kind == "timm":
            found = _timm(subject.note, state, digest, sizes)
        else:
            found = _published(subject, state, digest, sizes, readers)
    except (WeightsError, SettingsError) as error:
        raise EvaluationError(f"{subject.path}: {str(error).rstrip('.')}") from None
    lacking = [name for name in found.report.left_as_initialised if not (headless and name.startswith(HEAD))]
    if lacking:
        raise EvaluationError(
            f"{subject.path} lacks {lacking[0]}{f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''}, without "
            "which this cannot be evaluated; name a config and weights that belong together"
        )
    found.model.eval().requires_grad_(False)
    if known.view:
        found.report.notes.append(f"{known.by} names another view ({known.view}); --resize and --crop choose the view")
    certified, view = _is_certified(subject, state), known.measured
    if note is not None:
        found, view = replace(found, tokenizer=note.tokenizer, class_names=note.class_names), note.view
    elif subject.config is not None:
        view = subject.config.phases[-1].view or view
    return replace(found, pixels=statistics, certified=certified, view=view or found.view)


def _statistics(subject: Subject, pixels: NamedPixels | PixelSettings | None) -> tuple[Normalisation, Told]:
    given, key = of_settings(pixels), "--pixels"
    configured = of_settings(subject.config.model.pixels) if subject.config is not None else None
    if configured is not None:
        if given not in (None, configured):
            raise EvaluationError("--pixels contradicts model.pixels of the config; leave it out")
        given, key = configured, "model.pixels"
    told = of_weights(subject.path if subject.kind == "run" else subject.weights)
    return settled(given, told, key), told


def open_text(subject: Subject, model: Evaluated, named: str | None) -> TextEncoder:
    """The tokenizer that is named, or else the config's, or the one beside the weights."""
    shape, phases = model.shape, subject.config.phases if subject.config is not None else []
    configured = next((phase.tokenizer for phase in reversed(phases) if phase.tokenizer is not None), None)
    source = named or configured or model.tokenizer
    if source is None:
        raise EvaluationError('texts are read by a tokenizer; pass --tokenizer (a file, or "clip")')
    try:
        text = TextEncoder(source, shape.text_length, shape.words_of_library)
    except TokenizerError as error:
        raise EvaluationError(f"--tokenizer: {error}") from None
    if text.vocabulary > shape.vocabulary:
        raise EvaluationError(
            f"--tokenizer {source} has {text.vocabulary} tokens, but the model was trained with {shape.vocabulary}; "
            "name the one of its training"
        )
    return text


def _state(subject: Subject) -> tuple[dict[str, Tensor], str, Mapping[str, Any]]:
    """The weights, their digest, and what is written beside them: an export's note, or a checkpoint's manifest."""
    if subject.kind != "run":
        told = subject.note if subject.kind == "export" else {}
        return read_weights(subject.weights), hash_of(subject.weights), told
    run_dir = RunDir(subject.path)
    loaded = best_checkpoint(run_dir) if subject.best else Checkpoints.newest(run_dir.checkpoints)
    if loaded is None:
        raise EvaluationError(f"{subject.path} has no finished checkpoint; let the run reach one")
    return loaded.weights(), loaded.digest, loaded.manifest


def _note(subject: Subject, told: Mapping[str, Any]) -> ModelNote | None:
    """Reads the note saved with our weights, or falls back to --config."""
    try:
        return ModelNote.inside(told, subject.certified) if subject.kind in OURS else None
    except ModelNoteError:
        if subject.config is None:
            raise
        return None


def _settings(subject: Subject, note: ModelNote | None) -> ModelSettings | None:
    """The config's model, or else the one that is written beside the weights; refused if the two have other heads."""
    if subject.config is None:
        if note is None and subject.kind in OURS:
            raise undescribed(subject.path)
        return note.settings if note is not None else None
    settings = subject.config.model
    if note is not None:
        asked, trained = settings.resolved(), note.settings.resolved()
        for part in ("encoder", "text", "pixels"):
            heads, known = getattr(asked, part).heads, getattr(trained, part).heads
            # Of another width, it is another model: its tensors will not fit, and that says more.
            if heads != known and getattr(asked, part).width == getattr(trained, part).width:
                raise EvaluationError(
                    f"--config gives the {part} {heads} heads, but {subject.path} was trained with {known}; omit "
                    "--config, or name its own"
                )
    return settings


def _is_certified(subject: Subject, state: Mapping[str, Tensor]) -> bool:
    """Whether the list of tensors of one certified checkpoint, or of its averages, contains all of these; in the form
    of another package, by the names that the export wrote beside them. Any file may be copied beside a certificate."""
    folder = subject.certified
    try:
        lists = read_lists(folder) if (folder / CERTIFICATE).is_file() else None
        if not lists:
            return False
        found = {name: listed_digest(tensor) for name, tensor in state.items()}
        named = any(
            all(tensors.get(prefix + name) == digest for name, digest in found.items())
            for tensors in lists.values()
            for prefix in ("", AVERAGED)
        )
        return named or ((folder / RENAMED).is_file() and lists_tensors_of(folder, subject.weights))
    except (RunError, OSError, ValueError, KeyError, TypeError):
        return False


def _configured(
    subject: Subject, settings: ModelSettings, objective: str | None, state: Mapping[str, Tensor], digest: str,
    sizes: Sizes, texts: bool,
) -> Evaluated:  # fmt: skip
    wanted = TEXTUAL if texts else OBJECTIVES
    if objective not in wanted:
        more = '; evaluate it by the protocol "text"' if objective == "text" else "; name others"
        raise EvaluationError(
            f"{subject.path} was trained for {objective!r:.80}, which is none of {', '.join(wanted)}{more}"
        )
    if sizes.text_length is not None:
        settings = settings.model_copy(update={"text_length": sizes.text_length})
    if sizes.image_size is not None:
        settings = settings.model_copy(update={"image_size": sizes.image_size})
    ours = {"what": subject.kind} if subject.kind in OURS else None
    return _filled(settings, objective, state, digest, ours)


def _filled(
    settings: ModelSettings, objective: Objective, state: Mapping[str, Tensor], digest: str,
    note: Mapping[str, Any] | None = None,
) -> Evaluated:  # fmt: skip
    model = build(settings, objective)
    return Evaluated(model, objective, digest, initialise_with(model, state, note, take_head=True))


def _published(
    subject: Subject, state: Mapping[str, Tensor], digest: str, sizes: Sizes, readers: Iterable[Reader]
) -> Evaluated:
    given: dict[str, Any] = {"image_size": sizes.image_size, "heads": sizes.heads, "decoder_heads": sizes.decoder_heads}
    if TEXT_EMBEDDING in state:
        captioner, report = read_dpcap(state, **given)
        return Evaluated(captioner, "caption", digest, report)
    if "decoder_pred.weight" in state and "mask_token" in state:
        autoencoder, report = read_vip_mae(state, **given)
        return Evaluated(autoencoder, "mae", digest, report)
    for read in readers:
        if (found := read(state, sizes.image_size)) is not None:
            return Evaluated(found[0], "classify", digest, found[1])
    raise EvaluationError(
        f"{subject.path} is no published file that can be read here, such as ViP's and DP-Cap's, and no config.json "
        "lies beside it; pass --config with the model"
    )


def _language_model(
    subject: Subject, digest: str, sizes: Sizes, objective: Literal["text", "caption"]
) -> Evaluated:  # fmt: skip
    """Of a folder of transformers."""
    if objective == "text" and (subject.kind != "hugging-face" or not reads_texts(subject.note)):
        raise EvaluationError(
            f"{subject.path} is no language model; name a run or an export of one, or a folder of transformers"
        )
    positions = subject.note.get("max_position_embeddings", subject.note.get("n_positions"))
    most = positions if isinstance(positions, int) else LENGTH
    given = {"family": "hf", "name": str(subject.path)}
    given |= {"text_length": sizes.text_length or min(most, LENGTH)} if objective == "text" else sizes.of_captions()
    model = build(ModelSettings.model_validate(given), objective)
    beside = str(subject.path) if (subject.path / "tokenizer.json").is_file() else None
    return Evaluated(model, objective, digest, initialise_from(model, subject.path), tokenizer=beside)


def _hugging_face(subject: Subject, state: Mapping[str, Tensor], digest: str, given: Sizes) -> Evaluated:
    """A plain vision transformer becomes ours; anything else is computed by transformers."""
    told = subject.note
    labels = told.get("id2label") or {}
    width = told.get("hidden_size")
    same = {"hidden_act": "gelu", "qkv_bias": True, "num_channels": 3}
    usual = all(told.get(name, value) == value for name, value in same.items())
    plain = told["model_type"] in ("vit", "vit_mae") and usual and told.get("intermediate_size") == 4 * (width or 0)
    if plain:
        sizes = {
            "image_size": given.image_size or told.get("image_size"), "patch_size": told.get("patch_size"),
            "width": told["hidden_size"], "depth": told.get("num_hidden_layers"),
            "heads": told.get("num_attention_heads"), "classes": len(labels) or 2,
        }  # fmt: skip
        found = _filled(_classifier(sizes), "classify", state, digest)
    else:
        model, report = open_hugging_face(subject.path, told, state, given.image_size)
        found = Evaluated(model, "classify", digest, report)
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    return replace(found, class_names=names)


def _timm(told: dict[str, Any], state: Mapping[str, Tensor], digest: str, given: Sizes) -> Evaluated:
    """A plain vision transformer or BiT becomes ours; anything else is computed by timm."""
    name, args = told["architecture"], told.get("model_args") or {}
    # A head that the file lacks is built all the same; protocols that need it refuse the file later.
    classes = max(1, args.get("num_classes", told.get("num_classes", 1000)))
    theirs = _made_by_timm(name, {**args, "num_classes": classes})
    pretrained = told.get("pretrained_cfg") or theirs.pretrained_cfg or {}
    size = args.get("img_size") or pretrained.get("input_size", (3, 224, 224))
    side = size if isinstance(size, int) else size[-1]
    report = LoadReport(f"timm's {name}")
    filled(theirs, state, _heads(theirs, name), report)
    model = TimmClassifier(theirs, Named.of("timm", name, args), side)
    try:
        sizes = _sizes_of(theirs, side)
    except AttributeError:  # it has other parts in the places of ours
        sizes = None
    found = _as_ours(sizes, state, digest, model, given.image_size)
    if found is None:
        if given.image_size not in (None, side):
            model = TimmClassifier(theirs, Named.of("timm", name, args), given.image_size)
        found = Evaluated(model, "classify", digest, report)
    names = tuple(str(name) for name in told.get("label_names", ()))
    return replace(found, class_names=names)


def _as_ours(
    sizes: dict[str, Any] | None, state: Mapping[str, Tensor], digest: str, theirs: LibraryClassifier,
    image_size: int | None,
) -> Evaluated | None:  # fmt: skip
    """Our model with these weights, if it computes what the library's computes: an activation, a norm's constant or
    the order of two layers leaves no trace in a file."""
    if sizes is None:
        return None
    try:
        found = _filled(_classifier(sizes), "classify", state, digest)
    except WeightsError:  # it has a layer that ours lack
        return None
    assert isinstance(found.model, Classifier)
    side = theirs.shape.image_size
    picture = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = (model.eval().features(picture) for model in (found.model, theirs))
    if not (one - other).abs().max() <= SAME * other.abs().max():
        return None
    if image_size in (None, side):
        return found
    return _filled(_classifier({**sizes, "image_size": image_size}), "classify", state, digest)


def _made_by_timm(name: str, given: dict[str, Any]) -> Any:
    import timm

    try:
        return timm.create_model(name, pretrained=False, **given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise EvaluationError(f"timm knows no architecture {name!r} ({error}); name another") from None


def _sizes_of(theirs: Any, side: int) -> dict[str, Any] | None:
    from timm.models.resnetv2 import ResNetV2
    from timm.models.vision_transformer import VisionTransformer

    kind = type(theirs)
    if issubclass(kind, ResNetV2):
        stages = [len(stage.blocks) for stage in theirs.stages]
        width = theirs.stem.conv.out_channels
        return {"image_size": side, "width": width, "stages": stages, "classes": theirs.num_classes}
    if not issubclass(kind, VisionTransformer) or theirs.global_pool != "token":
        return None
    patches, blocks = theirs.patch_embed, theirs.blocks
    return {
        "image_size": patches.img_size[0], "patch_size": patches.patch_size[0], "width": theirs.embed_dim,
        "depth": len(blocks), "heads": blocks[0].attn.num_heads, "classes": theirs.num_classes,
    }  # fmt: skip


def _classifier(sizes: dict[str, Any]) -> ModelSettings:
    given = {name: value for name, value in sizes.items() if value is not None}
    try:
        return ModelSettings.model_validate({"family": "classifier", **given})
    except ValidationError as error:
        first = error.errors()[0]
        raise EvaluationError(
            f"its config.json fits no model of ours ({first['loc'][0] if first['loc'] else 'model'}: {first['msg']}); "
            "name another"
        ) from None


def digest_of_model(evaluated: Evaluated) -> str:
    """What a feature depends on beside the picture: the weights, and how they are computed with."""
    told = (
        f"{evaluated.digest} {evaluated.objective} {evaluated.shape!r} {evaluated.pixels.mean} {evaluated.pixels.std}"
    )
    return hashlib.sha256(told.encode()).hexdigest()


class TimmClassifier(LibraryClassifier):
    def read_by_head(self, images: Tensor) -> Tensor:
        return self.net.forward_head(self.net.forward_features(images), pre_logits=True)

    def logits_of(self, images: Tensor) -> Tensor:
        return self.net(images)


def _heads(net: Any, name: str) -> tuple[str, ...]:
    """Where its last layers are: a linear layer, a convolution of one pixel, a norm before either, or several."""
    given = net.get_classifier()
    parts = given if isinstance(given, list | tuple) else (given,)
    wanted = {id(part) for part in parts if isinstance(part, nn.Module)}
    found = tuple(path for path, module in net.named_modules() if id(module) in wanted)
    if not found:
        raise EvaluationError(f"timm's {name} has no head whose place a classifier could take; name another")
    return found
