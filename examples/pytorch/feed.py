"""Batches for PyTorch from a feeder in Go, in memory that both map.

    go run ./examples/feed -listen @feed -consumers 2 &
    torchrun --nproc-per-node 2 examples/pytorch/feed.py @feed --device cuda

In a program of your own:

    with feed.Feed("@feed", rank, world, device="cuda") as source:
        for epoch in range(source.epochs):
            for batch in source:
                x, index = batch.tensors             # on the GPU
                ...
        position = batch.position                    # Feed(start=position) goes on after this batch

Batches that have arrived together are copied together, on a stream of the Feed's own, while the loop computes with
those before: a copy and two tensors for each batch would take PyTorch longer than the link. The tensors are the
program's. Those of batches that were copied together share memory: one that is kept keeps up to 31 others.

Without a device a batch is tensors on the shared memory, without a copy. It is the loop body's for one turn, or
until ``release`` after ``batch.retain()``. Then the feeder writes the memory again, and a tensor that
is still there shows other samples. Copies to a GPU that are queued on the current stream, or on those of
``batch.use(stream)``, end first: the release is sent when the streams have reached the turn's end, and together with
others if turns are short.

A feeder that dies or refuses is a FeedError, and so is all that is not the protocol, which
examples/feed/main.go describes. A consumer that ends without ``close`` is an error of the feeder. Memory,
descriptor and socket disappear with their processes.

The file needs PyTorch for a device, ``tensors``, ``pin`` and ``use`` alone, and Python 3.9 on Linux.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import fcntl
import itertools
import json
import math
import mmap
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

PROTOCOL = 2
MAX_MESSAGE = 64 << 10
KIND_BATCH, KIND_RELEASE, KIND_BYE, KIND_ERROR = 1, 2, 3, 4
SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK, F_SEAL_GROW
F_GET_SEALS = 1034
HEADER = struct.Struct("<IIQQQIHH")
RELEASE = struct.Struct("<II")
MAX_TOGETHER = 32  # releases of one message
HOLD = 2e-4  # seconds that a release waits for others at most, while batches come
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}


class FeedError(RuntimeError):
    """The feeder refused, failed or died, or did not keep to the protocol."""


class Field(NamedTuple):
    """One tensor of a batch: samples of this type and shape, back to back."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    bytes: int  # of a sample


class Welcome(NamedTuple):
    """The feeder's answer, checked."""

    ring: int
    batch_size: int
    samples: int
    epochs: int
    fields: Tuple[Field, ...]


class Delivery(NamedTuple):
    """The message about a batch, checked against the ring and the fields."""

    samples: int
    serial: int
    epoch: int
    number: int
    last: bool
    offsets: Tuple[int, ...]
    position: bytes


