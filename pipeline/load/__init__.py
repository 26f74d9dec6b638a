"""Load: what fits, what it costs, and how many streams meet the SLO, from one record per request.

From the outside in: `measure` runs a variant's cells; `fill`, `slo` with `search` and `judge`, and `metrics` with `steady` say
what their records show; `workload` draws the requests; `driver` is the load generator's interface and `vllm_bench` its
implementation; `watch` looks after a running cell; `compare` sets repeats and variants against each other.
"""
