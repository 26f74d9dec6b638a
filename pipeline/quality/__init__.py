"""The quality of a served variant: the eval set, lm-eval through the endpoint, paired statistics."""
