"""The code of Triton's kernels for cards that are not here: its compiler and NVIDIA's assembler need no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def compiled(
    kernel: Any, kinds: Mapping[str, str], constants: Mapping[str, Any], capability: int = 80,
    aligned: Iterable[str] = (), **options: Any,
) -> Any:  # fmt: skip
    """For the oldest of the cards that bf16 runs on, unless another is named. What `kinds` does not name is a number of
    32 bits; what is `aligned` is a multiple of 16, as the compiler is told at run time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    multiples = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, multiples)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
