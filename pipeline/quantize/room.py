"""Is there room for a quantization? Asked before the first minute of it, in numbers, by the stage and by `quantgate doctor`.

Pure arithmetic on the geometry and the recipe, and the machine's free memory, its card's, and the free disk.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.capacity.weights import weight_bytes as predicted_weight_bytes
from pipeline.compatibility import weight_scheme
from pipeline.errors import EnvironmentUnfitError
from pipeline.gpu import NoDriver, open_nvml, visible
from pipeline.models.architectures import Geometry, expected_shapes, intermediate, other_tensors
from pipeline.quantize.calibration import WINDOW_TOKENS
from pipeline.results import Gpu
from pipeline.settings.schema import QuantizeRecipe

GIB = 1024**3
# Measured on the 135M model in fp32 on a CPU, 2,048 tokens: 1.54 GiB at the peak, of which 0.50 are weights.
PROCESS_BYTES = int(0.75 * GIB)
"""Python, torch and the backend's imports."""
COPIES = 1.25
"""Weights held at once on a CPU: the model, and of a part of it the original beside the quantized."""
# What follows is counted from the code that runs, not measured on a card.
CUDA_PROCESS_BYTES = 3 * GIB
"""The same with CUDA's libraries and kernels, which take 1.2 to 2 GB of host memory (pytorch/pytorch issues 12873, 106511)."""
CUDA_CONTEXT_BYTES = GIB
"""On the card: context and kernels (0.3 to 0.5 GB), cuBLAS's workspaces, and what the allocator can't use of its blocks."""
LAYER_COPIES = 4
"""Of the layer that is searched, on the card: as it was loaded, and a trial scaled, cut and rounded."""
TOKENIZER_BYTES = 64 * 1024**2
"""Vocabulary, merges and configs of the largest supported tokenizers, rounded up."""


@dataclass(frozen=True)
class Room:
    """What a quantization and its proof take."""

    memory_bytes: int
    """Host memory."""
    disk_bytes: int
    """Beside the source: the checkpoint in the making. What it replaces is removed only after."""
    card_bytes: int | None = None
    """Memory of the card; None on a CPU."""


@dataclass(frozen=True)
class Card:
    """The card that a backend gets, and the bytes of it that are free now."""

    gpu: Gpu
    free_bytes: int


@dataclass(frozen=True)
class Need:
    """One kind of room: how much is needed, how much is free, and what to do where that is too little."""

    what: str
    needed_bytes: int
    free_bytes: int
    fix: str

    @property
    def is_met(self) -> bool:
        return self.free_bytes >= self.needed_bytes

    def __str__(self) -> str:
        return f"{self.needed_bytes / GIB:.2f} GiB {self.what}, and {self.free_bytes / GIB:.2f} GiB are free"


def room_for(
    sizes: Geometry, recipe: QuantizeRecipe, *, on_cuda: bool = False, element_bytes: int = 2
) -> Room:
    """The room that `recipe` and the proof of its result take. `element_bytes`: of a weight in the source's checkpoint.

    On a CPU weights and activations are fp32. With a card AutoAWQ loads the model in fp16 on the host and moves a layer at a
    time to the card, where it stays quantized; llm-compressor loads all of it onto the card, and so does, by way of the host,
    the proof of either.
    """
    disk = predicted_weight_bytes(sizes, weight_scheme(recipe)) + TOKENIZER_BYTES
    parameters = sum(math.prod(shape) for shape in expected_shapes(sizes).values())
    samples, sequence_tokens = (recipe.samples, recipe.sequence_tokens) if recipe.searches_weights else (0, 0)
    tokens = samples * sequence_tokens
    # What KV scales are calibrated on goes through whole, a batch at a time, and nothing of it is kept.
    longest = recipe.kv_text[1] if recipe.calibrate_kv_scales else 0
    # Inputs of a layer's seven linear modules, kept for the search, and its own input and output.
    width = 8 * sizes.hidden + 2 * intermediate(sizes)
    if not on_cuda:
        return Room(int(4 * (COPIES * parameters + max(tokens, longest) * width)) + PROCESS_BYTES, disk)
    layer = LAYER_COPIES * element_bytes * (parameters - _other_elements(sizes)) // len(sizes.layers)
    model = element_bytes * parameters
    proving = model + _logits_bytes(sizes, WINDOW_TOKENS)
    if recipe.backend == "autoawq":
        # The whole text goes through a layer at once, and what the search multiplies is fp32.
        searching = disk + layer + 4 * tokens * width
    else:
        # Here, as that module imports what imports this one.
        from pipeline.quantize.llmcompressor import BATCH_TOKENS

        # A batch at a time; what goes into and comes out of a layer's parts is kept of all (AWQModifier.offload_device: None).
        batch = max(min(tokens, max(BATCH_TOKENS, sequence_tokens)), longest)
        activations = element_bytes * (batch * width + 8 * tokens * sizes.hidden)
        searching = model + (gptq_bytes(sizes) if recipe.method == "gptq" else layer) + activations
    return Room(
        memory_bytes=model + element_bytes * tokens * width + CUDA_PROCESS_BYTES,
        disk_bytes=disk,
        card_bytes=max(searching, proving) + CUDA_CONTEXT_BYTES,
    )


