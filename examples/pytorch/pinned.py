"""Pinned memory for PyTorch that takes the bytes that were asked for, rounded up to a page.

PyTorch's own takes the next power of two: 8 GiB for 4 GiB and a byte.

    import pinned
    x = pinned.empty((1000, 3, 224, 224), torch.float32)
    y = pinned.pin(tensor)                   # a pinned copy
    with pinned.patch():                     # Tensor.pin_memory, DataLoader, torch.empty(pin_memory=True), DeepSpeed
        train()
    print(pinned.stats()["reserved_bytes.all.current"])

    model = pinned.Shared("model")           # memory that other processes have too, from the Go package hostmem/shm
    weights = model.tensor(torch.bfloat16)   # pinned, without a copy

    python3 pinned.py                        # the bytes that are kept, without and with the patch
    python3 pinned.py open model             # what is in shared memory

Memory is mapped (mmap), with huge pages where there are some, on the GPU's NUMA node; made resident by six
threads; and registered once (cudaHostRegister): PyTorch knows it as pinned, and copies it at link speed. It is
one registration whatever its size, because CUDA refuses a copy across the border of two.

A tensor that is freed leaves its memory in a cache of 1 GiB. PyTorch records no streams for memory that it has
not allocated, so this file does. Promised is: memory is used again, or unmapped, when each known stream has completed
what was queued on it when the tensor ended. Known are the default streams; those of torch.cuda.Stream and
torch.cuda.stream, also from before pinned was first used; those of torch.cuda.ExternalStream, while that object
lives; and those of record_stream. Streams that only C++ knows, and those of torch.Stream, need record_stream.

A child by fork cannot use the memory, which is not copied into it: a tensor of the parent must not be read there.
Tensors are not to be freed while a CUDA graph is captured. The file needs PyTorch 2 and CUDA; Python 3.9 on Linux.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import itertools
import mmap
import operator
import os
import stat
import struct
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

if TYPE_CHECKING:
    import torch

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
POPULATE_THREADS = 6  # eight are slower than six: the kernel's locks
POPULATE_PIECE = 32 << 20
NONE: List[Any] = []  # marks that nothing is waited for by
SEARCHED = 8  # cached blocks of a size, from the one that was freed first
MADV_DONTFORK, MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 10, 14, 22, 23
REGISTER_READ_ONLY = 8
MPOL_PREFERRED = 1
SYS_MBIND = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class PinnedError(RuntimeError):
    """Memory that cannot be mapped or registered, or that there is none of."""


class KnownStream:
    """A stream of PyTorch. query is the function in C: the one in Python takes twice as long."""

    __slots__ = ("query", "record_event")

    def __init__(self, kind: type, stream: Any) -> None:
        self.query, self.record_event = super(kind, stream).query, stream.record_event


class TorchRuntime:
    """What an Allocator needs of CUDA, by PyTorch. Tests have another one."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as err:
            raise PinnedError(f"PyTorch is not installed: {err}") from None
        if not torch.cuda.is_available():
            raise PinnedError("PyTorch finds no GPU (torch.cuda.is_available() is false)")
        torch.cuda.init()
        self._cuda = torch.cuda
        self._kind = torch.cuda.Stream
        self._has_context = torch._C._cuda_hasPrimaryContext
        self._cudart = torch.cuda.cudart()
        self._known: Dict[Tuple[int, int], KnownStream] = {}
        self._listed: List[Any] = []  # its values
        self._external: "weakref.WeakValueDictionary[Tuple[int, int], Any]" = weakref.WeakValueDictionary()
        self._unused = list(range(torch.cuda.device_count()))  # devices without a context: a query would make one
        made = self._kind.__new__

        @functools.wraps(made)
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            stream = made(cls, *args, **kwargs)
            self._know(stream)
            return stream

        self._kind.__new__ = new  # type: ignore[method-assign]
        for stream in [x for x in gc.get_objects() if issubclass(type(x), self._kind)]:
            self._know(stream)

    def _know(self, stream: Any) -> None:
        key = (stream.device_index, stream.cuda_stream)
        if isinstance(stream, self._cuda.ExternalStream):
            self._external[key] = stream  # its owner may destroy it after this object's end
        elif key not in self._known and (key[1] != 0 or key[0] not in self._unused):  # 0 is the default stream
            self._known[key] = KnownStream(self._kind, stream)
            self._listed = list(self._known.values())

    def _know_new_devices(self) -> None:
        for device in [d for d in self._unused if self._has_context(d)]:
            self._unused.remove(device)
            self._know(self._cuda.default_stream(device))
            self._know(self._cuda.current_stream(device))

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return int(self._cudart.cudaHostRegister(address, size, flags))

    def cudaHostUnregister(self, address: int) -> int:
        return int(self._cudart.cudaHostUnregister(address))

    def streams(self) -> List[Any]:
        """The streams that may read memory."""
        if self._unused:
            self._know_new_devices()
        return [*self._listed, *self._external.values()] if self._external else self._listed

    def numa_node(self) -> int:
        """The node of the current GPU, or -1."""
        p = self._cuda.get_device_properties(self._cuda.current_device())
        try:
            name = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
            with open(f"/sys/bus/pci/devices/{name}/numa_node") as f:
                return int(f.read())
        except (AttributeError, OSError, ValueError):
            return -1


