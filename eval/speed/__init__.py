"""Speed and memory on a GPU: attention kernels, decoding, throughput, prefill. `python -m eval.speed` runs all."""
