"""How a model is run: eagerly, compiled, or compiled with CUDA graphs. And whether it still gives what it should."""

from __future__ import annotations

import itertools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import nn

from tntprune.backbones.base import takes_images
from tntprune.bench import Backend
from tntprune.errors import UsageError, UserError
from tntprune.methods.checks import check_whole

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 2e-2}  # what `difference` may be
Run = Callable[[torch.Tensor], Any]
_lines = itertools.count(1)


def check_settings(
    batch_sizes: Sequence[int], dtypes: Sequence[str], backends: Sequence[str], rounds: int, device: torch.device
) -> None:
    """Refuse what cannot be timed.

    Raises:
        UsageError: there is nothing to time, a number or a name is none, or CUDA graphs are asked for elsewhere than
            on a GPU.
    """
    check_whole("rounds", rounds, 3)
    for name, given in (("batch_sizes", batch_sizes), ("dtypes", dtypes), ("backends", backends)):
        if not given:
            raise UsageError(f"{name}: none given; expected at least one")
    for size in batch_sizes:
        check_whole("batch_sizes", size, 1)
    for name, names, known in (("dtype", dtypes, tuple(DTYPES)), ("backend", backends, get_args(Backend))):
        if odd := [one for one in names if one not in known]:
            raise UsageError(f"{name} {odd[0]!r}: expected one of {', '.join(known)}")
    if "cudagraphs" in backends and device.type != "cuda":
        raise UsageError(f"backend cudagraphs: the device is {device}; expected --device cuda, or eager and compile")


def prepared(model: nn.Module, backend: Backend, compiler: str = "inductor") -> Run:
    """Return a function from images to the model's output; nothing is compiled before its first call.

    Args:
        model: To run.
        backend: How.
        compiler: What `torch.compile` hands the graph to.

    Every call gives a function with a code object of its own, because Dynamo keeps what it compiled by code object:
    it would give up after eight models of one class, and look through all of them at every call.
    """
    call = takes_images(model)

    def run(images: torch.Tensor) -> Any:
        return call(images)

    if backend == "eager":
        return run
    code = run.__code__.replace(co_firstlineno=next(_lines))
    own = types.FunctionType(code, run.__globals__, "run", run.__defaults__, run.__closure__)
    mode = "reduce-overhead" if backend == "cudagraphs" else None
    return torch.compile(own, backend=compiler, fullgraph=True, dynamic=False, mode=mode)


def first_run(run: Run, images: torch.Tensor, backend: Backend) -> Any:
    """Run it for the first time, and make sure that what was to be compiled was compiled, whole.

    Raises:
        UserError: it does not compile, or Dynamo is switched off.
    """
    if backend == "eager":
        return run(images)
    from torch._dynamo.utils import counters
    from torch._inductor import config

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no CUDA
    before, skipped = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    try:
        with config.patch(freezing=images.device.type == "cpu"):  # weights are laid out once, as the kernels want them
            out = run(images)
            for _ in range(2 * (backend == "cudagraphs")):  # the second call records the graph, the third replays it
                out = run(images).clone()
    except Exception as error:  # Dynamo, Inductor and the C++ compiler have a hundred ways to fail
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"does not compile: {reason}") from None
    if counters["stats"]["unique_graphs"] != before + 1:
        graphs = counters["stats"]["unique_graphs"] - before
        raise UserError(f"was not compiled whole: {graphs} graphs instead of 1 (is TORCHDYNAMO_DISABLE set?)")
    if counters["inductor"]["cudagraph_skips"] != skipped:
        raise UserError("was compiled without CUDA graphs, which Inductor left out")
    return out


def logits_of(output: Any) -> torch.Tensor:
    """Return a model's logits, or what comes nearest in what it gives, in fp32."""
    if isinstance(output, torch.Tensor):
        return output.float()
    for name in ("logits", "logits_per_image", "image_embeds", "pooler_output", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name).float()  # type: ignore[no-any-return]
    raise UserError(f"{type(output).__name__}: no logits in what the model gives; expected a tensor or a ModelOutput")


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference, as a share of that of what was expected.

    Not the largest difference: in low precision two tokens that score nearly the same may change places, which changes
    one image's answer a little, and nothing is wrong.
    """
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-12))


def check_same(output: Any, expected: Any, dtype: str) -> float:
    """Return the `difference` of a setting's output from the eager model's.

    Raises:
        UserError: it is too large to be rounding.
    """
    found = difference(logits_of(output), logits_of(expected))
    if not found <= TOLERANCE[dtype]:
        raise UserError(
            f"gives something else than the eager model: {found:.2g} of its output's size, "
            f"expected at most {TOLERANCE[dtype]:g}"
        )
    return found