class Block:
    """Memory that is mapped and registered.

    All that refers to a use of the memory (views, their slices, tensors) refers to its exporter, an array that
    export makes for each use. The block is used until that ends, which its __del__ tells the owner: a weak reference
    with a callback takes twice as long.
    """

    __slots__ = ("map", "address", "size", "export", "requested", "marks", "used", "number")

    def __init__(self, owner: "Allocator", mapped: mmap.mmap, address: int, size: int) -> None:
        self.map: Optional[mmap.mmap] = mapped
        self.address, self.size = address, size
        gone = functools.partial(owner._put_back, self)
        self.export: Any = type("Exporter", (ctypes.c_ubyte * size,), {"__slots__": (), "__del__": gone}).from_address
        self.requested = 0  # bytes; 0 if the block is not used
        self.number = 0  # of its last return, in the order of all returns
        self.marks: Optional[List[Any]] = []  # events that the memory's next use waits for; None: not recorded yet
        self.used: List[Any] = []  # streams of record_stream


class Count:
    """A number of torch.cuda.memory_stats."""

    __slots__ = ("current", "peak", "allocated")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = 0

    def add(self, n: int) -> None:
        self.allocated += n
        self.current += n
        if self.current > self.peak:
            self.peak = self.current

    def stats(self) -> Iterator[Tuple[str, int]]:
        """The parts by PyTorch's names."""
        yield from (("current", self.current), ("peak", self.peak), ("allocated", self.allocated), ("freed", self.allocated - self.current))