def gptq_bytes(sizes: Geometry) -> int:
    """What GPTQ works on of one layer, in fp32: the Hessian (inputs x inputs) of each of its seven modules, the widest three times
    while its columns are put in order, and that module's weights three times (llmcompressor 0.14.0.1, modifiers/gptq/helpers.py:
    prepare_batch, max_batch_size)."""
    wide, inner = sizes.hidden, intermediate(sizes)
    return 4 * (6 * wide**2 + 3 * max(wide, inner) ** 2 + 3 * wide * inner)


def _other_elements(sizes: Geometry) -> int:
    """Elements of what no layer is searched for: embeddings, head, norms and biases."""
    return sum(math.prod(shape) for shape in other_tensors(sizes).values())


def _logits_bytes(sizes: Geometry, tokens: int) -> int:
    """Of one forward pass, in 16 bits and beside them in fp32."""
    return (2 + 4) * tokens * sizes.vocabulary


def stored_element_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a weight as the checkpoint of this config.json stores it: 4 for float32, 2 otherwise."""
    return 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2


def needs(room: Room, out_dir: Path, card: Card | None) -> Iterator[Need]:
    """`room` beside what is free: of disk where `out_dir` is, of memory, and of `card` where there is one."""
    folder = next(parent for parent in out_dir.absolute().parents if parent.is_dir())
    yield Need("of disk", room.disk_bytes, shutil.disk_usage(folder).free, f"free some in {folder}")
    yield Need(
        "of memory", room.memory_bytes, free_memory(), "end other programs, lower samples, or use a larger machine"
    )  # fmt: skip
    if card is not None and room.card_bytes is not None:
        yield Need(
            f"of the card's memory ({card.gpu.name})",
            room.card_bytes,
            card.free_bytes,
            "end what holds the card (nvidia-smi lists it), lower samples, or use a larger card",
        )


def refuse_without_room(room: Room, out_dir: Path, card: Card | None) -> None:
    """Raise `EnvironmentUnfitError` with both numbers where disk, memory or the card's memory is too small."""
    for need in needs(room, out_dir, card):
        if not need.is_met:
            raise EnvironmentUnfitError(f"quantizing takes about {need}; {need.fix}")


def card_of(kind: Literal["cpu", "cuda"], library: Any = None) -> Card | None:
    """The card that a backend in the environments for `kind` gets: the first that is visible.

    None where its torch sees no card and computes on the CPU. `library` stands in for the module pynvml in tests.
    """
    if kind == "cpu":
        return None
    try:
        with open_nvml(library) as nvml:
            # A card in MIG mode without a slice is none to CUDA.
            usable = [gpu for gpu in visible(nvml.gpus()) if not gpu.mig or gpu.uuid.startswith("MIG-")]
            return Card(usable[0], nvml.free_bytes(usable[0])) if usable else None
    except NoDriver:
        return None


def free_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that a process can still get: the machine's, or what its container's or its job's limit leaves.

    `root` is where control groups are mounted and `own` names those of this process; version 1 and 2 are read.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_groups(root, own)])


def _left_in_groups(root: Path, own: Path) -> Iterator[int]:
    """What each limit above this process leaves, page cache that the kernel would drop counted as free.

    That is the limit less the working set as the kubelet reckons it: usage without inactive files.
    """
    versions = {
        "": (root, "memory.max", "memory.current", "inactive_file"),
        "memory": (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    groups = dict(line.split(":", 2)[1:] for line in lines if line.count(":") >= 2)
    for controller, (mount, limit, usage, inactive) in versions.items():
        # In a container the path may be the host's; then only the mount itself, which is the container's group, is there.
        place = mount / groups.get(controller, "/").lstrip("/")
        for folder in [place, *place.parents]:
            if not folder.is_relative_to(mount):
                break
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield most - used + int(stat[inactive])
            except (OSError, ValueError, KeyError):  # no such group, no limit ("max"), or nothing to read
                continue
