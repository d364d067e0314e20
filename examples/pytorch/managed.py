"""Managed memory (cudaMallocManaged) as PyTorch's GPU memory, so that models may take more than the card has.

    import managed
    managed.enable(oversubscribe=True)       # before anything initialises CUDA
    with managed.label("embeddings"):
        table = torch.empty(50_000_000, 256, device="cuda")
    managed.prefetch(table)
    print(managed.stats()["peak"])

PyTorch calls two functions of this file for each of its allocations: there is no compiler. PyTorch does not cache
then: a tensor's end is cudaFree, which waits for the GPU. So memory is never used again too early on another
stream; but programs with many small tensors are slower, and record_stream means nothing.

What does not work with an allocator that is plugged in: torch.cuda.memory_allocated and the other statistics of
PyTorch (stats() has them instead), memory pools (torch.cuda.MemPool, CUDA graphs' private pools) and
PYTORCH_CUDA_ALLOC_CONF, expandable segments too. A managed tensor cannot be shared with another process
(cudaIpcGetMemHandle). On GPUs without concurrentManagedAccess, which are those of Windows and before
Pascal, memory does not exceed the card.

An allocation beyond what the card has, less the reserve, is refused unless oversubscribe is set: PyTorch
crashes if an allocator returns nothing, so the memory is given, and ManagedError is raised in the Python thread
at one of its next steps. The file needs PyTorch 2 and CUDA; Python 3.9 on Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import time
from threading import get_ident
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

if TYPE_CHECKING:
    import torch

HOST = -1  # as a device
ADVICE = {
    "read_mostly": 1, "no_read_mostly": 2, "preferred_location": 3, "no_preferred_location": 4, "accessed_by": 5, "not_accessed_by": 6,
}
KEPT_LARGE = 1000  # entries of the log


class ManagedError(RuntimeError):
    """Managed memory cannot be enabled, or an allocation is beyond what the card has."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class CUDA:
    """The functions of libcudart that this file calls. Tests have others."""

    def __init__(self) -> None:
        with open("/proc/self/maps") as maps:
            paths = sorted(set(re.findall(r"/\S*/libcudart\.so\S*", maps.read())))
        if not paths:
            raise ManagedError("PyTorch has loaded no libcudart: it is a build for CPUs, or for another vendor's GPUs")
        self._lib = ctypes.CDLL(paths[0])
        version = ctypes.c_int()
        if self._lib.cudaRuntimeGetVersion(ctypes.byref(version)) != 0:
            raise ManagedError(f"{paths[0]} does not tell its version")
        self._by_location = version.value >= 13000
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p
        self._bind()

    def _bind(self) -> None:
        """Declares the arguments of the functions that are called most: that converts them in C."""
        self._malloc_managed, self._free = self._lib.cudaMallocManaged, self._lib.cudaFree
        self._malloc_managed.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._free.argtypes = [ctypes.c_void_p]

    def malloc_managed(self, size: int) -> Tuple[int, int]:
        """Returns CUDA's error code and the address."""
        p = ctypes.c_void_p()
        code = self._malloc_managed(ctypes.byref(p), size, 1)
        return code, p.value or 0

    def malloc(self, size: int, device: int) -> Tuple[int, int]:
        """Returns CUDA's error code and the address of memory of a device, and leaves the current device as it was."""
        p, before = ctypes.c_void_p(), ctypes.c_int()
        code = self._lib.cudaGetDevice(ctypes.byref(before)) or self._lib.cudaSetDevice(ctypes.c_int(device))
        if code == 0:
            code = self._lib.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(size)) or self._lib.cudaSetDevice(before)
        return code, p.value or 0

    def free(self, address: int) -> int:
        return self._free(address)

    def prefetch(self, address: int, size: int, device: int, stream: int) -> int:
        p, n, s = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        if self._by_location:
            return self._lib.cudaMemPrefetchAsync(p, n, _location(device), ctypes.c_uint(0), s)
        return self._lib.cudaMemPrefetchAsync(p, n, ctypes.c_int(device), s)

    def advise(self, address: int, size: int, advice: int, device: int) -> int:
        p, n = ctypes.c_void_p(address), ctypes.c_size_t(size)
        return self._lib.cudaMemAdvise(p, n, ctypes.c_int(advice), _location(device) if self._by_location else ctypes.c_int(device))

    def total(self) -> int:
        """The bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        code = self._lib.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        return total.value if code == 0 else 0

    def text(self, code: int) -> str:
        self._lib.cudaGetLastError()  # it would surface at another call
        return f"CUDA's error {code}: {self._lib.cudaGetErrorString(ctypes.c_int(code)).decode()}"


def _location(device: int) -> _Location:
    return _Location(2, 0) if device == HOST else _Location(1, device)


class Large(NamedTuple):
    """An entry of the log of large allocations."""

    number: int
    bytes: int
    label: str
    allocated: int  # bytes of all allocations, with this one


class Bytes:
    """Bytes that are allocated: of all devices, of one, or of a label."""

    __slots__ = ("now", "peak", "limit")

    def __init__(self, limit: int = 1 << 62) -> None:
        self.now = self.peak = 0
        self.limit = limit  # of a device: what it has, less the reserve


class Allocator:
    """The two functions for PyTorch, and what they count. They are called in any thread, with the lock of the interpreter.

    Programs that allocate much call them often, so they make few calls: frees, and bytes of devices and labels, are
    derived or found without a look-up.
    """

    def __init__(self, cuda: Any, reserve: int = 512 << 20, oversubscribe: bool = False, prefetch_from: Optional[int] = 64 << 20,
                 log_from: int = 100 << 20, log: Any = None) -> None:
        for name, n in (("reserve", reserve), ("prefetch_from", prefetch_from or 0), ("log_from", log_from)):
            if n < 0:
                raise ManagedError(f"{name} is {n}: must not be negative")
        self.cuda, self.reserve, self.oversubscribe = cuda, reserve, oversubscribe
        self.prefetch_from, self.log_from, self.log = prefetch_from, log_from, log
        self._lock = threading.RLock()  # a garbage collection inside of a function may free a tensor
        self._held: Dict[int, int] = {}  # the reserve of each device
        self._rooms: Dict[int, int] = {}  # the blocks of room that are entered, for each device
        self._live: Dict[int, Tuple[int, Bytes, Bytes]] = {}  # bytes, those of the label and of the device that they count in
        self._devices: Dict[int, Bytes] = {}
        self._labels: Dict[str, Bytes] = {}
        self._all = Bytes()
        self._allocations = self._failures = self._refusals = 0
        self.large: List[Large] = []
        self._here = threading.local()
        self._inside: Dict[int, bool] = {}  # by thread
        self._notable = min(log_from, log_from if prefetch_from is None else prefetch_from)

    def allocate(self, size: int, device: int, stream: Optional[int]) -> int:
        """Returns the address of managed memory, or 0 if CUDA has none. It raises nothing: PyTorch's call is of C."""
        here, inside = get_ident(), self._inside
        inside[here] = True
        try:
            size = size or 1
            label = getattr(self._here, "label", "")
            of_all, of_label, of_device = self._all, self._labels.get(label), self._devices.get(device)
            if of_label is None:
                of_label = self._labels.setdefault(label, Bytes())
            if of_device is None:
                of_device = self._first(device)
            code, address = self.cuda.malloc_managed(size)
            if code == 0:
                self._lock.acquire()  # with takes twice as long
                try:
                    self._live[address] = (size, of_label, of_device)
                    self._allocations += 1
                    of_device.now += size
                    of_all.now += size
                    if of_all.now > of_all.peak:
                        of_all.peak = of_all.now
                    of_label.now += size
                    if of_label.now > of_label.peak:
                        of_label.peak = of_label.now
                    beyond = of_device.now - of_device.limit
                    entry = Large(self._allocations, size, label, of_all.now) if size >= self.log_from else None
                finally:
                    self._lock.release()
                if beyond > 0 or size >= self._notable:
                    self._notice(address, size, device, stream or 0, beyond, entry)
            else:
                self._failed(f"cudaMallocManaged of {size} bytes", code)
        except BaseException as err:  # an interrupt
            _, address = self.cuda.malloc_managed(size)
            self._raise(type(err), str(err))
        inside[here] = False  # nothing can be raised after this: it is no call
        return address

    def free(self, address: Optional[int], size: int = 0, device: int = 0, stream: Optional[int] = None) -> None:
        """Frees memory when the GPU is done with it (cudaFree). An address that is not live is ignored. It raises nothing."""
        here, inside = get_ident(), self._inside
        outer = inside.get(here, False)  # a garbage collection in allocate
        inside[here] = True
        try:
            self._lock.acquire()
            try:
                found = self._live.pop(address, None)
                if found is not None:
                    size, of_label, of_device = found
                    self._all.now -= size
                    of_label.now -= size
                    of_device.now -= size
            finally:
                self._lock.release()
            if found is not None:
                code = self.cuda.free(address)
                if code != 0:
                    self._failed("cudaFree", code)
            elif address:
                self._stray(address)
        except BaseException as err:  # an interrupt: the memory may stay
            self._raise(type(err), str(err))
        inside[here] = outer

    def _notice(self, address: int, size: int, device: int, stream: int, beyond: int, entry: Optional[Large]) -> None:
        """Logs an allocation, and prefetches or refuses it. The lock is not held: the thread that raises an error may need it."""
        if entry is not None:
            self._note(entry)
        if beyond > 0 and not self.oversubscribe:
            with self._lock:
                self._refusals += 1
            self._raise(ManagedError, f"{size} bytes are {beyond} more than device {device} has beside a reserve of {self.reserve}: "
                        "managed.enable(oversubscribe=True) allows it")
        elif self.prefetch_from is not None and size >= self.prefetch_from and beyond <= 0:
            self.cuda.prefetch(address, size, device, stream)  # only for speed

    def _failed(self, call: str, code: int) -> None:
        with self._lock:
            self._failures += 1
        text = f"{call}: {self.cuda.text(code)}"
        if call == "cudaFree":
            self._note_text(text)
        else:
            self._raise(ManagedError, text)

    def _stray(self, address: int) -> None:
        with self._lock:
            self._failures += 1
        self._note_text(f"free of {address:#x}, which is not allocated: ignored")

    @contextlib.contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Names the allocations of this thread in the block."""
        before = getattr(self._here, "label", "")
        self._here.label = name
        try:
            yield
        finally:
            self._here.label = before

    @contextlib.contextmanager
    def room(self, device: int) -> Iterator[None]:
        """Gives the reserve of a device to libraries that allocate for themselves, as cuBLAS does, in the block.

        What they take they keep: the rest is reserved again after it, or after the outermost of several blocks.
        """
        with self._lock:
            self._rooms[device] = self._rooms.get(device, 0) + 1
            address = self._held.pop(device, 0)
        if address:
            self.cuda.free(address)
        try:
            yield
        finally:
            with self._lock:
                self._rooms[device] -= 1
            self._hold(device)

    def range(self, address: int, size: int) -> None:
        """Raises unless the bytes are of one allocation."""
        with self._lock:
            if not any(a <= address and address + size <= a + n for a, (n, _, _) in self._live.items()):
                raise ManagedError("the tensor is not in managed memory of this allocator: it was there before enable, or is of the CPU")

    def stats(self) -> Dict[str, Any]:
        """Bytes now and at most, also by label; the numbers of allocations, frees, refusals and failures."""
        with self._lock:
            return {
                "allocated": self._all.now, "peak": self._all.peak, "allocations": self._allocations,
                "frees": self._allocations - len(self._live),
                "refusals": self._refusals, "failures": self._failures, "reserved": {d: self.reserve for d in self._held},
                "limits": {device: b.limit for device, b in self._devices.items()},
                "labels": {name: {"allocated": b.now, "peak": b.peak} for name, b in self._labels.items()},
            }

    def reset_peak(self) -> None:
        """Makes each peak the current number of bytes."""
        with self._lock:
            for b in (self._all, *self._labels.values()):
                b.peak = b.now

    def _first(self, device: int) -> Bytes:
        with self._lock:
            if device not in self._devices:  # another thread was not faster
                total = self.cuda.total()
                self._devices[device] = Bytes(max(total - self.reserve, 0)) if total else Bytes()
                self._hold(device)
            return self._devices[device]

    def _hold(self, device: int) -> None:
        with self._lock:
            if self.reserve == 0 or device in self._held or self._rooms.get(device):
                return
            self._held[device] = 0  # one thread reserves it
        code, address = self.cuda.malloc(self.reserve, device)
        with self._lock:
            unwanted = self._rooms.get(device, 0) > 0 or device not in self._held  # a room was entered meanwhile
            if code != 0 or unwanted:
                self._held.pop(device, None)
            else:
                self._held[device] = address
        if code != 0:
            self._note_text(f"no reserve of {self.reserve} bytes on device {device}: {self.cuda.text(code)}")
        elif unwanted:
            self.cuda.free(address)

    def _raise(self, kind: type, text: str) -> None:
        """Raises an error in this thread when it has left allocate and free; for a thread of PyTorch's own, in the main one."""
        error = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, text), "__module__": kind.__module__})
        here = get_ident()
        own = not any(t.ident == here and not isinstance(t, threading._DummyThread) for t in threading.enumerate())
        thread = threading.main_thread().ident if own else here

        def deliver() -> None:
            while self._inside.get(thread):
                time.sleep(1e-4)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), ctypes.py_object(error))

        threading.Thread(target=deliver, daemon=True).start()

    def _note(self, entry: Large) -> None:
        if len(self.large) < KEPT_LARGE:
            self.large.append(entry)
        name = f" {entry.label}" if entry.label else ""
        self._note_text(f"allocation {entry.number}:{name} {entry.bytes / 1e9:.2f} GB, {entry.allocated / 1e9:.2f} GB in all")

    def _note_text(self, text: str) -> None:
        if self.log is not None:
            print("managed:", text, file=self.log, flush=True)