class Allocator:
    """Pinned memory with a cache of at most cache_bytes. Its methods may be called from any thread.

    A block is in one of these states; _lock guards all but the last, which may be entered inside of it:

        used       requested is set
        cached     _cache, by size: its marks may not be reached yet, or not be recorded
        returned   requested is set, and _returned: its exporter is gone

    _blocks, or _kept, refers to every block that is registered: it would be unmapped otherwise.
    """

    def __init__(self, runtime: Any = None, cache_bytes: int = 1 << 30) -> None:
        self._runtime = TorchRuntime() if runtime is None else runtime
        self._streams = self._runtime.streams
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._blocks: Dict[int, Block] = {}  # registered, by address
        self._registered = 0  # bytes of _blocks: those that are not allocated are cached
        self._returned: Deque[Block] = collections.deque()
        self._cache: Dict[int, Deque[Block]] = collections.defaultdict(collections.deque)  # the oldest is the first
        self._closed = ""  # why there is no memory any more: what is mapped stays so until the process ends
        self._counts = {name: Count() for name in ("allocation", "allocated_bytes", "requested_bytes", "segment", "reserved_bytes")}
        self._allocations, self._allocated, self._requested, self._segments, self._reserved = self._counts.values()
        self._failures = 0
        _allocators.append(self)

    def allocate(self, size: int) -> memoryview:
        """Returns pinned memory of size bytes, which is free when nothing refers to the view, or to a part of it, any more."""
        view = memoryview(self.export(size)).cast("B")
        return view if len(view) == size else view[:size]

    def export(self, size: int) -> Any:
        """Returns a buffer of whole pages, which is free when nothing refers to it any more."""
        if size <= 0:
            raise PinnedError(f"{size} bytes of pinned memory: must be positive")
        whole = (size + PAGE - 1) & -PAGE
        with self._lock:
            if self._closed:
                raise PinnedError(self._closed)
            if self._returned:
                self._take_back()
            blocks = self._cache.get(whole)
            if blocks:
                # A block that nothing waits for is mostly there: a call for each step would take longer than the step.
                block = blocks.popleft() if blocks[0].marks is NONE else self._reusable(blocks)
                if block is not None:
                    return self._begin(block, size)
        block = self._make(whole)
        with self._lock:
            self._blocks[block.address] = block
            self._registered += whole
            self._reserved.add(whole)
            self._segments.add(1)
            return self._begin(block, size)

    def _begin(self, block: Block, size: int) -> Any:
        allocations, allocated, requested = self._allocations, self._allocated, self._requested
        allocations.allocated += 1  # Count.add three times takes twice as long
        allocated.allocated += block.size
        requested.allocated += size
        allocations.current += 1
        allocated.current += block.size
        requested.current += size
        if allocations.current > allocations.peak:
            allocations.peak = allocations.current
        if allocated.current > allocated.peak:
            allocated.peak = allocated.current
        if requested.current > requested.peak:
            requested.peak = requested.current
        block.requested = size
        return block.export(block.address)

    def record_stream(self, address: int, stream: Any) -> None:
        """The memory is used again after what is queued on a stream when it is freed, though nobody else knows the stream."""
        with self._lock:
            block = self._blocks.get(address)
            if block is None or block.requested == 0:
                raise PinnedError("the tensor does not begin in memory of this allocator, or is freed")
            block.used.append(stream)

    def empty_cache(self) -> None:
        """Unregisters and unmaps what nobody uses. It waits for the streams that do."""
        with self._lock:
            self._take_back()
            self._evict(0)

    def stats(self) -> Dict[str, int]:
        """Counts, as torch.cuda.memory_stats has them; allocated bytes are whole pages, reserved ones include the cache."""
        with self._lock:
            self._take_back()
            found = {f"{name}.all.{part}": n for name, c in self._counts.items() for part, n in c.stats()}
            return {**found, "num_unregister_failures": self._failures}

    def reset_peak_stats(self) -> None:
        """Makes each peak the current count."""
        with self._lock:
            for count in self._counts.values():
                count.peak = count.current

    def _put_back(self, block: Block) -> None:
        """Is called at any time in any thread, also in one that holds the lock: then the next call takes the memory back."""
        if self._closed:
            return
        self._returned.append(block)
        while self._returned and self._lock.acquire(False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        allocations, allocated, requested = self._allocations, self._allocated, self._requested
        while self._returned:
            block = self._returned.popleft()
            block.marks = None
            size = block.size
            self._cache[size].append(block)
            allocations.current -= 1
            allocated.current -= size
            requested.current -= block.requested
            block.requested, block.number = 0, allocations.allocated - allocations.current
            self._mark(block)
        if self._registered - allocated.current > self._cache_bytes:
            self._evict(self._cache_bytes)

    def _mark(self, block: Block) -> bool:
        """Records what the memory's next use waits for. It returns False if CUDA refuses, as it does while a graph is captured."""
        try:
            marks = NONE
            for s in self._streams():
                if not s.query():
                    marks = [*marks, s.record_event()]
            if block.used:
                marks = [*marks, *(s.record_event() for s in block.used if not s.query())]
                block.used = []
        except RuntimeError:
            return False
        block.marks = marks
        return True

    def _reusable(self, blocks: Deque[Block]) -> Optional[Block]:
        """Takes a block from the cached ones of a size."""
        for block in itertools.islice(blocks, SEARCHED):
            if (block.marks is not None or self._mark(block)) and all(mark.query() for mark in block.marks or ()):
                blocks.remove(block)
                return block
        return None

    def _evict(self, limit: int) -> None:
        while self._registered - self._allocated.current > limit:
            oldest = [blocks[0] for blocks in self._cache.values() if blocks]
            if not oldest:
                return  # the rest is being allocated
            block = min(oldest, key=operator.attrgetter("number"))
            if block.marks is None and not self._mark(block):
                return  # it stays until CUDA says what is queued
            for mark in block.marks or ():
                mark.synchronize()
            block.marks = NONE
            code = self._runtime.cudaHostUnregister(block.address)
            if code != 0:  # the GPU may use it still: it stays mapped, and nobody gets it
                _kept.append(block)
            del self._blocks[block.address]
            blocks = self._cache[block.size]
            blocks.remove(block)
            if not blocks:
                del self._cache[block.size]
            self._registered -= block.size
            if code != 0:
                self._failures += 1
                continue
            block.map = None  # unmaps it: the type of its exporters refers to the block until a garbage collection
            self._reserved.current -= block.size
            self._segments.current -= 1

    def _make(self, size: int) -> Block:
        available = available_bytes()
        if size > available:
            self.empty_cache()
            available = available_bytes()
        if size > available:
            raise PinnedError(f"{size} bytes of pinned memory: the host, or the control group, has {available} left")
        try:
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as err:
            raise PinnedError(f"{size} bytes of memory cannot be mapped: {err}") from None
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        _libc.madvise(address, size, MADV_DONTFORK)
        if size >= HUGE:
            _libc.madvise(address, size, MADV_HUGEPAGE)
        _bind(address, size, self._runtime.numa_node())
        populate(address, size)
        code = self._runtime.cudaHostRegister(address, size, 0)
        if code != 0:
            raise PinnedError(f"cudaHostRegister refused {size} bytes: CUDA's error {code}")
        return Block(self, mapped, address, size)


_allocators: List[Allocator] = []  # for ever: the memory of one that is gone would be unmapped while it is registered
_kept: List[Any] = []  # never unmapped


def _after_fork() -> None:
    # The parent's memory is not mapped here, and something else may be at its addresses: it must not be unmapped.
    for allocator in _allocators:
        allocator._lock = threading.Lock()
        allocator._closed = "CUDA does not work in a child by fork: use spawn, or pin in the parent alone"
        _kept.append(allocator._blocks)


def _at_exit() -> None:
    for allocator in _allocators:
        allocator._closed = "the interpreter is ending"


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


def _bind(address: int, size: int, node: int) -> None:
    """Prefers a NUMA node for memory that is not resident yet. Where that is not possible it is anywhere."""
    number = SYS_MBIND.get(os.uname().machine)
    if 0 <= node < 64 and number is not None:
        mask = ctypes.c_ulong(1 << node)
        _libc.syscall(
            ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(MPOL_PREFERRED),
            ctypes.byref(mask), ctypes.c_ulong(65), ctypes.c_uint(0),
        )


def populate(address: int, size: int, advice: int = MADV_POPULATE_WRITE) -> None:
    """Makes memory resident. A kernel before 5.14 leaves it to the registration, which is slower."""
    pieces = range(0, size, POPULATE_PIECE)

    def one(off: int) -> None:
        _libc.madvise(address + off, min(POPULATE_PIECE, size - off), advice)  # without the interpreter's lock

    if len(pieces) == 1:
        one(0)
        return
    with concurrent.futures.ThreadPoolExecutor(min(POPULATE_THREADS, len(pieces))) as threads:
        list(threads.map(one, pieces))


def available_bytes() -> int:
    """The memory that the host and the control group of this process can spare."""
    available = 1 << 62
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as f:
        available = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/cgroup") as f:
        group = "/sys/fs/cgroup" + next(line.split("::", 1)[1].strip() for line in f if line.startswith("0::"))
        with open(group + "/memory.max") as limit, open(group + "/memory.current") as now, open(group + "/memory.stat") as stat:
            cache = sum(int(line.split()[1]) for line in stat if line.split()[0] in ("active_file", "inactive_file"))
            available = min(available, int(limit.read()) - int(now.read()) + cache)
    return available


class Shared:
    """Memory of the Go package hostmem/shm, by its name in /dev/shm or by a descriptor, registered and without a copy.

    It is mapped for reading, unless write is true: then the process that opened it has to order what it writes. The
    header's bytes are described in hostmem/shm/header.go. A lock (flock) tells the other processes that this one lives.
    """

    FIELDS = struct.Struct("<8sIIQQqIII")  # magic, version, flags, offset, size, created, process, user, checksum
    STATE = struct.Struct("<QqII8x200s")  # at 64: generation, time, writer, length of the label, label

    def __init__(self, name: str = "", fd: Optional[int] = None, write: bool = False, directory: str = "/dev/shm", runtime: Any = None) -> None:
        if (fd is None) == (name == "") or "/" in name:
            raise PinnedError("want either the name of a memory, without a slash, or a descriptor of one")
        self.path = f"/proc/self/fd/{fd}" if fd is not None else os.path.join(directory, name)
        self.write, self.size = write, 0
        self._address, self._exporter, self._registered = 0, None, False
        try:
            self._fd = os.open(self.path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_NOFOLLOW | os.O_NONBLOCK if fd is None else 0))
        except OSError as err:
            raise PinnedError(f"shared memory {self.path}: {err.strerror}") from None
        try:
            self._open(fd is None)
            self._runtime = runtime if runtime is not None else TorchRuntime()
            populate(self._address, self.size, MADV_POPULATE_WRITE if write else MADV_POPULATE_READ)
            code = self._runtime.cudaHostRegister(self._address, self.size, 0 if write else REGISTER_READ_ONLY)
            if code != 0:
                raise PinnedError(f"cudaHostRegister refused the {self.size} bytes of {self.path}: CUDA's error {code}")
            self._registered = True
        except BaseException:
            self.close()
            raise

    def _open(self, named: bool) -> None:
        info, header = os.fstat(self._fd), os.pread(self._fd, 512, 0)
        if not stat.S_ISREG(info.st_mode) or len(header) < 512:
            raise PinnedError(f"{self.path} is not shared memory of hostmem/shm")
        magic, version, self._flags, self._offset, size, _, _, _, checksum = self.FIELDS.unpack_from(header)
        whole = self._offset + (size + self._offset - 1) // max(self._offset, 1) * self._offset
        if magic != b"pinnedSM" or version != 1 or checksum != crc32c(header[:48]) or size == 0 or self._offset < PAGE or whole != info.st_size:
            raise PinnedError(f"{self.path} is not shared memory of hostmem/shm, or is damaged")
        if named and info.st_uid not in (0, os.geteuid()):
            raise PinnedError(f"{self.path} belongs to user {info.st_uid}")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise PinnedError(f"{self.path} is being removed") from None
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self.write else 0)
        base = _libc.mmap(None, size, access, mmap.MAP_SHARED, self._fd, self._offset)
        if base in (None, ctypes.c_void_p(-1).value):
            raise PinnedError(f"{self.path}: {size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self._address, self.size = base, size

    def content(self) -> Tuple[int, bool, str]:
        """Returns the generation of the content, whether it is complete, and its label. It may change at any time."""
        while True:
            state = os.pread(self._fd, self.STATE.size, 64)
            generation, _, _, length, label = self.STATE.unpack(state)
            if os.pread(self._fd, 8, 64) == state[:8]:
                complete = generation > 0 and generation % 2 == 0
                return generation, complete, label[:length].decode(errors="replace") if complete else ""

    def tensor(self, dtype: Optional["torch.dtype"] = None) -> "torch.Tensor":
        """Returns the memory as a tensor of one dimension, of as many elements as fit. It must not be written unless write is true."""
        import torch

        if not self._registered:
            raise PinnedError(f"{self.path} is closed")
        dtype = torch.uint8 if dtype is None else dtype
        exporter = None if self._exporter is None else self._exporter()
        if exporter is None:
            exporter = (ctypes.c_ubyte * self.size).from_address(self._address)
            self._exporter = weakref.ref(exporter)
        return torch.frombuffer(exporter, dtype=dtype, count=self.size // torch.empty(0, dtype=dtype).element_size())

    def close(self) -> None:
        """Unregisters and unmaps the memory; no tensor of it may be left. The last process to close it removes its name."""
        if self._exporter is not None and self._exporter() is not None:
            raise PinnedError(f"a tensor uses {self.path} still")
        if self._registered:
            code = self._runtime.cudaHostUnregister(self._address)
            if code != 0:
                raise PinnedError(f"cudaHostUnregister refused {self.path}, which stays mapped: CUDA's error {code}")
            self._registered = False
        if self._address:
            _libc.munmap(self._address, self.size)
            self._address = 0
            self._remove_if_last()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _remove_if_last(self) -> None:
        with contextlib.suppress(OSError):  # another process has it, or has removed it
            path = os.readlink(f"/proc/self/fd/{self._fd}")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._flags & 1 and os.path.samestat(os.lstat(path), os.fstat(self._fd)):
                os.unlink(path)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


_default: Optional[Allocator] = None
_default_lock = threading.Lock()
_item_bytes: Dict[Any, int] = {}  # by dtype
_frombuffer: Any = None  # PyTorch's, once a dtype is known: an import for each tensor takes long


def allocator() -> Allocator:
    """The allocator of this module's functions, which is made at the first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Allocator()
    return _default


def empty(shape: Any, dtype: Optional["torch.dtype"] = None) -> "torch.Tensor":
    """Returns a pinned tensor whose values are undefined. A tensor without elements takes no memory, and is not pinned."""
    global _frombuffer
    if dtype not in _item_bytes:
        import torch

        dtype = torch.get_default_dtype() if dtype is None else dtype
        _item_bytes[dtype], _frombuffer = torch.empty(0, dtype=dtype).element_size(), torch.frombuffer
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for n in shape:
        if n < 0:
            raise PinnedError(f"a tensor of shape {shape}: no dimension may be negative")
        count *= n
    if count == 0:
        import torch

        return torch.empty(shape, dtype=dtype)
    flat = _frombuffer((_default or allocator()).export(count * _item_bytes[dtype]), dtype=dtype, count=count)
    return flat if len(shape) == 1 else flat.view(shape)


def zeros_like(tensor: "torch.Tensor") -> "torch.Tensor":
    """Returns a pinned tensor of zeros with the shape and type of another."""
    return empty(tensor.shape, tensor.dtype).zero_()


def pin(tensor: "torch.Tensor") -> "torch.Tensor":
    """Returns a pinned copy with the strides that torch.empty_like would give it, or the tensor if it is pinned already."""
    import torch

    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise PinnedError(f"a tensor of layout {tensor.layout} on {tensor.device}: only dense tensors of the CPU can be pinned")
    if tensor.numel() == 0 or tensor.is_pinned():
        return tensor
    out = empty(tensor.numel(), tensor.dtype).as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
    with torch.no_grad():
        out.copy_(tensor)
    return out


def record_stream(tensor: "torch.Tensor", stream: Any) -> None:
    """Tells of a stream of another library that reads the tensor: see Allocator.record_stream."""
    allocator().record_stream(tensor.untyped_storage().data_ptr(), stream)


def stats() -> Dict[str, int]:
    """Counts of pinned memory: see Allocator.stats."""
    return allocator().stats()


def reset_peak_stats() -> None:
    """Makes each peak the current count."""
    allocator().reset_peak_stats()


def empty_cache() -> None:
    """Unregisters and unmaps what no tensor uses."""
    allocator().empty_cache()


FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn", "arange", "tensor", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")


@contextlib.contextmanager
def patch() -> Iterator[None]:
    """Replaces PyTorch's pinned memory by this one, in the whole process, until the end of the block.

    Tensor.pin_memory, by which DataLoader and DeepSpeed pin; pin_memory=True of torch.empty and of the
    other functions that make tensors; and pin_memory of DeepSpeed's accelerator, where DeepSpeed is installed.
    Tensors that were pinned meanwhile stay pinned.
    """
    import torch

    def pin_memory(self: "torch.Tensor", device: Any = None) -> "torch.Tensor":
        return pin(self)

    replaced: List[Tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def factory(made: Any) -> Any:
        @functools.wraps(made)
        def new(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            tensor = made(*args, **kwargs)
            if not pin_memory:
                return tensor
            return pin(tensor).requires_grad_(tensor.requires_grad)

        return new

    def empty_factory(made: Any) -> Any:
        other = factory(made)

        @functools.wraps(made)
        def new(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            plain = set(kwargs) <= {"dtype", "device", "requires_grad"} and str(kwargs.get("device") or "cpu") == "cpu"
            if not pin_memory or not plain:
                return other(*size, pin_memory=pin_memory, **kwargs)
            shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            return empty(shape, kwargs.get("dtype")).requires_grad_(kwargs.get("requires_grad", False))

        return new

    try:
        replace(torch.Tensor, "pin_memory", pin_memory)
        for name in FACTORIES:
            made = getattr(torch, name)
            replace(torch, name, empty_factory(made) if name == "empty" else factory(made))
        accelerator = deepspeed_accelerator()
        if accelerator is not None:
            replace(accelerator, "pin_memory", lambda self, tensor, align_bytes=1: pin(tensor))
        yield
    finally:
        for owner, name, old in reversed(replaced):
            setattr(owner, name, old)


def deepspeed_accelerator() -> Any:
    """DeepSpeed's CUDA_Accelerator, or None."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    try:
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    except Exception as err:  # it imports much
        print(f"pinned: DeepSpeed is installed and cannot be imported: {err}", file=sys.stderr)
        return None
    return CUDA_Accelerator


def resident(address: int, size: int) -> int:
    """The resident bytes of the mappings that hold memory."""
    total, inside = 0, False
    with open("/proc/self/smaps") as f:
        for line in f:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                low, high = (int(x, 16) for x in words[0].split("-"))
                inside = low < address + size and high > address
            elif inside and words[0] == "Rss:":
                total += int(words[1]) * 1024
    return total


def demonstrate(sizes: Iterable[int]) -> None:
    """Prints the bytes that each way keeps of what was asked, without and with the patch."""
    import torch

    def line(what: str, size: int, make: Any) -> None:
        began = time.perf_counter()
        tensor = make()
        took = time.perf_counter() - began
        tensor.fill_(1)
        print(f"{what:48} asked {size:>13,}  kept {resident(tensor.data_ptr(), size):>13,}  {size / took / 1e9:5.1f} GB/s  pinned {tensor.is_pinned()}")
        del tensor
        empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # the next line's memory is made anew

    accelerator = deepspeed_accelerator()
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}; DeepSpeed: {'installed' if accelerator else 'not installed, its rows are missing'}")
    for size in sizes:
        plain = torch.ones(size, dtype=torch.uint8)
        for name, context in (("", contextlib.nullcontext()), (", pinned.patch()", patch())):
            with context:
                line(f"torch.empty(pin_memory=True){name}", size, lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True))
                line(f"Tensor.pin_memory(){name}", size, plain.pin_memory)
                if accelerator is not None:
                    line(f"DeepSpeed's pin_memory{name}", size, lambda: accelerator().pin_memory(plain))


def main(arguments: Optional[List[str]] = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["open"]:
            for name in arguments[1:]:
                shared = Shared(name)
                tensor = shared.tensor()
                print(f"{shared.path}: {shared.size} bytes, pinned {tensor.is_pinned()}, generation, complete, label: {shared.content()}")
                del tensor
                shared.close()
            return 0
        sizes = [int(a) for a in arguments] or [(1 << 30) + 1, (4 << 30) + 1]
        allocator()
        demonstrate(sizes)
    except PinnedError as err:
        print(f"pinned.py: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
