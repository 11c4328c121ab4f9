"""Run by several ranks: checkpoints that DeepSpeed itself writes are read here, and ours by DeepSpeed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.storage.checkpoint_read import Loaded
from murmuration.train.storage.deepspeed_format import read_deepspeed, write_deepspeed
from tests.support.answering import answer


class Net(nn.Module):
    """Odd sizes, a frozen parameter and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(11), requires_grad=False)
        self.register_buffer("table", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean() + 0 * self.frozen.sum()


def engine_of(net: nn.Module, stage: int) -> Any:
    trained = [p for p in net.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "steps_per_print": 1 << 40,
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(trained, lr=0.1), config=config)[0]


def stepped(engine: Any, seed: int) -> None:
    engine.backward(engine(torch.randn(2, 7, generator=torch.Generator().manual_seed(seed))))
    engine.step()


def weights_of(engine: Any) -> dict[str, Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def exported(loaded_from: Any, folder: Path) -> Loaded:
    """A checkpoint of ours, as our trainer would have written it, with the same weights and moments."""
    from safetensors.torch import save_file

    trained = {name: p for name, p in loaded_from.module.named_parameters() if p.requires_grad}
    tensors = {f"weights|{name}|0": p.detach().reshape(-1).clone() for name, p in trained.items()}
    for name, p in trained.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[f"{kind}|{name}|0"] = torch.full((p.numel(),), 0.25)
    others = {name: t for name, t in loaded_from.module.state_dict().items() if name not in trained}
    tensors |= {f"fixed|{name}|0": tensor.detach().reshape(-1).clone() for name, tensor in others.items()}
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "piece"))
    shapes = {name: list(t.shape) for name, t in loaded_from.module.state_dict().items()}
    manifest = {"optimizer_step": 2, "shapes": shapes}
    pieces = {}
    for key, tensor in tensors.items():
        kind, name, _ = key.split("|")
        pieces[kind, name] = [(0, tensor.numel(), folder / "piece")]
    return Loaded(None, manifest, "", pieces)  # pyright: ignore[reportArgumentType]


def main() -> None:
    ranks = start_ranks()
    out = Path(sys.argv[-1])
    results: dict[str, bool] = {}
    for stage in (1, 2, 3):
        engine = engine_of(Net(stage), stage)
        stepped(engine, ranks.rank)
        stepped(engine, 7 + ranks.rank)
        engine.save_checkpoint(str(out / f"theirs{stage}"))
        ranks.barrier()
        results[f"their stage {stage} is read"] = same(read_deepspeed(out / f"theirs{stage}"), weights_of(engine))
        if stage == 1:
            if ranks.main:
                write_deepspeed(exported(engine, out / "ours"), out / "to-deepspeed")
                found = get_fp32_state_dict_from_zero_checkpoint(str(out / "to-deepspeed"))
                expected = weights_of(engine)
                results["zero_to_fp32 reads ours"] = same({n: found[n] for n in expected}, expected)
            ranks.barrier()
            fresh = engine_of(Net(99), 1)
            fresh.load_checkpoint(str(out / "to-deepspeed"), load_module_only=True)
            results["load_checkpoint reads ours"] = same(weights_of(fresh), weights_of(engine))
    found = ranks.gather(results)
    answer(ranks, {name: all(each.get(name, True) for each in found) for name in results})


if __name__ == "__main__":
    main()
