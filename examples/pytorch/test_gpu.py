"""Measures pinned.py, managed.py, feed.py and save.py beside PyTorch on a host with a GPU, and checks every byte.

    go build -o feed ./examples/feed
    go build -o weights-example ./examples/weights
    python3 examples/pytorch/test_gpu.py --feeder ./feed --saver ./weights-example

It prints a table, and ends with status 1 if a byte is wrong or a part fails; a rate below its target is said, and no
failure. Without --feeder and --saver the rows of feed.py and save.py are missing. With two GPUs it also runs a
consumer on each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, List, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
WIDTH, BATCH, PERIOD = 1024, 256, 1024
rows: List[str] = []
failures: List[str] = []


class Wrong(Exception):
    """A byte is wrong."""


def row(what: str, theirs: str, ours: str, target: str, met: Optional[bool]) -> None:
    said = "" if met is None else "met" if met else "NOT MET"
    rows.append(f"| {what} | {theirs} | {ours} | {target} | {said} |")
    print(rows[-1], flush=True)


def part(run: Callable[..., None], *arguments: Any) -> None:
    try:
        run(*arguments)
    except Exception as err:
        failures.append(f"{run.__name__}: {type(err).__name__}: {err}")
        traceback.print_exc()


def check(fine: bool, what: str) -> None:
    if not fine:
        raise Wrong(what)


def seconds(f: Callable[[], Any]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def pinning() -> None:
    """Pinning, the bytes that are kept, and a round trip."""
    import pinned
    import torch

    for size in ((1 << 30) + 1, (4 << 30) + 1):
        made: List[Any] = []
        took = seconds(lambda: made.append(torch.empty(size, dtype=torch.uint8, pin_memory=True)))
        made[0].fill_(1)
        theirs, kept = size / took / 1e9, pinned.resident(made[0].data_ptr(), size)
        made.clear()
        torch._C._host_emptyCache() if hasattr(torch._C, "_host_emptyCache") else None
        best, over = 0.0, 0
        for _ in range(3):
            took = seconds(lambda: made.append(pinned.empty(size, torch.uint8)))
            best = max(best, size / took / 1e9)
            x = made.pop()
            over = pinned.resident(x.data_ptr(), size) - size
            check(x.is_pinned(), "a pinned tensor that PyTorch does not know as one")
            there = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
            x.copy_(there, non_blocking=True)
            check(torch.equal(x.to("cuda", non_blocking=True), there), "a round trip of a pinned tensor")
            del x, there
            pinned.empty_cache()
        row(f"pin {size:,} B", f"{theirs:.2f} GB/s, {kept / size:.2f}x kept", f"{best:.2f} GB/s, {over} B over", "10 GB/s, 1 page over",
            best >= 10 and 0 <= over <= pinned.PAGE)


def cache() -> None:
    """The cache's time, and that memory is not used again during a copy on another stream."""
    import pinned
    import torch

    def each(f: Callable[[], Any]) -> float:
        def repeat() -> None:
            for _ in range(2000):
                f()  # its result ends here: 2000 at once would be more than the cache keeps

        repeat()
        return min(seconds(repeat) for _ in range(5)) / 2000 * 1e6

    theirs = each(lambda: torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True))
    pinned.empty(1 << 20, torch.uint8)
    made = pinned.stats()["segment.all.allocated"]
    ours = each(lambda: pinned.empty(1 << 20, torch.uint8))
    check(pinned.stats()["segment.all.allocated"] == made, "the cache made memory anew")
    row("empty + free from the cache, 1 MiB", f"{theirs:.2f} us", f"{ours:.2f} us", "3 us", ours <= 3)
    while_a_copy_runs(torch.cuda.Stream())


