"""Is the quantized folder what was asked for, and is it still the model? Read back from disk, gate by gate.

Runs in the backend's environment (torch, transformers), as its own process: what the backend believes it wrote
is not evidence. Request: a `QuantizeRequest`. Result: {"evidence", "peak_memory_bytes", "peak_device_memory_bytes"}. A gate that fails
raises `QuantgateError` naming the module and the number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pipeline.errors import QuantgateError
from pipeline.files import read_json
from pipeline.models.architectures import Geometry, geometry, linear_modules, linear_shape, other_tensors
from pipeline.models.child import Progress, child_main
from pipeline.quantize.base import QuantizeRequest
from pipeline.quantize.calibration import WINDOW_TOKENS, coverage_pieces, heldout_pieces
from pipeline.quantize.checkpoint import Checkpoint, Format
from pipeline.quantize.effective_error import (
    UNQUANTIZED_TOLERANCE,
    check_unfolded_tensors,
    layer_errors,
    plain_errors,
)
from pipeline.quantize.float_format import round_activations
from pipeline.quantize.kv_scales import Coverage, read_scales
from pipeline.quantize.memory import peak_memory
from pipeline.quantize.perplexity import perplexity, see_caches
from pipeline.quantize.round_to_nearest import round_to_nearest
from pipeline.settings.schema import QuantizeRecipe

# Below this loss of round-to-nearest the share of it that AWQ keeps is mostly the noise of 4,096 tokens.
MIN_COMPARABLE_LOSS = 0.01


def prove(raw_request: dict[str, Any]) -> dict[str, Any]:
    """Run every gate on the folder of the request; see the module's docstring."""
    request = QuantizeRequest.model_validate(raw_request)
    progress = Progress(request.progress_file)
    config_path = request.model_dir / "config.json"
    sizes = geometry(read_json(config_path), str(config_path))
    with ExitStack() as stack, torch.inference_mode():
        original, stored = Checkpoint(request.model_dir, stack), Checkpoint(request.out_dir, stack)
        scales = read_scales(stored, sizes, request.recipe)
        coverage = Coverage(scales) if scales else None
        evidence = {
            **check_config(read_json(request.out_dir / "config.json"), stored.format, request.recipe),
            **check_modules(stored, sizes, request.recipe),
            **scan_finite(stored),
            **check_effective_error(sizes, original, stored, request.recipe, progress),
            **check_perplexity(request, sizes, original, stored, progress, coverage),
        }
        if coverage is not None:
            evidence |= coverage.evidence()
    return {
        "evidence": evidence,
        **peak_memory(),
    }


def check_config(config: dict[str, Any], layout: Format | None, recipe: QuantizeRecipe) -> dict[str, Any]:
    """What the engine will believe: method, bits, group size and zero point as the recipe says."""
    if layout is None:
        raise QuantgateError(
            "config.json has no quantization_config: an engine would read packed weights as plain ones"
        )
    layout.check_config(config["quantization_config"], recipe)
    return {
        "format": layout.METHOD,
        "zero_point": recipe.zero_point if recipe.bits == 4 else None,
        "activations": "float8_e4m3fn" if recipe.method == "fp8" else None,
    }


