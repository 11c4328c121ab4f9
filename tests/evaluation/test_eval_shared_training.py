"""Processes that train one model: what each has of a batch's statistics and gradients, and what the others had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.protocols.shared_training import SharedTraining, own_part, resumed


def training(monkeypatch: pytest.MonkeyPatch, model: nn.Module, others: list[Tensor]) -> SharedTraining:
    """One of two ranks; the other one's tensors are added where they meet."""
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(others.pop(0)))
    sharing: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=0, world=2), gradients=None, open_gradients=lambda _: None,
        of_all=lambda act: [act(), 0],
    )  # fmt: skip
    return SharedTraining(sharing, model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize(("ran", "other_ran"), [(True, True), (True, False), (False, True)])
def test_statistics_of_a_process_that_had_no_part_do_not_count(
    monkeypatch: pytest.MonkeyPatch, ran: bool, other_ran: bool
) -> None:
    model = nn.BatchNorm1d(2)
    with torch.no_grad():
        model.running_mean += torch.tensor([4.0, 8.0])  # pyright: ignore[reportOptionalMemberAccess]
    theirs = torch.tensor([2.0, 2.0, 3.0, 3.0, 1.0]) * float(other_ran)
    gradients = torch.zeros(2 + 4)
    training(monkeypatch, model, [gradients, theirs]).step(lambda: 0.0, ran=ran)
    assert model.running_mean is not None and model.running_var is not None
    expected = {(True, True): [3.0, 5.0], (True, False): [4.0, 8.0], (False, True): [2.0, 2.0]}[ran, other_ran]
    assert model.running_mean.tolist() == expected
    assert model.running_var.tolist() == ([2.0] if ran and other_ran else [1.0] if ran else [3.0]) * 2


def test_gradients_are_added_up_and_what_nobody_used_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("both", "mine", "theirs", "nobodys")})
    # In the order of the parameters, which is that of their names.
    used, found = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 0, 0, 0, 0, 3.0, 4.0])

    def backward() -> float:
        model["both"].grad, model["mine"].grad = torch.full((2,), 10.0), torch.full((2,), 5.0)
        return 1.0

    training(monkeypatch, model, [torch.cat([used, found])]).step(backward, ran=True)
    assert [model[name].tolist() for name in ("both", "mine", "theirs")] == [[-11, -12], [-5, -5], [-3, -4]]
    assert model["nobodys"].grad is None


def test_a_loss_that_is_not_finite_on_another_process_ends_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training(monkeypatch, nn.Linear(1, 1), [])
    made.sharing.of_all = lambda act: [act(), float("nan")]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EvaluationError, match="the loss is not finite"):
        made.step(lambda: 1.0, ran=True)


def test_processes_that_read_different_states_are_refused() -> None:
    sharing: Any = SimpleNamespace(of_all=lambda act: [act(), 0])
    with pytest.raises(EvaluationError, match="found 0 and 2 epochs done"):
        resumed(sharing, lambda: 2)
    parts = [own_part(list(range(5)), SimpleNamespace(ranks=SimpleNamespace(rank=r, world=3))) for r in range(3)]  # pyright: ignore[reportArgumentType]
    assert parts == [[0, 3], [1, 4], [2]]
