"""llm-compressor 0.14's AWQ with clipping, which it has none of: scales and cuts searched together, as for AutoAWQ.

A transform like the modifier that it grows from: it leaves scaled and cut weights, and the `QuantizationModifier` after it
rounds each group to its own range, which is the cut one. Importable in that backend's environment only.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.utils import update_offload_parameter
from llmcompressor.modifiers.transform.awq import AWQModifier
from pydantic import PrivateAttr

from pipeline.quantize.clip_search import clip, gram_matrices, search_scales, unscale


class ClippingAWQModifier(AWQModifier):  # type: ignore[misc]
    """AWQ whose scales are searched for clipped weights, and the clipping of every linear layer that will be rounded."""

    # Per linear layer since its last cut: the sum over tokens of its inputs' outer products by group, and the tokens.
    _grams: dict[Any, tuple[torch.Tensor, int]] = PrivateAttr(default_factory=dict)
    # By what each balanced layer's inputs will be divided from now on.
    _scales: dict[Any, torch.Tensor] = PrivateAttr(default_factory=dict)

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        """Watch the inputs of every layer that will be rounded, beside what AWQ itself watches."""
        super().on_calibration_start(state, event, **kwargs)
        for module in state.model.modules():
            if _weight_scheme(module) is not None:
                self.register_hook(module, self._watch, "forward_pre")

    def _watch(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        inputs = args[0].detach().reshape(-1, args[0].shape[-1])
        total, tokens = self._grams.get(module, (torch.zeros(()), 0))
        here = gram_matrices(inputs, _weight_scheme(module).group_size) * len(inputs)
        self._grams[module] = (total.to(here) + here, tokens + len(inputs))

    def _gram(self, module: Any) -> torch.Tensor:
        total, tokens = self._grams[module]
        return total / tokens

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _apply_smoothing(self, model: Any) -> None:
        """Scale what this pass has seen, then cut it."""
        super()._apply_smoothing(model)
        for module in list(self._grams):
            gram = self._gram(module).to(module.weight.device)
            scales = self._scales.pop(module, None)
            if scales is not None:
                gram = unscale(gram, scales.to(gram.device))
            update_offload_parameter(
                module, "weight", clip(module.weight, gram, _weight_scheme(module).num_bits)
            )
            del self._grams[module]

    def _compute_best_scale(
        self, mapping: Any, fp16_outputs: list[torch.Tensor], orig_layer_weights: dict[Any, torch.Tensor]
    ) -> torch.Tensor:
        layers = [layer for layer in mapping.balance_layers if _weight_scheme(layer) is not None]
        total, tokens = self._smooth_activation_stats[mapping.smooth_name]
        device = fp16_outputs[0].device
        losses: list[float] = []

        def loss(trial: list[torch.Tensor]) -> float:
            for layer, weight in zip(layers, trial):
                layer.weight.data.copy_(weight)
            losses.append(self._compute_loss(fp16_outputs, self._run_samples(mapping.parent)))
            return losses[-1]

        scales = search_scales(
            [orig_layer_weights[layer].to(device) for layer in layers],
            (total / tokens).to(device),
            self._gram(layers[0]).to(device),
            _weight_scheme(layers[0]).num_bits,
            loss,
        )
        self._scales.update(dict.fromkeys(mapping.balance_layers, scales))
        self._error_metrics.append(
            {
                "layer_name": mapping.smooth_name,
                "parent_name": mapping.parent_name,
                "initial_error": losses[0],
                "best_error": min(losses),
                "reduction": min(losses) / losses[0] if losses[0] > 0 else 1.0,
            }
        )
        return scales.cpu()


def _weight_scheme(module: Any) -> Any:
    """How the weight of `module` will be rounded, or None."""
    return getattr(getattr(module, "quantization_scheme", None), "weights", None)