def check_modules(stored: Checkpoint, sizes: Geometry, recipe: QuantizeRecipe) -> dict[str, Any]:
    """Every linear module of the architecture is quantized, with the right shapes, and no other is.

    Bits and group size of the record are those of the tensors, not of any config.
    """
    expected = linear_modules(sizes) if recipe.quantizes_weights else []
    found = stored.quantized_modules()
    missing = [module for module in expected if module not in found]
    if missing:
        raise QuantgateError(
            f"{len(expected) - len(missing)} of {len(expected)} linear modules are quantized; the first missing is {missing[0]}"
        )
    surplus = sorted(found - set(expected))
    if surplus:
        raise QuantgateError(f"{surplus[0]} is quantized, but the architecture keeps it in full precision")
    absent = sorted(other_tensors(sizes).keys() - stored.names())
    if absent:
        raise QuantgateError(f"{absent[0]} is missing from the checkpoint")
    zero_points: set[int] = set()
    bits, group_sizes = set(), set()
    for module in expected:
        packed = stored.packed(module)
        layer_local = module.split(".", 3)[3]
        rows, columns = linear_shape(sizes, layer_local)
        packed.check(rows, columns, recipe.group_size)
        bits.add(stored.packed_bits(module) // (rows * columns))
        group_sizes.add(packed.group_size())
        points = packed.zero_points()
        if recipe.bits == 4 and (points is not None) != recipe.zero_point:
            raise QuantgateError(
                f"{module} has {'zero points' if recipe.zero_point is False else 'no zero points'}, but the recipe asks for "
                f"zero_point={recipe.zero_point}"
            )
        if points is not None:
            zero_points.update(points.unique().tolist()[:2])
    if expected and recipe.zero_point and len(zero_points) < 2:
        raise QuantgateError(
            "all zero points are one value: the groups are symmetric, but the recipe asks for zero points"
        )
    for key, values, asked in (("bits", bits, recipe.bits), ("group_size", group_sizes, recipe.group_size)):
        if expected and values != {asked}:
            raise QuantgateError(
                f"the tensors hold {key} {', '.join(sorted(map(str, values)))}, but the recipe asks for {asked}"
            )
    return {
        "bits": bits.pop() if expected else recipe.bits,
        "group_size": group_sizes.pop() if expected else None,
        "quantized_modules": {"expected": len(expected), "found": len(found), "missing": missing},
        "unquantized_modules": unquantized(stored, sizes, expected),
    }


def unquantized(stored: Checkpoint, sizes: Geometry, quantized: list[str]) -> dict[str, str]:
    """Matrices that stay as they are -> dtype in the checkpoint, or the table that they share."""
    matrices = {name for name, shape in other_tensors(sizes).items() if len(shape) == 2}
    matrices |= {f"{module}.weight" for module in linear_modules(sizes)} - {
        f"{name}.weight" for name in quantized
    }
    found = {
        name.removesuffix(".weight"): str(stored.raw(name).dtype).removeprefix("torch.")
        for name in sorted(matrices)
    }
    if sizes.tied_embeddings:
        found["lm_head"] = "shares model.embed_tokens"
    return found


def scan_finite(stored: Checkpoint) -> dict[str, Any]:
    """Count NaN and infinity over every floating-point tensor; one is too many."""
    scanned = 0
    for name in sorted(stored.names()):
        tensor = stored.raw(name)
        if not tensor.is_floating_point():
            continue
        scanned += 1
        # torch has no isfinite for 8-bit floats; float32 holds all of theirs, NaN included.
        bad = int((~torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)).sum())
        if bad:
            raise QuantgateError(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite")
    return {"nan_inf": {"tensors_scanned": scanned, "found": 0}}


def check_effective_error(
    sizes: Geometry, original: Checkpoint, stored: Checkpoint, recipe: QuantizeRecipe, progress: Progress
) -> dict[str, Any]:
    """Relative weight error of every layer and every module within the recipe's ranges; see `effective_error`."""
    folds = recipe.method == "awq"
    check_unfolded_tensors(sorted(other_tensors(sizes)), original, stored, folds=folds)
    low, high = recipe.effective_error_range if recipe.quantizes_weights else (0.0, UNQUANTIZED_TOLERANCE)
    modules: dict[str, float] = {}
    per_layer: list[float] = []
    for layer in range(len(sizes.layers)):
        errors = (
            layer_errors(layer, sizes, original, stored) if folds else plain_errors(layer, original, stored)
        )
        modules.update(errors)
        per_layer.append(sum(errors.values()) / len(errors))
        progress("prove weights", layer + 1, len(sizes.layers))
    outside = {name: error for name, error in modules.items() if not low <= error <= high}
    if outside:
        # NaN sorts as the worst there is.
        name = max(
            outside,
            key=lambda key: (
                math.inf if math.isnan(outside[key]) else abs(math.log(max(outside[key], 1e-9) / high))
            ),
        )
        raise QuantgateError(
            f"{len(outside)} of {len(modules)} modules have an effective weight error outside {low:.0%} to {high:.0%}; "
            f"the worst is {name} with {outside[name]:.1%}"
        )
    if recipe.quantizes_weights:
        check_layers(per_layer, recipe.layer_error_range)
    worst = max(modules, key=lambda key: modules[key])
    worst_layer = max(range(len(per_layer)), key=lambda layer: per_layer[layer])
    return {
        "effective_error": {
            "per_layer": [round(error, 5) for error in per_layer],
            "layer_range": list(recipe.layer_error_range) if recipe.quantizes_weights else None,
            "worst_layer": {"layer": worst_layer, "value": round(per_layer[worst_layer], 5)},
            "worst": {"module": worst, "value": round(modules[worst], 5)},
            "mean": round(sum(modules.values()) / len(modules), 5),
        }
    }


def check_layers(per_layer: list[float], allowed: tuple[float, float]) -> None:
    """Raise `QuantgateError` for a layer whose mean error isn't believable, naming the one that is farthest out."""
    low, high = allowed
    outside = {layer: error for layer, error in enumerate(per_layer) if not low <= error <= high}
    if outside:
        layer = max(outside, key=lambda key: max(low - outside[key], outside[key] - high))
        raise QuantgateError(
            f"{len(outside)} of {len(per_layer)} layers have a mean effective weight error outside {low:.0%} to {high:.0%}; the "
            f"worst is layer {layer} with {outside[layer]:.1%}"
        )


def check_perplexity(
    request: QuantizeRequest,
    sizes: Geometry,
    original: Checkpoint,
    stored: Checkpoint,
    progress: Progress,
    coverage: Coverage | None = None,
) -> dict[str, Any]:
    """Perplexity of the original, the quantized (dequantized) and the plainly rounded model, by the same code on the same windows.

    `coverage` sees the keys and values of the quantized one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.model_dir)
    pieces = heldout_pieces(request, tokenizer)
    recipe, on_cuda = request.recipe, torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir,
        torch_dtype="auto" if on_cuda else torch.float32,
        attn_implementation="sdpa",
    ).to("cuda" if on_cuda else "cpu")
    model.eval()
    before, predicted = perplexity(
        model, pieces, _stepper(progress, "perplexity of the original", len(pieces))
    )
    load_dequantized(model, sizes, stored)
    with rounded_activations(model, sizes, recipe):
        after, _ = perplexity(model, pieces, _stepper(progress, "perplexity of the quantized", len(pieces)))
    if coverage is not None:
        covered = coverage_pieces(request, tokenizer)
        see_caches(model, covered, coverage.take, _stepper(progress, "keys and values", len(covered)))
    ratio = after / before
    if not ratio <= recipe.max_perplexity_ratio:
        raise QuantgateError(
            f"perplexity on held-out text went from {before:.2f} to {after:.2f}, a factor of {ratio:.3f}; "
            f"the recipe allows max_perplexity_ratio={recipe.max_perplexity_ratio}"
        )
    rounded = None
    if recipe.searches_weights:
        load_rounded(model, sizes, original, recipe)
        rounded, _ = perplexity(
            model, pieces, _stepper(progress, "perplexity of round-to-nearest", len(pieces))
        )
    return {
        "perplexity": {
            "original": round(before, 4),
            "quantized": round(after, 4),
            "ratio": round(ratio, 5),
            "limit": recipe.max_perplexity_ratio,
            **against_rounding(ratio, None if rounded is None else rounded / before, recipe),
            "heldout_tokens": predicted,
            "window_tokens": WINDOW_TOKENS,
        },
    }


def against_rounding(ratio: float, rounded_ratio: float | None, recipe: QuantizeRecipe) -> dict[str, Any]:
    """The share of round-to-nearest's loss that is left; `QuantgateError` when it is more than the recipe allows.

    Null where there is nothing to compare: no rounding, or one that loses next to nothing (or everything).
    """
    limit = recipe.max_share_of_rounding_loss
    found: dict[str, Any] = {
        "round_to_nearest": None,
        "share_of_rounding_loss": None,
        "share_of_rounding_loss_limit": limit,
    }
    if rounded_ratio is None or not math.isfinite(rounded_ratio):
        return found
    found["round_to_nearest"] = round(rounded_ratio, 5)
    if rounded_ratio - 1 < MIN_COMPARABLE_LOSS:
        return found
    share = (ratio - 1) / (rounded_ratio - 1)
    if limit is not None and not share <= limit:
        raise QuantgateError(
            f"perplexity rises by a factor of {ratio:.3f}, and by {rounded_ratio:.3f} when the weights are merely rounded: "
            f"{share:.0%} of that loss, but the recipe allows max_share_of_rounding_loss={limit}"
        )
    return {**found, "share_of_rounding_loss": round(share, 4)}


def load_dequantized(model: torch.nn.Module, sizes: Geometry, stored: Checkpoint) -> None:
    """Overwrite every parameter of the original model with the checkpoint's; one left over would hide a fault."""
    parameters = dict(model.named_parameters())
    wanted = {*(f"{module}.weight" for module in linear_modules(sizes)), *other_tensors(sizes)}
    left = sorted(parameters.keys() - wanted)
    if left:
        raise QuantgateError(f"{left[0]} is a parameter of the model that the checkpoint doesn't cover")
    for name in sorted(wanted & parameters.keys()):
        parameters[name].copy_(stored(name))


def load_rounded(
    model: torch.nn.Module, sizes: Geometry, original: Checkpoint, recipe: QuantizeRecipe
) -> None:
    """Overwrite every parameter with the original's, the linear modules' rounded to the recipe's bits and groups."""
    assert recipe.group_size is not None
    linears = {f"{module}.weight" for module in linear_modules(sizes)}
    for name, parameter in model.named_parameters():
        weight = original(name)
        parameter.copy_(
            round_to_nearest(weight, recipe.bits, recipe.group_size, recipe.zero_point)
            if name in linears
            else weight
        )


@contextmanager
def rounded_activations(model: torch.nn.Module, sizes: Geometry, recipe: QuantizeRecipe) -> Iterator[None]:
    """The inputs of the quantized modules as an engine rounds them, for a recipe with 8-bit activations."""
    with ExitStack() as stack:
        if recipe.method == "fp8":
            for name in linear_modules(sizes):
                hook = model.get_submodule(name).register_forward_pre_hook(round_activations)
                stack.callback(hook.remove)
        yield


def _stepper(progress: Progress, phase: str, total: int) -> Callable[[int], None]:
    return lambda done: progress(phase, done, total)


if __name__ == "__main__":
    sys.exit(child_main(prove, sys.argv))