def _natural(value: Any, name: str, low: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise FeedError(f"the feeder's {name} is {value!r}")
    return value


def _parsed(message: bytes, what: str) -> Any:
    try:
        return json.loads(message)
    except (ValueError, RecursionError) as err:
        raise FeedError(f"the feeder's {what} is no JSON: {err}") from None


def parse_welcome(message: bytes) -> Welcome:
    """Returns the welcome in a message. Its ring is checked against the descriptor by Feed."""
    w = _parsed(message, "welcome")
    if not isinstance(w, dict) or not isinstance(w.get("protocol"), int):
        raise FeedError("the feeder's welcome has no protocol")
    if w["protocol"] != PROTOCOL:
        raise FeedError(f"the feeder has version {w['protocol']} of the protocol, and this file {PROTOCOL}: use files of one version")
    if w.get("error"):
        raise FeedError(f"the feeder refused: {w['error']}")
    listed = w.get("fields")
    if not isinstance(listed, list) or not listed:
        raise FeedError("the feeder's welcome has no fields")
    fields = []
    for f in listed:
        if not isinstance(f, dict) or not isinstance(f.get("dtype"), str) or f["dtype"] not in ITEM_BYTES or not isinstance(f.get("shape"), list):
            raise FeedError(f"the feeder has a field that this file does not know: {f!r}")
        shape = tuple(_natural(n, "shape") for n in f["shape"])
        size = math.prod(shape) * ITEM_BYTES[f["dtype"]]
        if _natural(f.get("bytes"), "bytes of a field") != size:
            raise FeedError(f"field {f.get('name')!r} has {f['bytes']} bytes, and its type and shape {size}")
        fields.append(Field(str(f.get("name")), f["dtype"], shape, size))
    numbers = [_natural(w.get(name), name) for name in ("ring", "batch_size", "samples", "epochs")]
    return Welcome(*numbers, fields=tuple(fields))


def parse_batches(packet: Any, welcome: Welcome) -> List[Delivery]:
    """Returns the batches in a packet, all of whose bytes are in the ring."""
    n, found, at = len(welcome.fields), [], 0
    begins = HEADER.size + 8 * n
    sizes = [f.bytes for f in welcome.fields]
    while at < len(packet):
        left = len(packet) - at
        if left < begins:
            raise FeedError(f"a message about a batch has {left} bytes: at least {begins}")
        kind, length, serial, epoch, number, samples, fields, last = HEADER.unpack_from(packet, at)
        if kind != KIND_BATCH or not begins <= length <= left:
            raise FeedError(f"a message about a batch has {length} bytes and kind {kind}, in a packet with {left}: at least {begins}")
        if fields != n or last > 1 or samples > welcome.batch_size:
            raise FeedError(f"a batch of {samples} samples with {fields} fields: at most {welcome.batch_size}, and {n}")
        offsets = struct.unpack_from(f"<{n}Q", packet, at + HEADER.size)
        for i, off in enumerate(offsets):
            if off % 256 or off + samples * sizes[i] > welcome.ring:
                raise FeedError(f"field {welcome.fields[i].name!r} of a batch is at {off}, outside of the ring of {welcome.ring} bytes, or not aligned")
        found.append(Delivery(samples, serial, epoch, number, last == 1, offsets, bytes(packet[at + begins : at + length])))
        at += length
    return found


class Batch:
    """Samples in the shared memory. ``views`` and ``tensors`` are valid until the release."""

    __slots__ = ("_feed", "_delivery", "_views", "_streams", "_retained", "_released", "__weakref__")

    def __init__(self, feed: "Feed", delivery: Delivery) -> None:
        self._feed = feed
        self._delivery = delivery
        self._views: Optional[List[memoryview]] = None
        self._streams: List[Any] = []
        self._retained = self._released = False

    def __len__(self) -> int:
        """The number of samples: batch_size, or fewer at the end of an epoch."""
        return self._delivery.samples

    @property
    def epoch(self) -> int:
        return self._delivery.epoch

    @property
    def number(self) -> int:
        """The number of the batch in its epoch."""
        return self._delivery.number

    @property
    def position(self) -> Dict[str, Any]:
        """The place after this batch, for Feed(start=…): that of loader.Position."""
        return _parsed(self._delivery.position, "position")

    @property
    def views(self) -> List[memoryview]:
        """The bytes of each field. After the release they raise ValueError."""
        self._usable()
        if self._views is None:
            whole = memoryview(self._feed._map)
            d = self._delivery
            self._views = [whole[off : off + d.samples * f.bytes] for f, off in zip(self._feed.fields, d.offsets)]
        return self._views

    @property
    def tensors(self) -> List[Any]:
        """Each field as a tensor (torch.frombuffer), without a copy. After the release it shows other samples."""
        self._usable()
        return self._feed._tensors(self._delivery)

    def use(self, stream: Any) -> None:
        """The release waits for the work that is queued on the stream until then, as it does for the current stream."""
        self._usable()
        self._streams.append(stream)

    def retain(self) -> None:
        """Keeps the batch beyond the loop's turn, until release. The feeder has memory for one batch less."""
        self._usable()
        self._retained = True

    def release(self) -> None:
        """Ends the use of the batch, when the streams have ended theirs. A second release is an error."""
        self._usable()
        self._end(True)

    def _usable(self) -> None:
        if self._released:
            raise FeedError(f"batch {self.number} of epoch {self.epoch} is released already")

    def _end(self, now: bool) -> None:
        self._released = True
        for view in self._views or ():
            try:
                view.release()
            except BufferError:  # something else looks at it still
                pass
        self._views = None
        self._feed._release(self._delivery.serial, self._streams, now)


class DeviceBatch:
    """Samples on a GPU. ``tensors`` has each field, for work on the stream that was current when the loop got the batch."""

    __slots__ = ("_delivery", "tensors")

    def __init__(self, delivery: Delivery, tensors: Tuple[Any, ...]) -> None:
        self._delivery, self.tensors = delivery, tensors

    def __len__(self) -> int:
        """The number of samples: batch_size, or fewer at the end of an epoch."""
        return self._delivery.samples

    @property
    def epoch(self) -> int:
        return self._delivery.epoch

    @property
    def number(self) -> int:
        """The number of the batch in its epoch."""
        return self._delivery.number

    @property
    def position(self) -> Dict[str, Any]:
        """The place after this batch, for Feed(start=…): that of loader.Position."""
        return _parsed(self._delivery.position, "position")


def run_length(arrived: Sequence[Delivery], most: int, farthest: int) -> int:
    """Returns how many of the batches that have arrived one copy can have: of one length and epoch, and at one distance
    of at most farthest bytes, because what is between them is copied, too."""
    first, n, distance = arrived[0], 0, 0
    offsets = first.offsets
    for n, delivery in enumerate(itertools.islice(arrived, most)):
        if n == 1:
            distance = delivery.offsets[0] - offsets[0]
        if n > 0:
            offsets = tuple([off + distance for off in offsets])
            if not 0 < distance <= farthest or delivery.offsets != offsets or delivery.samples != first.samples:
                return n
        if delivery.last:
            break
    return n + 1


class Run:
    """Batches of one copy."""

    __slots__ = ("memory", "copied", "used")

    def __init__(self, memory: Any, copied: Any) -> None:
        self.memory, self.copied = memory, copied
        self.used: Set[int] = set()  # handles of the streams that wait for the copy


class DeviceCopies:
    """Copies batches to a GPU, in runs, one run before the loop needs it."""

    def __init__(self, feed: "Feed", device: Any) -> None:
        try:
            import torch
        except ImportError as err:
            raise FeedError(f"PyTorch is not installed: {err}") from None
        chosen = torch.device(device)
        if chosen.type != "cuda":
            raise FeedError(f"device {device}: must be one of CUDA")
        if not torch.cuda.is_available():
            raise FeedError("PyTorch finds no GPU (torch.cuda.is_available() is false)")
        torch.cuda.init()
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        self._torch, self._feed, self._device = torch, feed, torch.device("cuda", index)
        if feed._welcome.ring % 256:
            raise FeedError(f"the ring has {feed._welcome.ring} bytes: a device needs a multiple of 256")
        with torch.cuda.device(index):
            feed.pin()
        self._stream = torch.cuda.Stream(self._device)
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # an object of a stream takes longer than its handle
        self._handle = (lambda: raw(index)) if raw is not None else lambda: torch.cuda.current_stream(index).cuda_stream
        self._ring = torch.frombuffer(feed._map, dtype=torch.uint8)
        self._types = [getattr(torch, f.dtype) for f in feed.fields]
        self._batches: Deque[Tuple[Delivery, Tuple[Any, ...], Run]] = collections.deque()
        self._newest: Optional[Run] = None
        self._layouts: Dict[Tuple[int, ...], List[Tuple[Any, ...]]] = {}  # as few as there are lengths of runs

    def next(self) -> Tuple[Delivery, DeviceBatch]:
        feed, batches = self._feed, self._batches
        if not batches:  # after an error of the feeder there may be some
            feed._usable()
            if not feed._arrived:
                feed._fetch()
            self._take_all()
            self._copy()
        delivery, tensors, run = batches.popleft()
        handle = self._handle()
        if handle not in run.used:
            run.used.add(handle)
            stream = self._torch.cuda.current_stream(self._device)
            stream.wait_event(run.copied)
            run.memory.record_stream(stream)
            if run is self._newest:
                self._copy_ahead()
        return delivery, DeviceBatch(delivery, tensors)

    def _copy_ahead(self) -> None:
        """Copies the next run, if some of it is there."""
        self._take_all()
        if self._feed._arrived:
            self._copy()
        else:
            self._feed._flush()

    def _take_all(self) -> None:
        """Takes what has arrived, up to a run. A message may have one batch, and a run costs as much as one batch."""
        feed = self._feed
        with contextlib.suppress(FeedError):  # it is that of the batch after those that are there
            while feed._failed is None and len(feed._arrived) < feed._together and feed._readable.poll(0):
                feed._take_packet()

    def _copy(self) -> None:
        feed, torch = self._feed, self._torch
        n = run_length(feed._arrived, feed._together, 2 * feed._batch_bytes)
        run = [feed._arrived.popleft() for _ in range(n)]
        first, samples = run[0], run[0].samples
        begin = min(first.offsets)
        end = max(off + samples * f.bytes for f, off in zip(feed.fields, run[-1].offsets))
        end = min(begin + -(-(end - begin) // 256) * 256, len(self._ring))  # whole elements of all types
        distance = run[1].offsets[0] - first.offsets[0] if n > 1 else 0
        layout = (n, samples, distance, *[off - begin for off in first.offsets])
        views = self._layouts.get(layout)
        if views is None:
            views = self._layouts[layout] = self._views(*layout)
        with torch.cuda.stream(self._stream):
            memory = self._ring[begin:end].to(self._device, non_blocking=True)
            copied = self._stream.record_event()
        columns = [memory.view(dtype).as_strided(*view).unbind(0) for dtype, view in zip(self._types, views)]
        self._newest = Run(memory, copied)
        self._batches.extend((delivery, tensors, self._newest) for delivery, tensors in zip(run, zip(*columns)))
        with feed._lock:
            feed._queued.append(([delivery.serial for delivery in run], [copied]))
        feed._flush()

    def _views(self, n: int, samples: int, distance: int, *offsets: int) -> List[Tuple[Any, ...]]:
        """Returns the shape, the strides and the offset of each field in a run's memory, in elements."""
        views = []
        for f, off in zip(self._feed.fields, offsets):
            item, strides = ITEM_BYTES[f.dtype], [1]
            for length in reversed(f.shape):
                strides.insert(0, strides[0] * length)
            views.append(((n, samples, *f.shape), (distance // item, *strides), off // item))
        return views

    def synchronize(self) -> None:
        """Waits for the copies that are queued."""
        self._stream.synchronize()

    def clear(self) -> None:
        self._batches.clear()
        self._newest = None


class Feed:
    """The consumer's side of a feeder, for one shard of its data.

    address: "@name" or the path of a socket file. rank, world: the shard, from 0, of how many.
    start: the position of the last batch that was used, to go on after it. timeout: seconds until a
    batch that does not come is an error; None waits. device: a GPU of PyTorch ("cuda:1", or "cuda" for the current one)
    that the batches are copied to, which are DeviceBatches then. Iterating gives the batches of an epoch, or of what a loop
    that was left has left of it; the next loop begins the next one. A Feed is for one process and, but for
    Batch.release, for one thread at a time.
    """

    def __init__(
        self, address: str, rank: int = 0, world: int = 1, start: Optional[Dict[str, Any]] = None, timeout: Optional[float] = None,
        device: Any = None,
    ) -> None:
        self._pid = os.getpid()
        self._timeout = timeout
        self._lock = threading.Lock()  # of _ended_batches, _used and _queued, and of registering and closing
        self._ended_batches: List[int] = []  # serials of batches that wait for others, to be released together
        self._used: List[Any] = []  # streams that use them
        self._last_used: Any = None  # the one that was current at the end of the last of them
        self._sent = 0.0  # the time of the last release
        self._queued: Deque[Tuple[List[int], List[Any]]] = collections.deque()  # releases, and the events that they wait for
        self._arrived: Deque[Delivery] = collections.deque()
        self._buffer = memoryview(bytearray(MAX_MESSAGE))
        self._current_stream: Any = None  # a function, once the ring is registered
        self._cache: Dict[Tuple[int, ...], List[Any]] = {}
        self._events: List[Any] = []
        self._unpin: Optional[weakref.finalize] = None
        self._copies: Optional[DeviceCopies] = None
        self._serial = 0
        self._failed: Optional[str] = None
        self._turn: Optional[Batch] = None
        self._ended = 0  # epochs
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._welcome, self._map = self._open(address, rank, world, start)
        except BaseException:
            self._socket.close()
            raise
        self._batch_bytes = sum(-(-f.bytes * self._welcome.batch_size // 256) * 256 for f in self._welcome.fields)
        self._together = max(1, min(MAX_TOGETHER, self._welcome.ring // self._batch_bytes // 8))
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        _opened.add(self)
        if device is not None:
            try:
                self._copies = DeviceCopies(self, device)
            except BaseException:
                self._abandon()
                raise

    @property
    def fields(self) -> Tuple[Field, ...]:
        return self._welcome.fields

    @property
    def samples(self) -> int:
        """The number of samples of an epoch of the shard."""
        return self._welcome.samples

    @property
    def epochs(self) -> int:
        return self._welcome.epochs

    def __iter__(self) -> Iterator[Any]:
        if self._ended >= self.epochs:
            return
        while True:
            batch: Any
            if self._copies is not None:
                delivery, batch = self._copies.next()
            else:
                delivery = self._next()
                self._turn = batch = Batch(self, delivery)
            self._ended = delivery.epoch
            goes_on = False
            try:
                yield batch
                goes_on = not delivery.last
            finally:
                if delivery.last:  # also after a break
                    self._ended = delivery.epoch + 1
                self._end_turn(not goes_on)
            if delivery.last:
                return

    def pin(self) -> None:
        """Registers the ring with CUDA (cudaHostRegister), so that copies from it are asynchronous and at link speed.

        CUDA must be initialised, on the device that is to be used. A refusal is a FeedError, and
        the batches stay usable.
        """
        import torch

        self._usable()
        runtime = torch.cuda.cudart()
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        with self._lock:
            if self._unpin is not None:
                return
            code = int(runtime.cudaHostRegister(address, self._welcome.ring, 0))
            if code != 0:
                raise FeedError(f"cudaHostRegister refused {self._welcome.ring} bytes of the ring: CUDA's error {code}")
            self._current_stream = _current_stream(torch)
            # The map is an argument, so that it is unmapped after it is unregistered.
            self._unpin = weakref.finalize(self, _unregister, self._map, address, self._pid, torch.cuda.current_device())

    def close(self) -> None:
        """Says that no other batch is needed, and gives back the memory. Tensors that are left keep it mapped."""
        with self._lock:
            if self._socket.fileno() < 0:
                return
            if os.getpid() == self._pid:
                try:
                    self._socket.send(struct.pack("<I", KIND_BYE))
                except OSError:  # the feeder is gone
                    pass
            self._socket.close()
            self._forget()
        if self._unpin is not None:
            self._unpin()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None or issubclass(kind, GeneratorExit):
            self.close()
        else:  # the feeder is to learn that this process did not end well
            self._abandon()

    def _abandon(self) -> None:
        """Ends without bye."""
        with self._lock:
            self._socket.close()
            self._forget()
        if self._unpin is not None:
            self._unpin()

    def _forget(self) -> None:
        self._queued.clear()
        self._ended_batches.clear()
        self._used.clear()
        self._cache.clear()
        if self._copies is not None:
            self._copies.clear()
            self._copies = None  # it refers to this

    def _usable(self) -> None:
        if os.getpid() != self._pid:
            raise FeedError("the feed was opened by another process: each process opens its own")
        if self._failed is not None:
            raise FeedError(self._failed)
        if self._socket.fileno() < 0:
            raise FeedError("the feed is closed")

    def _fail(self, reason: str) -> FeedError:
        self._failed = reason
        return FeedError(reason)

    def _open(self, address: str, rank: int, world: int, start: Optional[Dict[str, Any]]) -> Tuple[Welcome, mmap.mmap]:
        s = self._socket
        s.settimeout(self._timeout)
        try:
            s.connect("\0" + address[1:] if address.startswith("@") else address)
            if address.startswith("@"):  # anybody may listen on such a name
                uid = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if uid not in (0, os.getuid()):
                    raise FeedError(f"the feeder at {address} is a process of user {uid}: not of this one, nor of root")
            s.send(json.dumps({"protocol": PROTOCOL, "rank": rank, "world": world, "start": start or {}}).encode())
            message, fds = self._receive_rights()
        except OSError as err:
            raise FeedError(f"no feeder at {address}: {err}") from err
        try:
            if not message:
                raise FeedError(f"the feeder at {address} ended without a welcome")
            welcome = parse_welcome(message)
            if len(fds) != 1:
                raise FeedError(f"the feeder's welcome has {len(fds)} descriptors, not 1")
            if os.fstat(fds[0]).st_size != welcome.ring:
                raise FeedError(f"the ring has {os.fstat(fds[0]).st_size} bytes, and should have {welcome.ring}")
            try:
                sealed = fcntl.fcntl(fds[0], F_GET_SEALS)
            except OSError:  # no memfd
                sealed = 0
            if sealed & SEALS != SEALS:
                raise FeedError("the ring is not sealed: the feeder could take it away")
            try:
                return welcome, mmap.mmap(fds[0], welcome.ring, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except (OSError, ValueError) as err:
                raise FeedError(f"the ring of {welcome.ring} bytes cannot be mapped: {err}") from err
        finally:
            for fd in fds:
                os.close(fd)

    def _receive_rights(self) -> Tuple[bytes, List[int]]:
        room = socket.CMSG_SPACE(4 * 4)
        message, ancillary, flags, _ = self._socket.recvmsg(MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
        fds: List[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for fd in fds:
                os.close(fd)
            raise FeedError(f"the feeder's welcome is longer than {MAX_MESSAGE} bytes")
        return message, fds

    def _receive(self) -> memoryview:
        # A feeder that closed before it read this side's messages is an error before its own last message.
        for _ in range(2):
            try:
                n, _, flags, _ = self._socket.recvmsg_into([self._buffer])
            except ConnectionResetError:
                continue
            if flags & socket.MSG_TRUNC:
                raise self._fail(f"a message of the feeder is longer than {MAX_MESSAGE} bytes")
            return self._buffer[:n]
        return self._buffer[:0]

    def _next(self) -> Delivery:
        """Returns the next batch. While it waits, it releases what streams are done with."""
        self._usable()
        if not self._arrived:
            self._fetch()
        elif self._queued:
            self._flush()
        return self._arrived.popleft()

    def _fetch(self) -> None:
        """Receives batches."""
        while True:
            with self._lock:
                self._close_group()  # the feeder may be waiting for it
            waiting = self._flush()
            if waiting is None or self._readable.poll(0):
                break
            waiting.synchronize()  # the feeder may be waiting for this one
        self._take_packet()

    def _take_packet(self) -> None:
        try:
            packet = self._receive()
        except socket.timeout:
            raise FeedError(f"no batch in {self._timeout} s: the source is slow, or all batches are retained") from None
        kind = struct.unpack_from("<I", packet)[0] if len(packet) >= 4 else 0
        if not packet:
            raise self._fail("the feeder has ended, without a word")
        if kind == KIND_ERROR:
            raise self._fail(f"the feeder failed: {bytes(packet[4:]).decode(errors='replace')}")
        if kind != KIND_BATCH:
            raise self._fail(f"a message of the feeder of {len(packet)} bytes is of unknown kind {kind}")
        try:
            deliveries = parse_batches(packet, self._welcome)
        except FeedError as err:
            raise self._fail(str(err)) from None
        for delivery in deliveries:
            if delivery.serial != self._serial:
                raise self._fail(f"batch {delivery.serial} came instead of batch {self._serial}")
            self._serial += 1
        self._arrived.extend(deliveries)

    def _end_turn(self, now: bool) -> None:
        batch, self._turn = self._turn, None
        if batch is not None and not batch._retained and not batch._released and self._socket.fileno() >= 0:
            batch._end(now)
        elif now and self._socket.fileno() >= 0:
            with self._lock:
                self._close_group()
            self._flush()

    def _release(self, serial: int, streams: List[Any], now: bool) -> None:
        """Releases a batch: at once, or together with the next ones if their turns are short."""
        with self._lock:
            self._ended_batches.append(serial)
            if streams:
                self._used.extend(streams)
            if self._current_stream is not None:
                key, stream = self._current_stream(self._last_used)
                if stream is not None:
                    self._last_used = key
                    self._used.append(stream)
            if not now and len(self._ended_batches) < self._together and time.monotonic() - self._sent < HOLD:
                return
            self._close_group()
        self._flush()

    def _close_group(self) -> None:
        """Queues the release of the batches that wait for others: after all work that is on their streams now."""
        if self._ended_batches:
            used = {id(stream): stream for stream in self._used}
            events = [stream.record_event() for stream in used.values()]
            self._queued.append((self._ended_batches, events))
            self._ended_batches, self._used, self._last_used = [], [], None
            self._sent = time.monotonic()

    def _flush(self) -> Optional[Any]:
        """Sends the releases whose events are done, in order. Returns an event that is not."""
        waiting, done = None, []
        with self._lock:
            while self._queued and waiting is None:
                serials, events = self._queued[0]
                waiting = next((event for event in events if not event.query()), None)
                if waiting is None:
                    done.extend(serials)
                    self._queued.popleft()
            if done:
                self._send_release(done)
        return waiting

    def _send_release(self, serials: List[int]) -> None:
        if self._socket.fileno() < 0:
            return  # closed: the feeder has all
        try:
            self._socket.send(RELEASE.pack(KIND_RELEASE, len(serials)) + struct.pack(f"<{len(serials)}Q", *serials))
        except OSError:
            pass  # the feeder is gone, which the next batch says

    def _tensors(self, d: Delivery) -> List[Any]:
        key = (d.samples, *d.offsets)
        made = self._cache.get(key)
        if made is None:
            import torch

            made = []
            for f, off in zip(self.fields, d.offsets):
                shape = (d.samples, *f.shape)
                dtype = getattr(torch, f.dtype)
                if d.samples == 0:
                    made.append(torch.empty(shape, dtype=dtype))
                    continue
                made.append(torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=off).reshape(shape))
            self._cache[key] = made
        return made


def _current_stream(torch: Any) -> Any:
    """Returns a function that returns the current stream and a key of it, or no stream if the key is that of its argument."""
    c = getattr(torch, "_C", None)
    raw = getattr(c, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda last: (True, torch.cuda.current_stream())

    def current(last: Any) -> Tuple[Any, Any]:  # an object of a stream takes longer than its handle
        device = c._cuda_getDevice()
        key = (device, raw(device))
        return key, None if key == last else torch.cuda.current_stream()

    return current


def _unregister(mapped: mmap.mmap, address: int, pid: int, device: int) -> None:
    """Unregisters the ring when no copy reads it any more."""
    if os.getpid() != pid:
        return
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
    del mapped


_opened: "weakref.WeakSet[Feed]" = weakref.WeakSet()


def _after_fork() -> None:
    """A child has no feed: its copy of the socket would hide the parent's death from the feeder."""
    for feed in list(_opened):
        feed._lock = threading.Lock()
        feed._socket.close()


os.register_at_fork(after_in_child=_after_fork)


def main(arguments: Optional[List[str]] = None) -> int:
    """Reads all epochs and prints the rate of each."""
    parser = argparse.ArgumentParser(description="Reads the batches of a feeder (go run ./examples/feed).")
    parser.add_argument("address", help="as the feeder's -listen")
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", 0)), help="default: RANK, which torchrun sets")
    parser.add_argument("--world", type=int, default=int(os.environ.get("WORLD_SIZE", 1)), help="default: WORLD_SIZE")
    parser.add_argument("--device", default="", help="copy the batches there: cuda is cuda:LOCAL_RANK; default: none, and no PyTorch")
    parser.add_argument("--start", type=json.loads, default=None, help="a position, as JSON")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a batch may take")
    args = parser.parse_args(arguments)
    try:
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if args.device == "cuda" else args.device or None
        with Feed(args.address, args.rank, args.world, args.start, args.timeout, device) as feed:
            _read(feed, args.rank)
    except FeedError as err:
        print(f"feed.py: rank {args.rank}: {err}", file=sys.stderr)
        return 1
    return 0


def _read(feed: Feed, rank: int) -> None:
    while feed._ended < feed.epochs:
        began, samples, batches, number = time.perf_counter(), 0, 0, 0
        for batch in feed:
            samples, batches, number = samples + len(batch), batches + 1, batch.epoch
        if feed._copies is not None:
            feed._copies.synchronize()
        took = time.perf_counter() - began
        print(f"rank {rank}: epoch {number}: {samples} samples in {batches} batches, {samples / took:,.0f} samples/s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