def while_a_copy_runs(side: Any) -> None:
    """Memory that is freed while a copy on a stream reads it is used again after the copy, and not before."""
    import pinned
    import torch

    pinned.empty_cache()  # a full cache gives memory back, for which it waits
    n, shown = 64 << 20, 0
    for i in range(20):
        x = pinned.empty(n, torch.uint8).fill_(i)
        at = x.data_ptr()
        with torch.cuda.stream(side):
            y = torch.empty(n, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(100_000_000)  # the copy is queued behind it
            y.copy_(x, non_blocking=True)
        del x
        z = pinned.empty(n, torch.uint8)
        again = z.data_ptr() == at
        running = not side.query()  # asked after the memory was had
        check(not (running and again), "memory was used again during a copy on another stream")
        shown += running
        z.fill_(255)
        side.synchronize()
        check(bool((y == i).all()), "a copy from memory that was freed")
        del z
    check(shown >= 15, f"only {shown} of 20 copies were running when memory was asked for: nothing is shown")
    pinned.empty_cache()
    x = pinned.empty(n, torch.uint8)
    with torch.cuda.stream(side):
        y = x.to("cuda", non_blocking=True)
    at = x.data_ptr()
    del x
    side.synchronize()
    check(pinned.empty(n, torch.uint8).data_ptr() == at, "memory was not used again after the copy")
    rows.append(f"memory freed during a copy on another stream: not used again until its end, {shown} times")
    print(rows[-1])


EARLY = """
import sys
sys.path.insert(0, {here!r})
import torch
side = torch.cuda.Stream()
import test_gpu
test_gpu.while_a_copy_runs(side)
"""


def early_stream() -> None:
    """The same on a stream from before pinned was imported, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", EARLY.format(here=HERE)], capture_output=True, text=True, timeout=300)
    print(done.stdout, done.stderr, sep="")
    check(done.returncode == 0, f"a stream from before the import: status {done.returncode}")


MANAGED_FLOOR = """
import sys, time, ctypes
sys.path.insert(0, {here!r})
import torch, managed
cuda = managed.CUDA()
allocate = managed._ALLOCATE(lambda size, device, stream: cuda.malloc_managed(size)[1])
free = managed._FREE(lambda address, size, device, stream: cuda.free(address) and None)
a, f = (ctypes.cast(x, ctypes.c_void_p).value for x in (allocate, free))
made = torch._C._cuda_customAllocator(a, f)
torch._C._cuda_changeCurrentAllocator(made)
managed.leave_at_exit()
def ours():
    for _ in range(200):
        torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
def each(f):
    f(); times = []
    for _ in range(5):
        torch.cuda.synchronize(); t = time.perf_counter(); f(); times.append((time.perf_counter() - t) / 200 * 1e6)
    return min(times)
print("floor", each(ours))
sys.exit(0)
"""

MANAGED = """
import sys, time, ctypes
sys.path.insert(0, {here!r})
import torch, managed
a = managed.enable()
n, count = 4 << 20, 200
torch.empty(1, device="cuda")
def ours():
    for _ in range(count):
        torch.empty(n, dtype=torch.uint8, device="cuda")
def raw():
    for _ in range(count):
        a.cuda.free(a.cuda.malloc_managed(n)[1])
def each(f):
    f(); times = []
    for _ in range(5):
        torch.cuda.synchronize(); t = time.perf_counter(); f(); times.append((time.perf_counter() - t) / count * 1e6)
    return min(times)
print("times", each(raw), each(ours))
x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
y = x.detach().clone().double().requires_grad_()
(x @ x / 45).tanh().sum().backward(); (y @ y / 45).tanh().sum().backward(); torch.cuda.synchronize()  # smooth: no sign decides
assert torch.allclose(x.grad.double(), y.grad, rtol=1e-2, atol=1e-2), "gradients in managed memory are wrong"
z = torch.arange(1 << 24, device="cuda"); managed.prefetch(z, managed.HOST); managed.prefetch(z); managed.advise(z, "preferred_location")
assert int(z.sum()) == (1 << 24) * ((1 << 24) - 1) // 2, "a tensor that was prefetched is wrong"
try:
    torch.empty(torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda"); time.sleep(1)
    assert False, "more than the card has was not refused"
except managed.ManagedError as err:
    print("refused:", err)
s = managed.stats(); assert s["failures"] == 0, s
print("stats", s)
sys.exit(0)
"""


def managed_memory() -> None:
    """Allocations in managed memory, in a process of their own, which also has to end."""
    done = subprocess.run([sys.executable, "-c", MANAGED.format(here=HERE)], capture_output=True, text=True, timeout=300)
    print(done.stdout, done.stderr, sep="")
    check(done.returncode == 0, f"managed memory: status {done.returncode}")
    raw, ours = (float(x) for x in next(line for line in done.stdout.splitlines() if line.startswith("times")).split()[1:])
    row("managed alloc + free, 4 MiB", f"{raw:.1f} us (cudaMallocManaged, cudaFree)", f"{ours:.1f} us", "1.2x", ours <= 1.2 * raw)
    done = subprocess.run([sys.executable, "-c", MANAGED_FLOOR.format(here=HERE)], capture_output=True, text=True, timeout=300)
    check(done.returncode == 0, f"managed memory by functions that count nothing: status {done.returncode}: {done.stderr}")
    print(f"the same by functions in Python that count nothing: {float(done.stdout.split()[1]):.1f} us")


class Rows:
    """The data of the loaders: samples of 1024 float32."""

    def __init__(self, n: int, wait: float = 0) -> None:
        import torch

        self.data, self.wait = torch.randn(n, WIDTH), wait

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: Any) -> Any:
        x = self.data[i]
        if self.wait:
            time.sleep(self.wait)
            x = (x - x.mean()) / (x.std() + 1e-6)
        return x


def loader_rate(loader: Any, most: int) -> float:
    """Samples a second of PyTorch's DataLoader, to the GPU, after some batches."""
    import torch

    it, samples, began = iter(loader), 0, 0.0
    for number, batch in enumerate(it):
        batch.to("cuda", non_blocking=True)
        if number == 9:
            torch.cuda.synchronize()
            began = time.perf_counter()
        elif number > 9:
            samples += len(batch)
        if number >= most + 9:
            break
    torch.cuda.synchronize()
    return samples / (time.perf_counter() - began)


def feed_rate(feeder: str, arguments: List[str], exact: bool) -> float:
    """Samples a second of feed.py, to the GPU, in the second epoch; the bytes of the first one are checked there."""
    import feed
    import torch

    address = f"@pinned-test-gpu-{os.getpid()}"
    process = subprocess.Popen([feeder, "-listen", address, "-consumers", "1", "-epochs", "2", *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        check("listens" in process.stderr.readline(), "the feeder does not listen")
        with feed.Feed(address, timeout=60, device="cuda") as source:
            seen = torch.zeros(source.samples, dtype=torch.int32, device="cuda")
            columns = torch.arange(WIDTH, device="cuda")
            for batch in source:
                x, index = batch.tensors
                seen[index] += 1
                if exact:
                    check(bool((x == ((index[:, None] + columns) % PERIOD)).all()), f"batch {batch.number} of the feed")
                else:
                    check(bool((x.mean(1).abs() < 1e-3).all() and ((x.std(1) - 1).abs() < 1e-2).all()), f"batch {batch.number} of the feed")
            check(bool((seen == 1).all()), "a sample of the feed came twice or not at all")
            began, samples = time.perf_counter(), 0
            busy, batches = time.thread_time(), 0
            for batch in source:
                x, index = batch.tensors
                samples, batches = samples + len(batch), batches + 1
            torch.cuda.synchronize()
            took, busy = time.perf_counter() - began, time.thread_time() - busy
            rate = samples / took
            print(f"the feed: {busy / batches * 1e6:.1f} us of the consumer's CPU a batch")
        check(process.wait(60) == 0, "the feeder failed: " + process.stderr.read())
        return rate
    finally:
        process.kill()
        process.wait()


def loaders(feeder: str) -> None:
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    data = Rows(200_000)
    theirs = max(loader_rate(DataLoader(data, BATCH, shuffle=True, num_workers=w, pin_memory=True), 300) for w in (0, 8))
    lists = max(
        loader_rate(DataLoader(data, sampler=BatchSampler(RandomSampler(data), BATCH, False), batch_size=None, num_workers=w, pin_memory=True), 600)
        for w in (0, 8)
    )
    del data
    ours = feed_rate(feeder, ["-samples", "500000", "-prefetch", "256"], True)
    row("samples of 1024 float32, in memory, shuffled", f"{theirs / 1e6:.2f} M/s, {lists / 1e6:.2f} by index lists", f"{ours / 1e6:.2f} M/s", "8 M/s", ours >= 8e6)
    slow = loader_rate(DataLoader(Rows(30_000, 0.002), BATCH, num_workers=16, pin_memory=True), 80)
    ours = feed_rate(feeder, ["-samples", "200000", "-wait", "2ms", "-workers", "4096"], False)
    row("with 2 ms of I/O and a normalise a sample", f"{slow:,.0f}/s with 16 workers", f"{ours:,.0f}/s", "400,000/s", ours >= 400_000)


def two_consumers(feeder: str) -> None:
    """A consumer on each of two GPUs."""
    address = f"@pinned-test-gpu-two-{os.getpid()}"
    serving = subprocess.Popen([feeder, "-listen", address, "-consumers", "2", "-samples", "200000"], stderr=subprocess.PIPE, text=True)
    try:
        assert serving.stderr is not None
        check("listens" in serving.stderr.readline(), "the feeder does not listen")
        consumers = [
            subprocess.Popen([sys.executable, os.path.join(HERE, "feed.py"), address, "--device", "cuda"], env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            })
            for rank in range(2)
        ]
        check([c.wait(300) for c in consumers] == [0, 0] and serving.wait(60) == 0, "two consumers on two GPUs")
    finally:
        serving.kill()
        serving.wait()


def saves(program: str) -> None:
    """A model is saved into memory (/dev/shm) and on the disk of the temporary files."""
    import save
    import torch

    tensors = {f"layer.{i}": torch.randint(-(1 << 15), 1 << 15, (8192, 8192), dtype=torch.int16, device="cuda").view(torch.bfloat16) for i in range(32)}
    tensors["columns"] = tensors["layer.0"][:1001, :3001].t()
    tensors["step"] = torch.tensor(7, device="cuda")
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    for directory in ("/dev/shm", tempfile.gettempdir()):
        with tempfile.TemporaryDirectory(dir=directory) as folder, save.Saver(program) as saver:
            path, other = os.path.join(folder, "ours.safetensors"), os.path.join(folder, "theirs")
            theirs = [f"{size / seconds(lambda: torch.save(tensors, other)) / 1e9:.2f} GB/s by torch.save"]
            try:
                from safetensors.torch import load_file, save_file
            except ImportError:
                theirs.append("no safetensors")
            else:
                whole = {name: t.contiguous() for name, t in tensors.items()}
                theirs.append(f"{size / seconds(lambda: save_file(whole, other)) / 1e9:.2f} by safetensors")
                del whole
            os.unlink(other)
            said = []
            for _ in range(3):
                began = time.perf_counter()
                saving = saver.save(tensors, path)
                copied = time.perf_counter() - began
                check(saving.wait() == size, "bytes that were saved")
                said.append(f"{size / (time.perf_counter() - began) / 1e9:.1f} ({size / copied / 1e9:.1f} until the tensors may change)")
            row(f"a model of {size / 1e9:.1f} GB saved in {directory}", ", ".join(theirs), ", ".join(said) + " GB/s", "the link", None)
            if len(theirs[1]) > len("no safetensors"):
                found = load_file(path, device="cuda")
                check(found.keys() == tensors.keys(), "the names that were saved")
                for name, t in tensors.items():
                    same = torch.equal(found[name].contiguous().view(torch.uint8 if t.dim() else torch.int64), t.contiguous().view(torch.uint8 if t.dim() else torch.int64))
                    check(same and found[name].dtype == t.dtype and found[name].shape == t.shape, f"the tensor {name} that was saved")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--feeder", default="", help="the program of examples/feed")
    parser.add_argument("--saver", default="", help="the program of examples/weights")
    args = parser.parse_args()
    try:
        import torch
    except ImportError as err:
        print(f"test_gpu.py: PyTorch is not installed: {err}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("test_gpu.py: PyTorch finds no GPU (torch.cuda.is_available() is false)", file=sys.stderr)
        return 1
    for program in filter(None, (args.feeder, args.saver)):
        if not os.access(program, os.X_OK):
            print(f"test_gpu.py: {program} is no program: go build makes it, of ./examples/feed or ./examples/weights", file=sys.stderr)
            return 1
    sys.path.insert(0, HERE)
    print(f"PyTorch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {os.cpu_count()} CPUs")
    print("| what | PyTorch | here | target | |\n|---|---|---|---|---|")
    part(pinning)
    part(cache)
    part(early_stream)
    part(managed_memory)
    if args.feeder:
        part(loaders, args.feeder)
        if torch.cuda.device_count() > 1:
            part(two_consumers, args.feeder)
    else:
        print("no --feeder: the rows of feed.py are missing")
    if args.saver:
        part(saves, args.saver)
    else:
        print("no --saver: the rows of save.py are missing")
    for failure in failures:
        print("FAILED:", failure)
    print("\n" + "\n".join(["| what | PyTorch | here | target | |", "|---|---|---|---|---|", *rows]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
