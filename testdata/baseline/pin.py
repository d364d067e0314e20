"""What PyTorch does, printed in the format of Go benchmarks under the names of hostmem's.

    python3 pin.py 5

Each pinning is in a process of its own, for PyTorch keeps what it pinned once. Its fastest setting
is used: cudaHostRegister from eight threads.
"""
import os
import subprocess
import sys

SETTING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
CHILD = """
import time, torch
torch.zeros(1, device='cuda')
rss = lambda: int([l for l in open('/proc/self/status') if l.startswith('VmRSS')][0].split()[1]) * 1024
n, before = {n}, rss()
start = time.perf_counter()
x = torch.empty(n, dtype=torch.uint8, pin_memory=True)
took = time.perf_counter() - start
print(f'Benchmark{name}\\t1\\t{{took * 1e9:.0f}} ns/op\\t{{n / took / 1e9:.2f}} GB/s\\t{{(rss() - before) / n:.3f}} kept/asked')
"""
CACHED = """
import time, torch
torch.zeros(1, device='cuda')
for n in (4096, 1 << 20, 16 << 20):
    def get():
        torch.empty(n, dtype=torch.uint8, pin_memory=True)
    get()
    start = time.perf_counter()
    for _ in range(5000):
        get()
    took = (time.perf_counter() - start) / 5000
    print(f'BenchmarkPoolHit/{n}\\t5000\\t{took * 1e9:.0f} ns/op')
"""


def run(code, setting):
    env = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=setting)
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    sys.stdout.write(result.stdout or result.stderr[-500:])
    sys.stdout.flush()


for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    for name, n in (("Pin/1GiB+1", (1 << 30) + 1), ("Pin/4GiB+1", (4 << 30) + 1)):
        run(CHILD.format(n=n, name=name), SETTING)
run(CACHED, "")
