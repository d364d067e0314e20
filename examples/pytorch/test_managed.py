"""Tests of managed.py without a GPU: python3 -m unittest test_managed. test_gpu.py is for a GPU."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
import unittest
from typing import Any, Dict, List
from unittest import mock

import managed

GIB = 1 << 30


class FakeCUDA:
    """A card of 8 GiB."""

    def __init__(self) -> None:
        self.live: Dict[int, int] = {}
        self.device: Dict[int, int] = {}
        self.next = 1 << 40
        self.calls: List[Any] = []
        self.reserved: List[int] = []  # devices of malloc
        self.failing: Dict[str, int] = {}

    def _new(self, where: Dict[int, int], size: int) -> int:
        self.next += 2 << 20
        address, self.next = self.next, self.next + size
        where[address] = size
        return address

    def malloc_managed(self, size: int) -> Any:
        code = self.failing.get("malloc_managed", 0)
        return (code, 0) if code else (0, self._new(self.live, size))

    def malloc(self, size: int, device: int) -> Any:
        code = self.failing.get("malloc", 0)
        self.reserved.append(device)
        return (code, 0) if code else (0, self._new(self.device, size))

    def free(self, address: int) -> int:
        if address in self.device:
            del self.device[address]
        else:
            del self.live[address]  # a KeyError is a double free
        return self.failing.get("free", 0)

    def prefetch(self, *args: int) -> int:
        self.calls.append(("prefetch", *args))
        return self.failing.get("prefetch", 0)

    def advise(self, *args: int) -> int:
        self.calls.append(("advise", *args))
        return self.failing.get("advise", 0)

    def total(self) -> int:
        return 8 * GIB

    def text(self, code: int) -> str:
        return f"CUDA's error {code}: simulated"


def step() -> None:
    """Lets an error that was raised in this thread arrive."""
    for _ in range(10_000):
        time.sleep(0.001)


class Allocations(unittest.TestCase):
    def setUp(self) -> None:
        self.cuda, self.log = FakeCUDA(), io.StringIO()
        self.a = managed.Allocator(self.cuda, log=self.log)
        self.allocate, self.free = managed.callbacks(self.a)  # called as PyTorch does, through C

    def test_counts_and_peaks(self) -> None:
        one, two = self.allocate(1000, 0, None), self.allocate(GIB, 0, None)
        self.free(two, GIB, 0, None)
        s = self.a.stats()
        self.assertEqual((s["allocated"], s["peak"], s["allocations"], s["frees"]), (1000, GIB + 1000, 2, 1))
        self.a.reset_peak()
        self.assertEqual(self.a.stats()["peak"], 1000)
        self.free(one, 1000, 0, None)
        self.assertEqual(self.cuda.live, {})
        self.assertNotEqual(self.allocate(0, 0, None), None)
        self.free(None, 0, 0, None)

    def test_labels(self) -> None:
        with self.a.label("a"):
            one = self.allocate(10, 0, None)
            with self.a.label("b"):
                self.allocate(20, 0, None)
            self.allocate(30, 0, None)
            t = threading.Thread(target=lambda: self.allocate(5, 0, None))  # of no label
            t.start()
            t.join()
        self.free(one, 10, 0, None)
        self.assertEqual(self.a.stats()["labels"], {
            "a": {"allocated": 30, "peak": 40}, "b": {"allocated": 20, "peak": 20}, "": {"allocated": 5, "peak": 5},
        })

    def test_a_double_free_is_ignored_and_counted(self) -> None:
        one = self.allocate(10, 0, None)
        self.free(one, 10, 0, None)
        self.free(one, 10, 0, None)
        self.assertEqual(self.a.stats()["failures"], 1)
        self.assertIn("which is not allocated: ignored", self.log.getvalue())

    def test_more_than_the_card_has_is_refused_in_the_calling_thread(self) -> None:
        self.allocate(7 * GIB, 0, None)
        with self.assertRaisesRegex(managed.ManagedError, "2147483648 bytes are 1610612736 more than device 0 has beside a reserve of 536870912"):
            self.assertTrue(self.allocate(2 * GIB, 0, None), "PyTorch crashes without memory")
            step()
        self.allocate(7 * GIB, 1, None)  # another card
        self.assertEqual(self.a.stats()["refusals"], 1)
        errors: List[BaseException] = []

        def work() -> None:
            try:
                self.allocate(2 * GIB, 0, None)
                step()
            except managed.ManagedError as err:
                errors.append(err)

        t = threading.Thread(target=work)
        t.start()
        t.join()
        self.assertEqual(len(errors), 1)
        self.assertEqual(self.a.stats()["refusals"], 2)

    def test_oversubscription(self) -> None:
        a = managed.Allocator(self.cuda, oversubscribe=True)
        for _ in range(3):
            self.assertTrue(a.allocate(4 * GIB, 0, 0))
        self.assertEqual((a.stats()["refusals"], a.stats()["allocated"]), (0, 12 * GIB))
        self.assertEqual(len(self.cuda.calls), 1, "what does not fit is not prefetched")

    def test_failures_of_cuda(self) -> None:
        self.cuda.failing = {"malloc": 2}
        one = self.allocate(10, 0, None)
        self.assertIn("no reserve of 536870912 bytes on device 0: CUDA's error 2", self.log.getvalue())
        self.cuda.failing = {"malloc_managed": 2, "free": 700}
        with self.assertRaisesRegex(managed.ManagedError, "cudaMallocManaged of 10 bytes: CUDA's error 2: simulated"):
            self.assertIsNone(self.allocate(10, 0, None))
            step()
        self.free(one, 10, 0, None)
        self.assertIn("cudaFree: CUDA's error 700", self.log.getvalue())
        s = self.a.stats()
        self.assertEqual((s["failures"], s["allocated"]), (2, 0))

    def test_large_allocations_are_logged_and_prefetched(self) -> None:
        with self.a.label("table"):
            one = self.allocate(200 << 20, 0, 77)
        self.assertEqual(self.log.getvalue(), "managed: allocation 1: table 0.21 GB, 0.21 GB in all\n")
        self.assertEqual(self.a.large, [managed.Large(1, 200 << 20, "table", 200 << 20)])
        self.assertEqual(self.cuda.calls, [("prefetch", one, 200 << 20, 0, 77)])

    def test_the_reserve_is_for_libraries(self) -> None:
        self.allocate(10, 0, None)
        self.assertEqual(list(self.cuda.device.values()), [512 << 20])
        with self.a.room(0):
            self.assertEqual(self.cuda.device, {})
        self.assertEqual(list(self.cuda.device.values()), [512 << 20])
        self.assertEqual(self.a.stats()["limits"], {0: 8 * GIB - (512 << 20)})
        with self.a.room(0), self.a.room(0):
            with self.a.room(0):
                self.assertEqual(self.cuda.device, {})
            self.assertEqual(self.cuda.device, {}, "the others have not ended")
        self.assertEqual(list(self.cuda.device.values()), [512 << 20])
        self.assertEqual(self.a.stats()["reserved"], {0: 512 << 20})
        with self.a.room(1):
            pass
        self.assertEqual(self.cuda.reserved, [0, 0, 0, 1])
        with self.assertRaisesRegex(managed.ManagedError, "reserve is -1"):
            managed.Allocator(self.cuda, reserve=-1)

    def test_an_interrupt_in_a_function_arrives_after_it(self) -> None:
        def interrupted(size: int) -> Any:
            del self.cuda.malloc_managed
            raise KeyboardInterrupt("pressed")

        self.cuda.malloc_managed = interrupted  # type: ignore[method-assign]
        with self.assertRaisesRegex(KeyboardInterrupt, "pressed"):
            self.assertTrue(self.allocate(10, 0, None), "PyTorch has its memory")
            step()
        one = self.allocate(10, 0, None)
        with mock.patch.object(self.cuda, "free", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.free(one, 10, 0, None)
                step()

    def test_no_lock_is_held_while_an_error_begins_its_way(self) -> None:
        # A garbage collection in the thread that raises it may free a tensor, which needs the lock.
        free: List[Any] = []

        def deliver(kind: type, text: str) -> None:
            def need() -> None:
                free.append(self.a._lock.acquire(timeout=5))
                if free[-1]:
                    self.a._lock.release()

            t = threading.Thread(target=need)
            t.start()
            t.join()

        with mock.patch.object(self.a, "_raise", deliver):
            self.allocate(9 * GIB, 0, None)
            self.cuda.failing = {"malloc_managed": 2}
            self.assertIsNone(self.allocate(10, 0, None))
        self.assertEqual(free, [True, True])

    def test_tensors_that_end_inside_of_a_call(self) -> None:
        held = [self.allocate(10, 0, None)]
        inner = self.cuda.malloc_managed

        def collecting(size: int) -> Any:  # as a garbage collection at this place
            while held:
                self.free(held.pop(), 10, 0, None)
            return inner(size)

        with mock.patch.object(self.cuda, "malloc_managed", collecting):
            self.free(self.allocate(20, 0, None), 20, 0, None)
        s = self.a.stats()
        self.assertEqual((s["allocations"], s["frees"], s["allocated"], s["peak"]), (2, 2, 0, 20))
        self.assertEqual(self.cuda.live, {})

    def test_threads(self) -> None:
        def work() -> None:
            for n in range(200):
                self.free(self.allocate(n, 0, None), n, 0, None)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        s = self.a.stats()
        self.assertEqual((s["allocations"], s["frees"], s["allocated"], s["failures"]), (1600, 1600, 0, 0))


class Enabling(unittest.TestCase):
    def setUp(self) -> None:
        self.calls: List[Any] = []
        c = types.SimpleNamespace(
            _cuda_customAllocator=lambda a, f: (a, f), _cuda_changeCurrentAllocator=self.calls.append,
        )
        cuda = types.SimpleNamespace(
            is_initialized=lambda: False, device_count=lambda: 1, current_stream=lambda device: types.SimpleNamespace(cuda_stream=9),
        )
        self.torch = types.ModuleType("torch")
        self.torch.__dict__.update(_C=c, cuda=cuda, __version__="9")
        self.cuda = FakeCUDA()
        for p in (
            mock.patch.dict(sys.modules, torch=self.torch), mock.patch.object(managed, "_current", None),
            mock.patch.object(managed, "_functions", None), mock.patch.object(managed, "leave_at_exit"), mock.patch.dict(os.environ),
        ):
            p.start()
            self.addCleanup(p.stop)

    def refused(self, want: str) -> None:
        with self.assertRaisesRegex(managed.ManagedError, want):
            managed.enable(cuda=self.cuda)
        self.assertEqual(self.calls, [])

    def test_too_early_too_late_and_too_old(self) -> None:
        for use in (managed.stats, managed.reset_peak, managed.large, lambda: managed.label("x"), managed.room):
            with self.assertRaisesRegex(managed.ManagedError, "not enabled: call managed.enable"):
                use()
        with mock.patch.object(self.torch.cuda, "is_initialized", lambda: True):
            self.refused("CUDA is initialised already")
        with mock.patch.object(self.torch.cuda, "device_count", lambda: 0):
            self.refused("PyTorch finds no GPU")
        with mock.patch.object(self.torch, "_C", types.SimpleNamespace()):
            self.refused("PyTorch 9 has no torch._C._cuda_customAllocator")
        with mock.patch.dict(sys.modules, torch=None):
            self.refused("PyTorch is not installed")
        none = mock.patch.object(managed, "open", mock.mock_open(read_data="7f00-7f01 r-xp 0 00:00 0 /lib/libc.so.6\n"), create=True)
        with none, self.assertRaisesRegex(managed.ManagedError, "has loaded no libcudart"):
            managed.enable()

    def test_pytorch_gets_the_functions(self) -> None:
        managed.enable(cuda=self.cuda, force_device_alloc=True)
        self.assertEqual(os.environ["CUDA_MANAGED_FORCE_DEVICE_ALLOC"], "1")
        ((allocate, free),) = self.calls
        address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(allocate)(4096, 0, None)
        self.assertEqual(managed.stats()["allocated"], 4096)
        tensor = types.SimpleNamespace(
            data_ptr=lambda: address + 96, numel=lambda: 1000, element_size=lambda: 4, is_contiguous=lambda: True, get_device=lambda: 0
        )
        managed.prefetch(tensor)
        managed.prefetch(tensor, managed.HOST)
        managed.advise(tensor, "read_mostly")
        self.assertEqual(self.cuda.calls, [
            ("prefetch", address + 96, 4000, 0, 9), ("prefetch", address + 96, 4000, -1, 9), ("advise", address + 96, 4000, 1, 0),
        ])
        with self.assertRaisesRegex(managed.ManagedError, "advice 'x': must be one of read_mostly, "):
            managed.advise(tensor, "x")
        self.cuda.failing = {"prefetch": 1, "advise": 1}
        with self.assertRaisesRegex(managed.ManagedError, "cudaMemPrefetchAsync of 4000 bytes: CUDA's error 1"):
            managed.prefetch(tensor)
        with self.assertRaisesRegex(managed.ManagedError, "cudaMemAdvise of 4000 bytes: CUDA's error 1"):
            managed.advise(tensor, "accessed_by", managed.HOST)
        tensor.numel = lambda: 1001
        with self.assertRaisesRegex(managed.ManagedError, "not in managed memory of this allocator"):
            managed.prefetch(tensor)
        tensor.is_contiguous = lambda: False
        with self.assertRaisesRegex(managed.ManagedError, "not contiguous"):
            managed.advise(tensor, "read_mostly")
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(free)(address, 4096, 0, None)
        self.assertEqual(managed.stats()["allocated"], 0)
        with self.assertRaisesRegex(managed.ManagedError, "enabled already"):
            managed.enable(cuda=self.cuda)


class Exit(unittest.TestCase):
    def test_no_function_is_called_after_the_interpreter_is_gone(self) -> None:
        # on_exit stands for a destructor of C++ that frees a tensor: it is registered first, so that it runs last.
        code = textwrap.dedent("""
            import ctypes, sys, atexit, managed, test_managed
            a = managed.Allocator(test_managed.FakeCUDA())
            functions = managed.callbacks(a)
            libc = ctypes.CDLL(None)
            libc.on_exit(ctypes.cast(functions[1], ctypes.c_void_p), None)
            managed.leave_at_exit()
            libc.printf(b"flushed\\n")
            atexit.register(lambda: print("atexit"))
            sys.exit(7)
        """)
        done = subprocess.run([sys.executable, "-B", "-c", code], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, sorted(done.stdout.split()), done.stderr), (7, ["atexit", "flushed"], ""))


if __name__ == "__main__":
    unittest.main()
