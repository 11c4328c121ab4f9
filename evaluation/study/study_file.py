"""The file of a study: one config, what is changed in it, how often it is trained, what is measured and drawn.

    {
      "title": "One private step",
      "config": "../transfer/transfer_vith_onestep.json",
      "set": {"phases.1.data.classes": "classes.txt"},
      "axis": {"key": "phases.1.privacy.epsilon", "label": "ε", "values": [0.25, 1, 4]},
      "arms": [{"name": "LAMB"}, {"name": "momentum", "set": {"phases.1.optimizer.type": "SGD"}}],
      "seeds": 5,
      "measures": [{"label": "top-1", "metric": "top_1"}],
      "sizes": {"toy": {"seeds": 1, "set": {"phases.1.steps": 2}}}
    }

Every arm is trained at every value of the axis with every seed. An arm's `at` changes keys at one value, and may change
the axis's own: `"at": {"4": {"phases.1.schedule.peak": 1e-3}}`. `--set size=toy` puts the keys of that size over the
others: those of `set` one by one, lists whole. Any other `--set` changes a key of the study, or of the config in all
arms. An arm with `weights` is not trained: it is what somebody has published, and is evaluated once. An arm with
`measures` is measured by those alone, each in place of the study's of that label.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from murmuration.accounting.escaping import printable
from murmuration.accounting.strict_json import JsonError
from murmuration.evaluation.errors import EvaluationError
from murmuration.train.config.load import (
    PATH_KEYS,
    absolute_paths,
    is_local,
    parse_with_comments,
    put_override,
    sentence_of,
)
from murmuration.train.config.section import Section

NAME = r"^[\w .,=/()+-]{1,60}$"
Value = float | int | str | bool | None


class Axis(Section):
    key: str = Field(min_length=1, description="The key of the config that changes along the figure.")
    label: str = Field(pattern=NAME, description="What the figure calls it.")
    values: list[Value] = Field(min_length=1, description="Its values; null is the value null.")
    scale: Literal["linear", "log"] = Field(default="linear", description="How the figure spaces them.")


class Measure(Section):
    label: str = Field(pattern=NAME, description="What the table calls it.")
    metric: str | None = Field(
        default=None, description="A number that the run itself measures on public records: its last value."
    )
    evaluate: list[str] | None = Field(
        default=None,
        description="Arguments of murmuration evaluate without the run and --out: ['probe', '--data', …].",
    )
    number: str | None = Field(default=None, description="Which of the evaluation's numbers.")
    share: bool = Field(default=True, description="Lies within 0 and 1, and so does its interval.")

    @model_validator(mode="after")
    def _from_one_place(self) -> Measure:
        if (self.metric is None) == (self.evaluate is None) or (self.evaluate is None) != (self.number is None):
            raise ValueError("give `metric`, or `evaluate` with `number`")
        return self


class Arm(Section):
    name: str = Field(pattern=NAME, description="The line of the figure.")
    config: str | None = Field(default=None, description="Another config than the study's.")
    weights: str | None = Field(default=None, description="Published weights, which are evaluated and not trained.")
    set: dict[str, Any] = Field(default_factory=dict, description="Keys of the config that this arm changes.")
    values: list[Value] | None = Field(default=None, description="The arm's own values on the axis.")
    at: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Keys that this arm changes at one value of the axis, such as a rate."
    )
    measures: list[Measure] | None = Field(
        default=None, description="Its own instead of the study's of the same labels; it has no others."
    )


class Study(Section):
    title: str = Field(min_length=1, max_length=200, description="The heading of page and figure.")
    about: dict[str, str] = Field(default_factory=dict, description="Comments: sources, what to expect.")
    config: str = Field(description="The config that all arms change, relative to this file.")
    set: dict[str, Any] = Field(default_factory=dict, description="Keys that all arms change.")
    axis: Axis | None = Field(default=None, description="null: the figure has one bar per arm.")
    arms: list[Arm] = Field(min_length=1, description="The lines of the figure.")
    seeds: int = Field(default=1, ge=1, le=1000, description="Runs of each, with weights of seed 1, 2, … and own keys.")
    measures: list[Measure] = Field(min_length=1, description="What is measured.")
    panels: int = Field(default=1, ge=1, le=4, description="How many of the measures the figure shows, side by side.")

    @model_validator(mode="after")
    def _names_differ(self) -> Study:
        for what, names in (("arms", [a.name for a in self.arms]), ("measures", [m.label for m in self.measures])):
            if len(set(names)) < len(names):
                raise ValueError(f"two {what} have the same name; rename one")
        if self.axis is None and any(arm.values is not None for arm in self.arms):
            raise ValueError("an arm has values, and there is no axis; name one, or leave the values out")
        for arm in self.arms:
            if strange := {measure.label for measure in arm.measures or []} - {each.label for each in self.measures}:
                raise ValueError(
                    f"arm {arm.name!r} measures {sorted(strange)[0]!r}, which the study does not; add it there"
                )
            if arm.weights is not None:
                self._require_evaluated(arm)
            if unknown := set(arm.at) - {str(value) for value in self.values_of(arm)}:
                raise ValueError(f"arm {arm.name!r} has `at` for {sorted(unknown)[0]!r}, which is no value of its axis")
        return self

    def _require_evaluated(self, arm: Arm) -> None:
        if self.axis is not None or arm.config is not None or arm.set or arm.at:
            raise ValueError(
                f"arm {arm.name!r} has weights, which nothing trains; leave out config, set, at and the axis"
            )
        if not any(self.measures_of(arm.name)):
            raise ValueError(f"arm {arm.name!r} has weights, and no measure evaluates them; give one `evaluate`")

    def measures_of(self, name: str) -> list[Measure | None]:
        """An arm's, in the order of the study's; None where it has none, as published weights have of no training."""
        arm = next(arm for arm in self.arms if arm.name == name)
        own = {measure.label: measure for measure in (self.measures if arm.measures is None else arm.measures)}
        found = [own.get(measure.label) for measure in self.measures]
        return [None if arm.weights and each and each.evaluate is None else each for each in found]

    def values_of(self, arm: Arm) -> list[Value]:
        return [None] if self.axis is None else arm.values or self.axis.values


@dataclass(frozen=True)
class Run:
    """One training of a study."""

    arm: str
    place: Value
    """Its value on the axis."""
    seed: int
    name: str
    config: Path
    overrides: tuple[str, ...]
    weights: Path | None = None
    """What is evaluated in place of a run."""


def load_study(path: Path, overrides: list[str]) -> Study:
    """Paths are relative to the file's folder; those in overrides to the current one."""
    try:
        raw: Any = parse_with_comments(path.read_bytes())
    except OSError as error:
        raise EvaluationError(
            f"{path} cannot be read as a study ({error.strerror}); name one of ds_configs/studies"
        ) from None
    except JsonError as error:
        raise EvaluationError(printable(f"{path} {error}")) from None
    if not isinstance(raw, dict):
        raise EvaluationError(f"{path} must contain one JSON object")
    sizes = raw.pop("sizes", {})
    chosen = [each.partition("=")[2] for each in overrides if each.startswith("size=")]
    for size in chosen[-1:]:
        if size not in sizes:
            raise EvaluationError(printable(f"{path} has no size {size!r}; it has {', '.join(sizes) or 'none'}"))
        raw |= {"set": {**raw.get("set", {}), **sizes[size].pop("set", {})}, **sizes[size]}
    _paths_from(raw, path.resolve().parent)
    for override in overrides:
        key, _, value = override.partition("=")
        if key.partition(".")[0] in Study.model_fields:
            put_override(raw, override)
        elif key != "size":  # of the config, in all arms
            put_override(changed := {}, f"{key.rpartition('.')[2]}={value}")
            raw.setdefault("set", {})[key] = next(iter(changed.values()))
    try:
        return Study.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise EvaluationError(
            "\n".join(printable(f"{path}: {sentence_of(fault, Study)}") for fault in error.errors())
        ) from None


