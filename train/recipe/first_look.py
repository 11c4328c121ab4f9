"""What is most often wrong with a config, found before PyTorch is imported, which takes seconds.

Every sentence is that of the function which looks again when the phase is opened.
"""

from __future__ import annotations

import math
from pathlib import Path

from murmuration.accounting.epsilon.calibrate import require_target
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.plan import require_possible
from murmuration.data.index.open import open_index, require_index
from murmuration.data.store.place import ShardError
from murmuration.data.text.built_in import is_built_in
from murmuration.model.settings import SettingsError
from murmuration.train.config.data import CheckpointData, ShardData
from murmuration.train.config.phase import Phase
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.labels import check_at_hand
from murmuration.train.recipe.open_data import known_records, open_text, open_units
from murmuration.train.recipe.record_names import names_at_hand
from murmuration.train.recipe.weights_at_hand import require_weights


def first_look(config: Config, training: bool) -> None:
    """`training`: the records must be at hand."""
    try:
        config.model.require_whole_patches(built=False)
    except SettingsError as error:
        raise RecipeError(f"model: {error}") from None
    for number, phase in enumerate(config.phases):
        where, data = f"phases.{number}", phase.data
        if training and isinstance(data, CheckpointData):
            require_weights(Path(data.path), f"{where}.data.path: ")
        if not isinstance(data, ShardData):
            continue
        if training:
            _require_records(data, f"{where}.data")
            if (name := phase.tokenizer) is not None and not is_built_in(name) and not Path(name).exists():
                open_text(phase, config.model, where)
        names_at_hand(number, phase)
        if phase.privacy is not None:
            _require_possible(phase, where)
    check_at_hand(config, config.model.classes)


def _require_records(data: ShardData, where: str) -> None:
    try:
        require_index(data.path)
        index = open_index(data.path)
    except (ShardError, OSError) as error:
        raise RecipeError(f"{where}.path: {error}") from None
    open_units(index, data, where)


def _require_possible(phase: Phase, where: str) -> None:
    assert phase.privacy is not None
    records, batch = known_records(phase, where)[0], phase.privacy.expected_batch
    try:
        require_possible(records, records if math.isinf(batch) else batch, phase.privacy.delta)
        if phase.privacy.noise_multiplier is None:
            require_target(phase.privacy.epsilon)
    except (AccountingError, PlanError) as error:
        raise RecipeError(f"{where}.privacy: {error}") from None
