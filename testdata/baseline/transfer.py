"""What PyTorch does with memory that is not pinned and with files, printed in the format of Go benchmarks
under the names of transfer's: medians, after one round to warm up.

    python3 transfer.py 5
"""
import os
import shutil
import statistics
import sys
import time

import torch

GIB = 1 << 30
SAMPLES = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def measure(name, n, copy, samples=SAMPLES):
    took = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        result = copy()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        del result  # whose memory is fresh again in the next round
    t = statistics.median(took[1:])
    print(f"Benchmark{name}\t{samples}\t{t * 1e9:.0f} ns/op\t{n / t / 1e9:.2f} GB/s", flush=True)


def files(folder):
    n = 4 * GIB
    if not os.path.isdir(folder) or shutil.disk_usage(folder).free < 5 * GIB:
        print(f"no 5 GiB of room in {folder}: left out", file=sys.stderr)
        return
    path = f"{folder}/pinned-baseline-{os.getpid()}"
    try:
        data = torch.ones(n, dtype=torch.uint8)
        data.numpy().tofile(path)
        del data

        def mapped():
            return torch.from_file(path, shared=False, size=n, dtype=torch.uint8).cuda()

        def read():
            with open(path, "rb", buffering=0) as f:
                memory = torch.empty(n, dtype=torch.uint8)
                view, done = memoryview(memory.numpy()), 0
                while done < n:  # a read gives 2 GiB at most
                    done += f.readinto(view[done:])
            return memory.cuda()

        measure(f"File/upload{folder}/4GiB/from_file", n, mapped, 3)
        measure(f"File/upload{folder}/4GiB/read", n, read, 1)
    finally:
        if os.path.exists(path):
            os.remove(path)


torch.ones(24 * GIB, dtype=torch.uint8)  # memory of virtual machines can grow as it is first touched
host = torch.ones(2 * GIB, dtype=torch.uint8)
device = host.cuda()
small = device[:GIB]
measure("Upload/pageable/2GiB", 2 * GIB, lambda: host.cuda())
measure("Download/pageable/2GiB", 2 * GIB, lambda: host.copy_(device))
measure("Download/new/1GiB", GIB, lambda: small.cpu())
del host, device, small
files("/dev/shm")
files("/tmp")