def _paths_from(raw: dict[str, Any], folder: Path) -> None:
    """Makes paths absolute: configs, those among the keys that are changed, and files among evaluations' arguments."""
    arms = [arm for arm in raw.get("arms", []) if isinstance(arm, dict)]
    for holder in (raw, *arms):
        for name in ("config", "weights"):
            if isinstance(holder.get(name), str):
                holder[name] = str(folder / holder[name])
        at = holder.get("at")
        sections: list[Any] = [holder.get("set"), *(at.values() if isinstance(at, dict) else ())]
        for changed in (each for each in sections if isinstance(each, dict)):
            for key, value in list(changed.items()):
                last = key.rpartition(".")[2]
                if last in PATH_KEYS and is_local(last, value):
                    changed[key] = str(folder / value)
                else:
                    absolute_paths(value, folder)
    measures = [each for holder in (raw, *arms) for each in holder.get("measures") or []]
    for measure in measures:
        arguments: Any = measure.get("evaluate") if isinstance(measure, dict) else None
        for place, given in enumerate(arguments if isinstance(arguments, list) else []):
            if isinstance(given, str) and not given.startswith("-") and (folder / given).exists():
                arguments[place] = str(folder / given)


def runs_of(study: Study, out: Path) -> list[Run]:
    """In the order in which they are trained: one of every arm, then the others, so that what is wrong shows early."""
    found = []
    for arm in study.arms:
        if arm.weights is not None:
            name = re.sub(r"[^\w.-]+", "_", f"{arm.name}-1")
            found.append(Run(arm.name, None, 1, name, Path(study.config), (), Path(arm.weights)))
            continue
        for value in study.values_of(arm):
            for seed in range(1, study.seeds + 1):
                along = {} if study.axis is None else {study.axis.key: value}
                place = "" if study.axis is None else f"-{value}"
                name = re.sub(r"[^\w.-]+", "_", f"{arm.name}{place}-{seed}")
                changed = study.set | arm.set | along | arm.at.get(str(value), {})
                changed = changed | {"model.init_seed": seed, "run.dir": str(out / "runs" / name)}
                overrides = tuple(f"{key}={json.dumps(value)}" for key, value in changed.items())
                found.append(Run(arm.name, value, seed, name, Path(arm.config or study.config), overrides))
    by_name: dict[str, Run] = {}
    for run in found:  # or one would be trained, and stand for both
        if by_name.setdefault(run.name, run) is not run:
            raise EvaluationError(
                printable(
                    f"a run of arm {run.arm!r} and one of {by_name[run.name].arm!r} have the same folder, runs/"
                    f"{run.name}; rename an arm, or list each value once"
                )
            )
    first = [next(run for run in found if run.arm == arm.name) for arm in study.arms]
    return first + [run for run in found if run not in first]
