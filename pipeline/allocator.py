"""glibc's allocator, told to keep what it has: for processes that allocate and free large tensors on a CPU all the time.

It returns every large block to the kernel at once and takes it back page by page: 60 % of the time of a quantization on a CPU, and
0.18 s of each 500 tokens that are scored. Keeping up to 4 GiB on the heap ends that (mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).
"""

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
