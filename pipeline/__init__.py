"""quantgate: a GO / NO-GO / INCONCLUSIVE verdict for every quantized variant of a served model."""

__version__ = "0.1.0"
