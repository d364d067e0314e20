"""Tests of pinned.py without a GPU: python3 -m unittest test_pinned. test_gpu.py is for a GPU."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import unittest
from typing import Any, Dict, List
from unittest import mock

import pinned

PAGE = pinned.PAGE


class Event:
    def __init__(self, stream: "Stream", at: int) -> None:
        self.stream, self.at = stream, at

    def query(self) -> bool:
        return self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.done = max(self.stream.done, self.at)
        self.stream.waits += 1


class Stream:
    """A stream whose work ends when a test says so."""

    def __init__(self) -> None:
        self.queued = self.done = self.waits = 0

    def copy(self) -> None:
        self.queued += 1

    def query(self) -> bool:
        return self.done >= self.queued

    def record_event(self) -> Event:
        return Event(self, self.queued)

    def finish(self) -> None:
        self.done = self.queued


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        return any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)


class Runtime:
    """The rules of cudaHostRegister: no overlap, the exact base, and memory that is mapped."""

    def __init__(self) -> None:
        self.registered: Dict[int, int] = {}
        self.calls: List[str] = []
        self.side = Stream()
        self.default = Stream()
        self.refusals: List[int] = []
        self.flags = 0  # those that are expected

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append("register")
        assert all(address + size <= a or a + n <= address for a, n in self.registered.items()), "an overlap"
        assert mapped(address) and mapped(address + size - 1) and flags == self.flags
        if self.refusals:
            return self.refusals.pop()
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        assert address in self.registered, "a double free"
        assert mapped(address), "unmapped before it is unregistered"
        assert self.side.query() and self.default.query() or not self.refusals
        if self.refusals:
            return self.refusals.pop()
        del self.registered[address]
        return 0

    def streams(self) -> List[Stream]:
        return [self.default, self.side]

    def numa_node(self) -> int:
        return 0


def address(view: memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Allocations(unittest.TestCase):
    def setUp(self) -> None:
        self.runtime = Runtime()
        self.a = pinned.Allocator(self.runtime, cache_bytes=16 * PAGE)

    def test_memory_is_exact_writable_and_registered_once(self) -> None:
        for size in (1, PAGE - 1, PAGE, PAGE + 1, (4 << 20) + 1):
            with mock.patch.object(pinned, "POPULATE_PIECE", 1 << 20):  # in several threads
                view = self.a.allocate(size)
            self.assertEqual(len(view), size)
            at = address(view)
            self.assertEqual(self.runtime.registered, {at: -(-size // PAGE) * PAGE}, "a page more at most, in one registration")
            self.assertGreaterEqual(pinned.resident(at, size), len(view))
            view[0], view[-1] = 1, 2
            del view
            self.a.empty_cache()
            self.assertEqual(self.runtime.registered, {})
            self.assertFalse(mapped(at), "it is unmapped after it is unregistered")

    def test_freed_memory_is_used_again_for_the_same_number_of_pages(self) -> None:
        first = self.a.allocate(PAGE + 1)
        at = address(first)
        del first
        other = self.a.allocate(PAGE)
        self.assertNotEqual(address(other), at, "one page is not two")
        again = self.a.allocate(2 * PAGE)
        self.assertEqual(address(again), at)
        self.assertEqual(self.runtime.calls, ["register", "register"])

    def test_memory_is_not_used_again_during_a_copy_on_any_stream(self) -> None:
        for stream in (self.runtime.default, self.runtime.side):
            view = self.a.allocate(PAGE)
            at = address(view)
            stream.copy()
            del view
            held = self.a.allocate(PAGE)
            self.assertNotEqual(address(held), at, "the copy reads it")
            stream.copy()  # later work does not count
            stream.done += 1
            again = self.a.allocate(PAGE)
            self.assertEqual(address(again), at)
            stream.finish()
            del held, again
            self.a.empty_cache()

    def test_streams_of_other_libraries_count_when_they_are_recorded(self) -> None:
        foreign = Stream()
        view = self.a.allocate(PAGE)
        at = address(view)
        self.a.record_stream(at, foreign)
        foreign.copy()
        del view
        other = self.a.allocate(PAGE)
        self.assertNotEqual(address(other), at)
        foreign.finish()
        view = self.a.allocate(PAGE)
        self.assertEqual(address(view), at)
        foreign.copy()  # it is not of this use
        del view
        self.assertEqual(address(self.a.allocate(PAGE)), at)
        with self.assertRaisesRegex(pinned.PinnedError, "does not begin in memory of this allocator"):
            self.a.record_stream(at + 1, foreign)

    def test_the_cache_is_bounded_and_waits_before_it_unregisters(self) -> None:
        views = [self.a.allocate(8 * PAGE) for _ in range(4)]
        self.runtime.side.copy()
        views.clear()
        self.assertEqual(self.a.stats()["reserved_bytes.all.current"], 16 * PAGE)
        self.assertEqual(len(self.runtime.registered), 2)
        self.assertEqual(self.runtime.side.waits, 2, "for the copy")
        self.a.empty_cache()
        self.assertEqual(self.runtime.registered, {})

    def test_memory_larger_than_the_cache_is_given_back_at_once(self) -> None:
        view = self.a.allocate(17 * PAGE)
        at = address(view)
        del view
        self.assertEqual((self.runtime.registered, mapped(at)), ({}, False))

    def test_a_slice_keeps_the_memory(self) -> None:
        view = self.a.allocate(PAGE)
        at, part = address(view), view[8:16].cast("q")
        del view
        self.assertEqual(self.a.stats()["allocation.all.current"], 1)
        other = self.a.allocate(PAGE)
        self.assertNotEqual(address(other), at)
        part[0] = 3
        self.assertTrue(mapped(at))
        del part
        self.assertEqual(address(self.a.allocate(PAGE)), at)

    def test_the_cache_makes_no_call_but_a_query_of_each_stream(self) -> None:
        self.a.allocate(PAGE)  # mapped and registered once
        with mock.patch.object(Stream, "query", autospec=True, return_value=True) as query, \
                mock.patch.object(pinned, "available_bytes", side_effect=AssertionError("nothing is made anew")):
            for _ in range(100):
                self.a.allocate(PAGE)
        self.assertEqual((self.runtime.calls, query.call_count), (["register"], 200))

    def test_memory_stays_while_cuda_does_not_say_what_is_queued(self) -> None:
        def refused() -> bool:  # as while a graph is captured, or after an error that stays
            raise RuntimeError("operation not permitted when stream is capturing")

        view = self.a.allocate(17 * PAGE)
        at = address(view)
        with mock.patch.object(self.runtime.side, "query", refused):
            self.runtime.side.copy()
            del view
            self.a.empty_cache()
            other = self.a.allocate(17 * PAGE)
            self.assertNotEqual(address(other), at, "the copy may read it")
            self.assertTrue(mapped(at) and at in self.runtime.registered)
        again = self.a.allocate(17 * PAGE)
        self.assertNotIn(at, (address(other), address(again)), "the copy reads it")
        self.assertTrue(mapped(at))
        self.runtime.side.finish()
        del other, again
        self.a.empty_cache()
        self.assertEqual((self.runtime.registered, mapped(at)), ({}, False))

    def test_refusals(self) -> None:
        for size in (0, -1):
            with self.assertRaisesRegex(pinned.PinnedError, f"{size} bytes of pinned memory: must be positive"):
                self.a.allocate(size)
        for size in (1 << 60, 1 << 80):
            with self.assertRaisesRegex(pinned.PinnedError, "the host, or the control group, has .* left"):
                self.a.allocate(size)
        self.runtime.refusals = [801]
        with self.assertRaisesRegex(pinned.PinnedError, "cudaHostRegister refused 4096 bytes: CUDA's error 801"):
            self.a.allocate(1)
        self.assertEqual(self.a.stats()["reserved_bytes.all.current"], 0)
        with mock.patch.object(pinned, "available_bytes", return_value=1 << 62):
            with self.assertRaisesRegex(pinned.PinnedError, "cannot be mapped"):
                self.a.allocate(1 << 50)

    def test_memory_whose_unregistration_fails_stays_mapped_and_is_nobodys(self) -> None:
        view = self.a.allocate(PAGE)
        at = address(view)
        del view
        self.runtime.refusals = [700]
        self.a.empty_cache()
        self.assertTrue(mapped(at))
        self.assertEqual(self.a.stats()["num_unregister_failures"], 1)
        self.assertNotEqual(address(self.a.allocate(PAGE)), at)

    def test_counts(self) -> None:
        one, two = self.a.allocate(10), self.a.allocate(PAGE + 1)
        s = self.a.stats()
        self.assertEqual((s["requested_bytes.all.current"], s["allocated_bytes.all.current"], s["allocation.all.current"]), (PAGE + 11, 3 * PAGE, 2))
        del two
        s = self.a.stats()
        self.assertEqual((s["allocated_bytes.all.current"], s["allocated_bytes.all.peak"], s["allocated_bytes.all.freed"]), (PAGE, 3 * PAGE, 2 * PAGE))
        self.assertEqual((s["reserved_bytes.all.current"], s["segment.all.current"]), (3 * PAGE, 2))
        self.a.reset_peak_stats()
        self.assertEqual(self.a.stats()["allocated_bytes.all.peak"], PAGE)
        del one

    def test_threads(self) -> None:
        errors: List[BaseException] = []

        def work(mine: int) -> None:
            try:
                for i in range(300):
                    view = self.a.allocate(1 + (i * mine) % (3 * PAGE))
                    view[0] = view[-1] = mine
                    if i % 17 == mine:
                        self.runtime.side.finish()
                    self.assertEqual((view[0], view[-1]), (mine, mine))
            except BaseException as err:
                errors.append(err)

        threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(errors, [])
        s = self.a.stats()
        self.assertEqual((s["allocation.all.current"], s["allocation.all.allocated"]), (0, 2400))
        self.a.empty_cache()
        self.assertEqual(self.runtime.registered, {})

    def test_memory_that_is_freed_inside_of_a_call(self) -> None:
        held = [self.a.allocate(PAGE)]
        query = self.runtime.side.query

        def freeing() -> bool:  # as a garbage collection at this place
            held.clear()
            return query()

        with mock.patch.object(self.runtime.side, "query", freeing):
            del held[1:]
            self.a.allocate(2 * PAGE)
            self.a.allocate(3 * PAGE)
        self.assertEqual(self.a.stats()["allocation.all.current"], 0)

    def test_a_child_neither_allocates_nor_frees(self) -> None:
        view = self.a.allocate(PAGE)
        cached = self.a.allocate(2 * PAGE)
        del cached
        view[0] = 7
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            calls = len(self.runtime.calls)
            try:
                self.a.allocate(1)
            except pinned.PinnedError as err:
                os.write(write, str(err).encode())
            del view
            gc.collect()
            os._exit(len(self.runtime.calls) - calls)
        _, status = os.waitpid(child, 0)
        self.assertEqual(status, 0, "no call of CUDA")
        self.assertIn("use spawn", os.read(read, 1000).decode())
        self.assertEqual(view[0], 7)
        for fd in (read, write):
            os.close(fd)


class FakeTorch:
    """What TorchRuntime takes from PyTorch, on a host with two GPUs. Device 1 has no context until a stream is made there."""

    def __init__(self) -> None:
        fake, self.contexts = self, {0}
        self.cudart = Runtime()

        class Base:
            def __init__(self, device: int = 0, stream: int = 0) -> None:
                self.device_index, self.cuda_stream, self.work = device, stream, Stream()
                if stream != 0:
                    fake.contexts.add(device)

            def query(self) -> bool:
                assert self.device_index in fake.contexts, "the query made a context"
                return self.work.query()

        class TorchStream(Base):
            def __new__(cls, *args: Any, **kwargs: Any) -> "TorchStream":
                return super().__new__(cls)

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                pass

            def query(self) -> bool:
                return super().query()

            def record_event(self) -> Event:
                return self.work.record_event()

        def made(cls: Any, device: int = 0, stream: int = 0) -> Any:
            self = object.__new__(cls)
            Base.__init__(self, device, stream)
            return self

        TorchStream.__new__ = made  # type: ignore[method-assign]
        self.Stream = TorchStream
        self.ExternalStream = type("ExternalStream", (TorchStream,), {})
        self.defaults = [TorchStream(0), TorchStream(1)]
        self.module = types.ModuleType("torch")
        self.module.__dict__.update(
            _C=types.SimpleNamespace(_cuda_hasPrimaryContext=lambda device: device in self.contexts),
            cuda=types.SimpleNamespace(
                is_available=lambda: True, init=lambda: None, cudart=lambda: self.cudart, device_count=lambda: 2, current_device=lambda: 0,
                Stream=TorchStream, ExternalStream=self.ExternalStream, get_device_properties=lambda device: None,
                default_stream=self.defaults.__getitem__, current_stream=self.defaults.__getitem__,
            ),
        )


class KnownStreams(unittest.TestCase):
    def setUp(self) -> None:
        self.torch = FakeTorch()
        p = mock.patch.dict(sys.modules, torch=self.torch.module)
        p.start()
        self.addCleanup(p.stop)

    def reads(self, a: pinned.Allocator, stream: Any) -> None:
        """Requires that memory is not used again while a stream that was known to nobody else reads it."""
        view = a.allocate(PAGE)
        at = address(view)
        stream.work.copy()
        del view
        other = a.allocate(PAGE)
        self.assertNotEqual(address(other), at, "a copy reads it")
        stream.work.finish()
        again = a.allocate(PAGE)
        self.assertEqual(address(again), at)
        del other, again
        a.empty_cache()

    def test_streams_from_before_the_first_use_and_later_ones(self) -> None:
        early = self.torch.Stream(0, 7)
        a = pinned.Allocator()
        self.reads(a, early)
        self.reads(a, self.torch.Stream(0, 8))
        self.reads(a, self.torch.defaults[0])

    def test_a_device_without_a_context_gets_none(self) -> None:
        a = pinned.Allocator()
        self.reads(a, self.torch.defaults[0])
        self.assertEqual(self.torch.contexts, {0})
        second = self.torch.Stream(1, 9)
        self.reads(a, second)
        self.reads(a, self.torch.defaults[1])

    def test_external_streams_are_not_queried_after_their_objects_end(self) -> None:
        a = pinned.Allocator()
        external = self.torch.ExternalStream(0, 11)
        self.reads(a, external)
        del external
        gc.collect()
        with mock.patch.object(self.torch.ExternalStream, "query", side_effect=AssertionError("it may be destroyed"), create=True):
            a.allocate(PAGE)
        self.assertEqual(len(a._runtime.streams()), 1)


class Interpreters(unittest.TestCase):
    def run_python(self, code: str) -> "subprocess.CompletedProcess[str]":
        code = "import pinned, test_pinned\n" + textwrap.dedent(code)
        return subprocess.run(
            [sys.executable, "-B", "-c", code], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True, timeout=60
        )

    def test_the_exit_frees_nothing_and_says_nothing(self) -> None:
        done = self.run_python("""
            runtime = test_pinned.Runtime()
            a = pinned.Allocator(runtime)
            views = [a.allocate(100), a.allocate(1 << 22)]
            cycle = [a.allocate(100)]
            cycle.append(cycle)
            import atexit
            atexit.register(lambda: print(runtime.calls))
        """)
        self.assertEqual((done.returncode, done.stderr, done.stdout), (0, "", "['register', 'register', 'register']\n"))

    def test_no_pytorch_or_no_gpu_is_a_sentence(self) -> None:
        done = self.run_python("import sys; sys.modules['torch'] = None; sys.exit(pinned.main([]))")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^pinned.py: PyTorch is not installed: .*\n$")
        done = self.run_python("""
            import sys, types
            torch = types.ModuleType("torch")
            torch.cuda = types.SimpleNamespace(is_available=lambda: False)
            sys.modules["torch"] = torch
            sys.exit(pinned.main([]))
        """)
        self.assertEqual((done.returncode, done.stderr), (1, "pinned.py: PyTorch finds no GPU (torch.cuda.is_available() is false)\n"))


@unittest.skipIf(importlib.util.find_spec("torch") is None, "PyTorch is not installed: its tensors are not tried")
class Tensors(unittest.TestCase):
    def setUp(self) -> None:
        import torch

        self.torch = torch
        self.runtime = Runtime()
        a = pinned.Allocator(self.runtime)
        patches = [
            mock.patch.object(pinned, "_default", a),
            mock.patch.object(torch.Tensor, "is_pinned", lambda t, *_: any(x <= t.data_ptr() < x + n for x, n in self.runtime.registered.items())),
        ]
        for p in patches:
            p.start()
            self.addCleanup(p.stop)

    def test_shapes_types_and_values(self) -> None:
        torch = self.torch
        x = pinned.empty((3, 5), torch.float64)
        self.assertEqual((x.shape, x.dtype, x.is_pinned()), ((3, 5), torch.float64, True))
        self.assertEqual(pinned.empty(7).dtype, torch.get_default_dtype())
        self.assertEqual(pinned.empty(()).shape, ())
        self.assertEqual(pinned.empty((0, 3)).shape, (0, 3))
        self.assertEqual(pinned.zeros_like(torch.ones(4, dtype=torch.int16)).tolist(), [0] * 4)
        with self.assertRaisesRegex(pinned.PinnedError, "no dimension may be negative"):
            pinned.empty((3, -1))
        for source in (
            torch.arange(24).reshape(2, 3, 4), torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1), torch.tensor(5.5),
            torch.arange(6).expand(3, 6), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.arange(10)[::2], torch.zeros(0),
        ):
            got = pinned.pin(source)
            self.assertTrue(torch.equal(got, source))
            self.assertEqual(got.stride(), torch.empty_like(source).stride())
            self.assertEqual(got.is_pinned(), source.numel() > 0)
        self.assertIs(pinned.pin(x), x)
        with self.assertRaisesRegex(pinned.PinnedError, "only dense tensors of the CPU"):
            pinned.pin(torch.eye(3).to_sparse())

    def test_the_patch_and_its_end(self) -> None:
        torch = self.torch
        old = torch.empty, torch.Tensor.pin_memory
        with pinned.patch():
            made = [
                torch.empty(3, 5, pin_memory=True), torch.empty((3, 5), dtype=torch.int8, pin_memory=True), torch.zeros(4, pin_memory=True),
                torch.arange(5, pin_memory=True), torch.tensor([1.0], pin_memory=True), torch.empty_like(torch.ones(3), pin_memory=True),
                torch.ones(3).pin_memory(), torch.ones(3).pin_memory("cuda"), torch.ones(3, requires_grad=True, pin_memory=True),
            ]
            self.assertFalse(torch.empty(3).is_pinned())
        self.assertEqual([t.is_pinned() for t in made], [True] * 9)
        self.assertEqual(made[0].shape, (3, 5))
        self.assertEqual(made[3].tolist(), [0, 1, 2, 3, 4])
        self.assertTrue(made[-1].requires_grad and made[-1].is_leaf)
        self.assertEqual((torch.empty, torch.Tensor.pin_memory), old)

    def test_data_loader_pins_by_the_patch(self) -> None:
        torch = self.torch
        from torch.utils.data._utils.pin_memory import pin_memory

        with pinned.patch():
            batch = pin_memory({"x": torch.ones(4, 4), "y": [torch.zeros(2)]})
        self.assertTrue(batch["x"].is_pinned() and batch["y"][0].is_pinned())

    def test_a_tensor_keeps_its_memory(self) -> None:
        x = pinned.empty(100)
        part = x[50:]
        at = x.data_ptr()
        del x
        self.assertNotEqual(pinned.empty(100).data_ptr(), at)
        del part
        self.assertEqual(pinned.stats()["allocation.all.current"], 0)


class SharedMemory(unittest.TestCase):
    """Of files as the Go package hostmem/shm makes them: its test opens its own by this module."""

    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp(dir="/dev/shm")
        self.runtime = Runtime()
        self.runtime.flags = pinned.REGISTER_READ_ONLY

    def tearDown(self) -> None:
        os.rmdir(self.directory)  # nothing is left

    def make(self, size: int = 10_000, flags: int = 0, label: bytes = b"model", **changed: int) -> str:
        fields = {"version": 1, "offset": PAGE, "size": size, **changed}
        header = struct.pack("<8sIIQQqII", b"pinnedSM", fields["version"], flags, fields["offset"], fields["size"], 1, 2, 3)
        header += struct.pack("<I", fields.get("checksum", pinned.crc32c(header)))
        header = header.ljust(64, b"\0") + struct.pack("<QqIIQ", changed.get("generation", 2), 1, 2, len(label), 0) + label
        path = os.path.join(self.directory, "m")
        with open(path, "wb") as f:
            f.write(header.ljust(PAGE, b"\0"))
            f.write(bytes(i % 251 for i in range(size)).ljust((size + PAGE - 1) & -PAGE, b"\0"))
        return path

    def open(self, **options: Any) -> pinned.Shared:
        return pinned.Shared("m", directory=self.directory, runtime=self.runtime, **options)

    def test_it_is_registered_and_the_last_one_removes_it(self) -> None:
        self.make()
        a, b = self.open(), self.open()
        self.assertEqual(a.content(), (2, True, "model"))
        self.assertEqual(ctypes.string_at(a._address, 10_000), bytes(i % 251 for i in range(10_000)))
        self.assertEqual(len(self.runtime.registered), 2)
        a.close()
        self.assertTrue(os.path.exists(b.path))
        b.close()
        b.close()
        self.assertFalse(os.path.exists(b.path))
        self.assertEqual(self.runtime.registered, {})

    def test_what_is_kept_stays(self) -> None:
        path = self.make(flags=1, generation=3)
        self.runtime.flags = 0
        a = self.open(write=True)
        self.assertEqual(a.content(), (3, False, ""))
        ctypes.memset(a._address, 7, 1)
        a.close()
        with open(path, "rb") as f:
            self.assertEqual(f.read()[PAGE], 7)
            b = pinned.Shared(fd=f.fileno(), runtime=Runtime(), write=True)
        b.close()
        self.assertTrue(os.path.exists(path))
        os.unlink(path)

    def test_damaged_files_are_refused(self) -> None:
        for changed in ({"version": 2}, {"size": 1 << 40}, {"size": 0}, {"offset": 0}, {"offset": 1 << 40}, {"checksum": 1}):
            path = self.make(**changed) if "size" not in changed else self.make(9_000, **{})
            if "size" in changed:
                with open(path, "r+b") as f:
                    f.truncate(100 if changed["size"] == 0 else PAGE)
            with self.assertRaisesRegex(pinned.PinnedError, "hostmem/shm"):
                self.open()
            os.unlink(path)
        for name in ("m", "a/b", ""):
            with self.assertRaises(pinned.PinnedError):
                pinned.Shared(name, directory=self.directory, runtime=self.runtime)
        self.assertEqual(self.runtime.calls, [])

    def test_a_refused_registration_leaves_nothing(self) -> None:
        self.make()
        self.runtime.refusals = [2]
        with self.assertRaisesRegex(pinned.PinnedError, "refused the 10000 bytes"):
            self.open()
        self.assertFalse(os.path.exists(os.path.join(self.directory, "m")))


if __name__ == "__main__":
    unittest.main()
