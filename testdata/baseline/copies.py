"""PyTorch's copies of 2 GiB and its cache of pinned memory, medians after one round to warm up.

    python3 copies.py
"""
import statistics
import time

import torch

N = 2 << 30
torch.ones(24 << 30, dtype=torch.uint8)  # a virtual machine's memory grows as it is first touched


def seconds(copy, samples=5):
    copy()
    took = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def rate(copy, samples=5):
    return f"{N / seconds(copy, samples) / 1e9:.2f}"


host = torch.ones(N, dtype=torch.uint8)
device = torch.empty(N, dtype=torch.uint8, device="cuda")
pinned = torch.empty(N, dtype=torch.uint8, pin_memory=True)
print("torch", torch.__version__)
print(f"pageable up {rate(lambda: device.copy_(host))} GB/s; down into touched {rate(lambda: host.copy_(device))}; "
      f".cpu() {rate(lambda: device.cpu(), 3)}")
print(f"pinned up {rate(lambda: device.copy_(pinned, non_blocking=True))} "
      f"down {rate(lambda: pinned.copy_(device, non_blocking=True))}")


def cached():
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)


cached()
start = time.perf_counter()
for _ in range(5000):
    cached()
print(f"cached pinned empty+free {(time.perf_counter() - start) / 5000 * 1e6:.2f} us")
