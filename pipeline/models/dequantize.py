"""GGUF file to BF16 safetensors folder. Runs in the `serve` environment (transformers 5, gguf, accelerate).

Request: {"gguf": path, "out_dir": path}. Result: {"gguf_file_type", "transformers"}.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.models.child import child_main


def dequantize(request: dict[str, Any]) -> dict[str, Any]:
    """Write `out_dir` with config, tokenizer and BF16 weights out of the GGUF file; whole or not at all."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf, out_dir = Path(request["gguf"]), Path(request["out_dir"])
    if not gguf.is_file():
        raise UserInputError(f"{gguf}: no such file")
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # `dequantize=True` is what makes transformers write plain safetensors; without it saving is refused.
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        path.chmod(0o644)  # safetensors are written for the owner only
    os.replace(partial, out_dir)
    return {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(child_main(dequantize, sys.argv))
