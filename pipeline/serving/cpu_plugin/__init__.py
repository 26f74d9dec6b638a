"""A vLLM plugin that closes two gaps of its CPU build on x86 processors without AVX-512.

vLLM 0.32 ships three libraries of CPU kernels and loads the one that fits the processor. The one for AVX2 lacks two things
that the others have: the int4 matrix product (an AWQ server starts, answers `/health` and dies at its first request) and
attention over an FP8 KV cache (refused at start). Without them the demo would need a machine that many don't have.

The plugin fills each gap on its own, where the stock kernel is missing or the device's settings prefer ours
(`serving.kernel_choice`), through vLLM's public hooks:

- `int4_linear`: the linear-kernel registry gets a kernel built on PyTorch's own int4 product for CPUs;
- `fp8_attention`: the attention backend CPU_ATTN is overridden by one that keeps the cache in FP8 (so the pool has its real
  size and the numbers their real rounding) and widens the blocks in use before it calls the stock kernel.

Elsewhere, and on CUDA, it does nothing but log. (With AVX-512 the stock kernels work, but the FP8 one drops mantissa bits
instead of rounding to nearest as the format and GPUs do; the log says so, `detect.stock_fp8_rounding`.)

The numbers are those of the formats; the speed isn't the stock kernels'. So every process says in its log what is emulated
(`register.MARK`), provenance carries it on, and such a speed is never judged.

vLLM finds the plugin through `entry_point/*.dist-info`, a folder on PYTHONPATH (`plugin_path`): nothing is installed, because
the environment is shared between clones. `QUANTGATE_CPU_PLUGIN`, set by
`serving.command`, is auto (default: fill the gaps), on (both parts on any x86 CPU) or off, or such a word for each part:
`int4=on,fp8_kv=auto`. `compare` times both kernels of each part.
"""
