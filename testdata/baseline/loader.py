"""What PyTorch's DataLoader does, printed in the format of Go benchmarks: batches of 256 samples of 1024
float32, shuffled, onto the GPU. Medians of three runs, each after a few batches to warm up; an op is a sample.

    python3 loader.py
"""
import statistics
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

BATCH, WIDTH = 256, 1024


class Memory(Dataset):
    """Samples in memory. An index that is a list of them gives a whole batch."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


class IO(Memory):
    """2 ms of waiting for a sample, and some work on it."""

    def __getitem__(self, i):
        time.sleep(0.002)
        x = self.data[i]
        return (x - x.mean()) / (x.std() + 1e-6)


def run(loader, batches, warm):
    it = iter(loader)
    for _ in range(warm):
        next(it).cuda(non_blocking=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(batches):
        next(it).cuda(non_blocking=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / batches / BATCH


def measure(name, batches, warm, **options):
    took = statistics.median(run(DataLoader(**options), batches, warm) for _ in range(3))
    print(f"BenchmarkLoader/{name}\t{batches * BATCH}\t{took * 1e9:.1f} ns/op\t{1 / took:.0f} samples/s", flush=True)


if __name__ == "__main__":
    torch.zeros(1).cuda()
    data = torch.randn(200_000, WIDTH)
    memory, io = Memory(data), IO(data)
    for pin in (False, True):
        for workers in (0, 2, 8):
            measure(f"memory/workers={workers}/pin={pin}", 400, 20,
                    dataset=memory, batch_size=BATCH, shuffle=True, num_workers=workers, pin_memory=pin)
        # A sampler of lists spares DataLoader the single samples; few programs do that.
        measure(f"memory/lists/workers=0/pin={pin}", 400, 20,
                dataset=memory, sampler=BatchSampler(RandomSampler(memory), BATCH, drop_last=True),
                batch_size=None, pin_memory=pin)
    workers = 16  # each makes whole batches: whole rounds of them are measured
    measure(f"io/workers={workers}", 4 * workers, 2 * workers,
            dataset=io, batch_size=BATCH, shuffle=True, num_workers=workers, pin_memory=True)