_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


def callbacks(allocator: Allocator) -> Tuple[Any, Any]:
    """Returns the allocator's functions as C functions. They must stay as long as anything calls them."""
    return _ALLOCATE(allocator.allocate), _FREE(allocator.free)


def leave_at_exit() -> None:
    """Ends the process before destructors of C++ free tensors, by functions of an interpreter that is gone.

    It keeps the exit status and flushes C's files: glibc calls functions in the reverse order.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)


_current: Optional[Allocator] = None
_functions: Any = None


def enable(reserve: int = 512 << 20, oversubscribe: bool = False, prefetch_from: Optional[int] = 64 << 20, log_from: int = 100 << 20,
           force_device_alloc: bool = False, cuda: Any = None) -> Allocator:
    """Makes managed memory PyTorch's GPU memory, until the process ends. Call it before anything initialises CUDA.

    reserve: bytes of each card that are kept from tensors, for libraries (see room). oversubscribe: allow more than
    the card has. prefetch_from: allocations of this size are brought onto the card at once, while they fit (None: none).
    log_from: larger ones are printed to stderr, and listed in large(). force_device_alloc sets
    CUDA_MANAGED_FORCE_DEVICE_ALLOC=1: pages begin on the card, which cuBLAS needs on some drivers, and less can be oversubscribed.
    """
    global _current, _functions
    try:
        import torch
    except ImportError as err:
        raise ManagedError(f"PyTorch is not installed: {err}") from None
    if _current is not None:
        raise ManagedError("managed memory is enabled already")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise ManagedError(f"PyTorch {torch.__version__} has no torch._C._cuda_customAllocator: it is too old, or a build for CPUs")
    if torch.cuda.is_initialized():
        raise ManagedError("CUDA is initialised already: call managed.enable() first, also before torch.cuda.get_device_name()")
    if torch.cuda.device_count() == 0:
        raise ManagedError("PyTorch finds no GPU")
    if force_device_alloc:
        os.environ["CUDA_MANAGED_FORCE_DEVICE_ALLOC"] = "1"
    allocator = Allocator(CUDA() if cuda is None else cuda, reserve, oversubscribe, prefetch_from, log_from, sys.stderr)
    functions = callbacks(allocator)
    made = torch._C._cuda_customAllocator(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    torch._C._cuda_changeCurrentAllocator(made)
    leave_at_exit()
    _current, _functions = allocator, (functions, made)
    return allocator


def _enabled() -> Allocator:
    if _current is None:
        raise ManagedError("managed memory is not enabled: call managed.enable() first")
    return _current


def stats() -> Dict[str, Any]:
    """See Allocator.stats."""
    return _enabled().stats()


def reset_peak() -> None:
    """See Allocator.reset_peak."""
    _enabled().reset_peak()


def large() -> List[Large]:
    """The first thousand large allocations: see enable."""
    return list(_enabled().large)


def label(name: str) -> Any:
    """See Allocator.label."""
    return _enabled().label(name)


def room(device: int = 0) -> Any:
    """See Allocator.room."""
    return _enabled().room(device)


def _bytes_of(tensor: "torch.Tensor") -> Tuple[int, int]:
    if not tensor.is_contiguous():
        raise ManagedError("the tensor is not contiguous")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def prefetch(tensor: "torch.Tensor", device: Optional[int] = None) -> None:
    """Brings a tensor onto a device (the tensor's own; HOST is the CPU) ahead of its use, in the order of the current stream."""
    import torch

    allocator, (address, size) = _enabled(), _bytes_of(tensor)
    if size == 0:
        return
    allocator.range(address, size)
    own = tensor.get_device()
    code = allocator.cuda.prefetch(address, size, own if device is None else device, torch.cuda.current_stream(own).cuda_stream)
    if code != 0:
        raise ManagedError(f"cudaMemPrefetchAsync of {size} bytes: {allocator.cuda.text(code)}")


def advise(tensor: "torch.Tensor", advice: str, device: Optional[int] = None) -> None:
    """Tells the driver how a tensor is used (cudaMemAdvise): advice is a name of ADVICE."""
    allocator, (address, size) = _enabled(), _bytes_of(tensor)
    if advice not in ADVICE:
        raise ManagedError(f"advice {advice!r}: must be one of {', '.join(ADVICE)}")
    if size == 0:
        return
    allocator.range(address, size)
    code = allocator.cuda.advise(address, size, ADVICE[advice], tensor.get_device() if device is None else device)
    if code != 0:
        raise ManagedError(f"cudaMemAdvise of {size} bytes: {allocator.cuda.text(code)}")
