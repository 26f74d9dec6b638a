"""The model at hand, checked: fetched, written as safetensors, made readable the same for every environment.

`prepare.prepare` is the one function the stage calls; `source.ModelSource` is what a model's conf validates to.
"""
