"""4-bit weights, and the proof that they are what was asked for.

`base.quantize` is the one function the stage calls. A backend is one module with a `BACKEND`; the proofs don't
belong to any backend and read the checkpoint from disk, because no backend notices its own broken result.
"""
