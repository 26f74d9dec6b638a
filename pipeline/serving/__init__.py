"""Start, watch and stop one vLLM server, and read from it what really ran.

`command` says what to start, `server` owns the processes' life (with `guard`, the process that outlives us long enough to
clean up, and `lease`, one engine at a time per machine), `signals` and `failures` read the engine's log and metrics,
`sampler` follows the metrics while a load runs. `engine_probe` and `cpu_plugin` run inside the engine.
"""
