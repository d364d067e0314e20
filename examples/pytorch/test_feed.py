"""Tests of feed.py that need neither a GPU nor PyTorch: python3 -m unittest test_feed"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib.util
import json
import os
import socket
import struct
import sys
import tempfile
import threading
import types
import unittest
from typing import Any, Callable, List, Optional
from unittest import mock

import fcntl

import feed

F_ADD_SEALS = 1033
RING = 4 * 4096
FIELDS = [
    {"name": "x", "dtype": "float32", "shape": [4], "bytes": 16},
    {"name": "label", "dtype": "int64", "shape": [], "bytes": 8},
]
WELCOME = {"protocol": feed.PROTOCOL, "ring": RING, "batch_size": 4, "samples": 8, "epochs": 1, "fields": FIELDS}
POSITION = {"epoch": 0, "batch": 1, "order": "8 samples"}


def ring(size: int = RING, seals: int = feed.SEALS) -> int:
    fd = os.memfd_create("test-ring", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def batch(serial: int, samples: int = 4, last: int = 0, offsets: Any = (0, 256), epoch: int = 0, fields: Optional[int] = None) -> bytes:
    n = len(offsets) if fields is None else fields
    rest = struct.pack(f"<{len(offsets)}Q", *offsets) + json.dumps(POSITION).encode()
    return feed.HEADER.pack(feed.KIND_BATCH, feed.HEADER.size + len(rest), serial, epoch, serial, samples, n, last) + rest


class Feeder:
    """A feeder that does what a test says: play is called with the connection, after the hello."""

    count = 0

    def __init__(self, test: unittest.TestCase, play: Callable[[socket.socket], None]) -> None:
        Feeder.count += 1
        self.address = f"@pinned-test-feed-{os.getpid()}-{Feeder.count}"
        self.hello: Any = None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\0" + self.address[1:])
        listener.listen()

        def serve() -> None:
            conn, _ = listener.accept()
            listener.close()
            with conn:
                conn.settimeout(30)
                self.hello = json.loads(conn.recv(feed.MAX_MESSAGE))
                try:
                    play(conn)
                except BrokenPipeError:  # the consumer wanted no more
                    pass

        self.thread = threading.Thread(target=serve)
        self.thread.start()
        test.addCleanup(self.thread.join)


def send_welcome(conn: socket.socket, welcome: Any = WELCOME, fds: Optional[List[int]] = None) -> None:
    fds = [ring()] if fds is None else fds
    socket.send_fds(conn, [json.dumps(welcome).encode()], fds)
    for fd in fds:
        os.close(fd)


def received(conn: socket.socket) -> Any:
    """The serial of a release (or their list, if they are several), "bye", or b"" at the end."""
    try:
        message = conn.recv(100)
    except ConnectionResetError:
        message = conn.recv(100)
    if len(message) == 4:
        return "bye"
    if not message:
        return b""
    kind, n = feed.RELEASE.unpack_from(message)
    assert (kind, len(message)) == (feed.KIND_RELEASE, feed.RELEASE.size + 8 * n)
    serials = struct.unpack_from(f"<{n}Q", message, feed.RELEASE.size)
    return serials[0] if n == 1 else list(serials)


def fds() -> List[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return sorted(f for f in found if "test-ring" in f or f.startswith("socket:"))


class Event:
    """An event of CUDA that is done when a test says so, or when something waits for it."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Stream:
    def __init__(self) -> None:
        self.events: List[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


class MessagesAreChecked(unittest.TestCase):
    def test_welcome(self) -> None:
        self.assertEqual(feed.parse_welcome(json.dumps(WELCOME).encode()).ring, RING)
        for change, want in [
            ({"protocol": 1}, "version 1 of the protocol, and this file 2"),
            ({"protocol": None}, "no protocol"),
            ({"error": "no"}, "the feeder refused: no"),
            ({"fields": []}, "no fields"),
            ({"fields": None}, "no fields"),
            ({"fields": [3]}, "does not know: 3"),
            ({"fields": [dict(FIELDS[0], dtype="complex")]}, "does not know"),
            ({"fields": [dict(FIELDS[0], dtype=["float32"])]}, "does not know"),
            ({"fields": [dict(FIELDS[0], shape=3)]}, "does not know"),
            ({"fields": [dict(FIELDS[0], shape=[-4])]}, "shape is -4"),
            ({"fields": [dict(FIELDS[0], bytes=17)]}, "has 17 bytes, and its type and shape 16"),
            ({"fields": [dict(FIELDS[0], bytes=True)]}, "bytes of a field is True"),
            ({"ring": 0}, "ring is 0"),
            ({"ring": "9"}, "ring is '9'"),
            ({"batch_size": -1}, "batch_size is -1"),
            ({"epochs": 1.5}, "epochs is 1.5"),
        ]:
            with self.subTest(change), self.assertRaisesRegex(feed.FeedError, want):
                feed.parse_welcome(json.dumps({**WELCOME, **change}).encode())
        for message in (b"", b"\xff", b"[]", b"{}", b"1", b"[" * 60_000):
            with self.subTest(message), self.assertRaises(feed.FeedError):
                feed.parse_welcome(message)

    def test_batch(self) -> None:
        welcome = feed.parse_welcome(json.dumps(WELCOME).encode())
        self.assertEqual(feed.parse_batches(batch(0), welcome)[0].offsets, (0, 256))
        self.assertEqual(feed.parse_batches(batch(0, offsets=(0, RING - 256)), welcome)[0].samples, 4)
        together = feed.parse_batches(batch(0) + batch(1, samples=2) + batch(2), welcome)
        self.assertEqual([(d.serial, d.samples, json.loads(d.position)) for d in together], [(0, 4, POSITION), (1, 2, POSITION), (2, 4, POSITION)])
        whole = batch(0)
        def length(n: int) -> bytes:
            return whole[:4] + struct.pack("<I", n) + whole[8:]

        for message, want in [
            (whole[:39], "has 39 bytes: at least 56"),
            (whole[:55], "has 55 bytes: at least 56"),
            (whole + whole[:55], "has 55 bytes: at least 56"),
            (length(55), "has 55 bytes and kind 1, in a packet with"),
            (length(0), "has 0 bytes and kind 1"),
            (length(len(whole) + 1), f"has {len(whole) + 1} bytes and kind 1"),
            (whole + b"\x09" + whole[1:], "kind 9"),
            (whole + batch(1, offsets=(0, RING)), "'label' of a batch is at 16384, outside"),
            (batch(0, samples=5), "5 samples with 2 fields: at most 4"),
            (batch(0, last=2), "samples with 2 fields"),
            (batch(0, fields=3), "with 3 fields"),
            (batch(0, offsets=(0, RING)), "'label' of a batch is at 16384, outside"),
            (batch(0, offsets=(1 << 63, 0)), "'x' of a batch is at 9223372036854775808, outside"),
            (batch(0, offsets=(8, 256)), "not aligned"),
        ]:
            with self.subTest(want), self.assertRaisesRegex(feed.FeedError, want):
                feed.parse_batches(message, welcome)


class FeedersThatAreWrong(unittest.TestCase):
    def tearDown(self) -> None:
        gc.collect()
        self.assertEqual([f for f in fds() if "test-ring" in f], [], "no ring is left")

    def refused(self, want: str, play: Callable[[socket.socket], None]) -> None:
        with self.subTest(want):
            feeder = Feeder(self, play)
            with self.assertRaisesRegex(feed.FeedError, want):
                feed.Feed(feeder.address, timeout=30)
            feeder.thread.join()

    def test_before_the_first_batch(self) -> None:
        def file(conn: socket.socket) -> None:
            with tempfile.TemporaryFile() as f:
                f.truncate(RING)
                send_welcome(conn, fds=[os.dup(f.fileno())])

        with self.assertRaisesRegex(feed.FeedError, "no feeder at @pinned-none"):
            feed.Feed("@pinned-none")
        with self.assertRaisesRegex(feed.FeedError, "no feeder at /none"):
            feed.Feed("/none")
        self.refused("ended without a welcome", lambda conn: None)
        self.refused("refused: because", lambda conn: send_welcome(conn, {"protocol": feed.PROTOCOL, "error": "because"}, []))
        self.refused("has 0 descriptors, not 1", lambda conn: send_welcome(conn, fds=[]))
        self.refused("has 2 descriptors, not 1", lambda conn: send_welcome(conn, fds=[ring(), ring()]))
        self.refused("longer than", lambda conn: send_welcome(conn, fds=[ring() for _ in range(40)]))
        self.refused("longer than", lambda conn: conn.send(b" " * (feed.MAX_MESSAGE + 1)))
        self.refused("ring has 4096 bytes, and should have 16384", lambda conn: send_welcome(conn, fds=[ring(4096)]))
        self.refused("not sealed", lambda conn: send_welcome(conn, fds=[ring(seals=feed.SEALS & ~2)]))
        self.refused("not sealed", lambda conn: send_welcome(conn, fds=[ring(seals=feed.SEALS & ~4)]))
        self.refused("not sealed", file)

    def test_later(self) -> None:
        for want, messages in [
            ("has ended, without a word", []),
            ("failed: sample 3", [struct.pack("<I", feed.KIND_ERROR) + b"sample 3"]),
            ("of unknown kind 0", [b"ab"]),
            ("of unknown kind 9", [struct.pack("<I", 9)]),
            ("batch 1 came instead of batch 0", [batch(1)]),
            ("outside of the ring", [batch(0, offsets=(0, 1 << 40))]),
            ("longer than", [b" " * (feed.MAX_MESSAGE + 1)]),
        ]:
            with self.subTest(want):
                def play(conn: socket.socket) -> None:
                    send_welcome(conn)
                    for message in messages:
                        conn.send(message)

                source = feed.Feed(Feeder(self, play).address, timeout=30)
                for _ in range(2):  # the error stays
                    with self.assertRaisesRegex(feed.FeedError, want):
                        next(iter(source))
                source.close()

    def test_a_batch_that_does_not_come(self) -> None:
        ended = threading.Event()

        def play(conn: socket.socket) -> None:
            send_welcome(conn)
            ended.wait(30)

        source = feed.Feed(Feeder(self, play).address, timeout=0.05)
        with self.assertRaisesRegex(feed.FeedError, "no batch in 0.05 s"):
            next(iter(source))
        ended.set()
        source.close()


class Batches(unittest.TestCase):
    def test_a_break_at_the_last_batch_ends_the_epoch(self) -> None:
        def play(conn: socket.socket) -> None:
            send_welcome(conn)  # of two epochs
            for serial in range(WELCOME["epochs"]):
                conn.send(batch(serial, last=1, epoch=serial))
            while received(conn) not in ("bye", b""):
                pass

        with feed.Feed(Feeder(self, play).address, timeout=5) as source:
            seen = []
            for _ in range(source.epochs + 1):
                for b in source:
                    seen.append(b.epoch)
                    break
            self.assertEqual(seen, list(range(source.epochs)), "and there is no other batch to wait for")

    def test_a_position_that_is_no_json(self) -> None:
        for text in (b"{", b"\xff", b"[" * 60_000):
            d = feed.Delivery(1, 0, 0, 0, True, (0, 256), text)
            with self.assertRaises(feed.FeedError):
                feed.DeviceBatch(d, ()).position

    def test_views_are_the_ring_until_the_release(self) -> None:
        got: List[Any] = []

        def play(conn: socket.socket) -> None:
            fd = ring()
            os.pwrite(fd, array.array("f", range(16)).tobytes(), 512)
            os.pwrite(fd, array.array("q", [7, 8, 9, 10]).tobytes(), 768)
            send_welcome(conn, fds=[os.dup(fd)])
            conn.send(batch(0, offsets=(512, 768)))
            got.append(received(conn))
            got.append(os.pread(fd, 8, 768))
            conn.send(batch(1, samples=2, last=1))
            got.extend([received(conn), received(conn), received(conn)])
            os.close(fd)

        feeder = Feeder(self, play)
        with feed.Feed(feeder.address, 3, 5, start=POSITION, timeout=30) as source:
            batches = iter(source)
            first = next(batches)
            x, label = first.views
            self.assertEqual(x.cast("f").tolist(), list(range(16)))
            self.assertEqual(label.cast("q").tolist(), [7, 8, 9, 10])
            self.assertEqual((len(first), first.epoch, first.number, first.position), (4, 0, 0, POSITION))
            label[0] = 77  # the memory is shared: no copy
            second = next(batches)
            with self.assertRaisesRegex(ValueError, "released"):
                x[0]
            for use in (lambda: first.views, lambda: first.tensors, first.release, first.retain):
                with self.assertRaisesRegex(feed.FeedError, "batch 0 of epoch 0 is released already"):
                    use()
            self.assertEqual(len(second), 2)
            self.assertEqual(list(batches), [])
            self.assertEqual(list(source), [], "there is no other epoch")
        feeder.thread.join()
        self.assertEqual(feeder.hello, {"protocol": feed.PROTOCOL, "rank": 3, "world": 5, "start": POSITION})
        self.assertEqual(got, [0, struct.pack("<q", 77), 1, "bye", b""])

    def test_retained_batches_and_errors_of_the_body(self) -> None:
        got: List[Any] = []

        def play(conn: socket.socket) -> None:
            send_welcome(conn)
            for serial in range(3):
                conn.send(batch(serial))
            got.extend([received(conn), received(conn), received(conn)])

        feeder = Feeder(self, play)
        with self.assertRaises(KeyError):
            with feed.Feed(feeder.address, timeout=30) as source:
                batches = iter(source)
                first = next(batches)
                first.retain()
                next(batches)
                third = next(batches)  # releases batch 1
                third.release()
                self.assertEqual(len(first.views), 2)
                raise KeyError
        feeder.thread.join()
        self.assertEqual(got, [1, 2, b""], "a body that fails ends without bye")

    def test_a_release_waits_for_the_streams(self) -> None:
        steps: List[Any] = []
        sent, go = threading.Event(), threading.Event()
        self.addCleanup(go.set)

        def play(conn: socket.socket) -> None:
            send_welcome(conn)
            conn.send(batch(0))
            conn.send(batch(1))
            sent.set()
            go.wait(30)
            steps.append(received(conn))
            conn.send(batch(2, last=1))  # not before the first ones are back: their memory is needed
            steps.append(received(conn))
            steps.append(received(conn))

        feeder = Feeder(self, play)
        stream = Stream()
        with feed.Feed(feeder.address, timeout=30) as source:
            batches = iter(source)
            next(batches).use(stream)
            sent.wait(30)
            second = next(batches)
            self.assertFalse(stream.events[0].done, "nothing waits while there are batches")
            self.assertEqual(len(source._queued), 1)
            go.set()
            third = next(batches)
            self.assertTrue(stream.events[0].done, "the feeder waited for this one")
            self.assertEqual((second.number, third.number), (1, 2))
            self.assertEqual(list(batches), [])
        feeder.thread.join()
        self.assertEqual(steps, [[0, 1], 2, "bye"])

    def test_short_turns_are_released_together(self) -> None:
        got: List[Any] = []

        def play(conn: socket.socket) -> None:
            send_welcome(conn)
            conn.send(b"".join(batch(serial, last=int(serial == 10)) for serial in range(11)))
            while not got or got[-1] not in ("bye", b""):
                got.append(received(conn))

        feeder = Feeder(self, play)
        stream, clock = Stream(), [1.0]
        with mock.patch.object(feed.time, "monotonic", lambda: clock[0]), feed.Feed(feeder.address, timeout=30) as source:
            for batch_ in source:
                if batch_.number in (5, 7):
                    batch_.use(stream)
                if batch_.number == 9:
                    clock[0] += 2 * feed.HOLD
                self.assertEqual(len(stream.events), 1 if batch_.number > 8 else 0, "one event for all that is released together")
                for event in stream.events:
                    event.done = True
        feeder.thread.join()
        self.assertEqual(source._together, 4)
        self.assertEqual(got, [0, [1, 2, 3, 4], [5, 6, 7, 8, 9], 10, "bye"], "the first, four, four and a long turn, the end")

    def test_a_release_that_waits_for_others_is_sent_before_anything_waits(self) -> None:
        got: List[Any] = []

        def play(conn: socket.socket) -> None:
            send_welcome(conn)
            conn.send(batch(0) + batch(1))
            got.extend([received(conn), received(conn)])
            conn.send(batch(2))  # not before both are back
            received(conn)

        feeder = Feeder(self, play)
        with mock.patch.object(feed.time, "monotonic", lambda: 1.0), feed.Feed(feeder.address, timeout=30) as source:
            batches = iter(source)
            self.assertEqual([next(batches).number for _ in range(3)], [0, 1, 2])
            batches.close()  # type: ignore[attr-defined]
        feeder.thread.join()
        self.assertEqual(got, [0, 1])

    def test_a_child_has_no_feed(self) -> None:
        got: List[Any] = []

        def play(conn: socket.socket) -> None:
            send_welcome(conn)
            conn.send(batch(0))
            got.append(received(conn))

        feeder = Feeder(self, play)
        source = feed.Feed(feeder.address, timeout=30)
        batches = iter(source)
        next(batches).retain()
        read, write = os.pipe()
        wait, resume = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                next(iter(source))
            except feed.FeedError as err:
                os.write(write, str(err).encode())
            source.close()
            os.close(resume)
            os.read(wait, 1)
            os._exit(0)
        self.assertIn("another process", os.read(read, 1000).decode())
        source._abandon()  # as its death: the child, which lives, must not hide it
        feeder.thread.join()
        self.assertEqual(got, [b""])
        for fd in (resume, wait, read, write):
            os.close(fd)
        os.waitpid(child, 0)


class FakeCUDA:
    """What feed.py takes from PyTorch to register memory."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, []
        stream = Stream()
        self.module = types.ModuleType("torch")
        self.module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
            cudart=lambda: self, current_stream=lambda device=0: stream, current_device=lambda: 0,
            synchronize=lambda device: self.calls.append("synchronize"),
        )
        self.stream = stream

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append("register")
        self.address = address
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert address == self.address
        with open("/proc/self/maps") as maps:
            mapped = any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)
        self.calls.append("unregister mapped" if mapped else "unregister unmapped")
        return 0


class Pinning(unittest.TestCase):
    def feed(self) -> feed.Feed:
        def play(conn: socket.socket) -> None:
            send_welcome(conn)
            conn.send(batch(0, last=1))
            while received(conn) not in ("bye", b""):
                pass

        return feed.Feed(Feeder(self, play).address, timeout=30)

    def test_the_ring_is_unregistered_before_it_is_unmapped(self) -> None:
        for end in ("close", "lost"):
            cuda = FakeCUDA()
            with self.subTest(end), mock.patch.dict(sys.modules, torch=cuda.module):
                source = self.feed()
                source.pin()
                source.pin()  # once
                if end == "close":
                    source.close()
                source._abandon() if end == "lost" else None
                del source
                gc.collect()
                self.assertEqual(cuda.calls, ["register", "synchronize", "unregister mapped"])

    def test_a_release_waits_for_the_current_stream(self) -> None:
        cuda = FakeCUDA()
        with mock.patch.dict(sys.modules, torch=cuda.module), self.feed() as source:
            source.pin()
            self.assertEqual(len(list(source)), 1)
            self.assertEqual(len(cuda.stream.events), 1)
            self.assertEqual(len(source._queued), 1)

    def test_a_refusal(self) -> None:
        cuda = FakeCUDA(code=801)
        with mock.patch.dict(sys.modules, torch=cuda.module), self.feed() as source:
            with self.assertRaisesRegex(feed.FeedError, "cudaHostRegister refused 16384 bytes of the ring: CUDA's error 801"):
                source.pin()
            self.assertEqual(len(list(source)), 1)
        self.assertEqual(cuda.calls, ["register"])


class FakeTensor:
    """A tensor of bytes, of which others are views."""

    def __init__(self, log: List[Any], memory: memoryview, dtype: str = "uint8", shape: Any = None, strides: Any = (1,), offset: int = 0) -> None:
        self.log, self.memory, self.dtype, self.strides, self.offset = log, memory, dtype, strides, offset
        self.shape = (len(memory),) if shape is None else shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> "FakeTensor":
        return FakeTensor(self.log, self.memory[part])

    def to(self, device: Any, non_blocking: bool) -> "FakeTensor":
        assert non_blocking
        self.log.append(("copy", len(self.memory)))
        return FakeTensor(self.log, memoryview(bytes(self.memory)))

    def record_stream(self, stream: Any) -> None:
        self.log.append("record_stream")

    def view(self, dtype: str) -> "FakeTensor":
        assert len(self.memory) % feed.ITEM_BYTES[dtype] == 0
        return FakeTensor(self.log, self.memory, dtype)

    def as_strided(self, shape: Any, strides: Any, offset: int) -> "FakeTensor":
        return FakeTensor(self.log, self.memory, self.dtype, tuple(shape), tuple(strides), offset)

    def unbind(self, dim: int) -> List["FakeTensor"]:
        assert dim == 0
        return [
            FakeTensor(self.log, self.memory, self.dtype, self.shape[1:], self.strides[1:], self.offset + i * self.strides[0]) for i in range(self.shape[0])
        ]

    def tolist(self) -> Any:
        if self.shape:
            return [t.tolist() for t in self.unbind(0)]
        item = feed.ITEM_BYTES[self.dtype]
        return struct.unpack_from({"float32": "f", "int64": "q", "uint8": "B"}[self.dtype], self.memory, self.offset * item)[0]


class DeviceStream(Stream):
    """A stream of a fake device, which a loop and the copies may use."""

    def __init__(self, log: List[Any], handle: int) -> None:
        super().__init__()
        self.log, self.cuda_stream = log, handle

    def wait_event(self, event: Any) -> None:
        self.log.append(("wait", self.cuda_stream))

    def synchronize(self) -> None:
        pass


class Devices(unittest.TestCase):
    def setUp(self) -> None:
        self.cuda = FakeCUDA()
        self.log: List[Any] = []
        self.streams = [DeviceStream(self.log, 7), DeviceStream(self.log, 8)]
        self.current = self.streams[1]
        torch, cuda = self.cuda.module, self.cuda.module.cuda  # type: ignore[attr-defined]
        cuda.is_available, cuda.init, cuda.device_count = lambda: True, lambda: None, lambda: 2
        cuda.current_stream = lambda device=0: self.current
        cuda.Stream = lambda device: self.streams[0]
        cuda.stream = cuda.device = lambda of: contextlib.nullcontext()
        torch.device = lambda kind, index=None: types.SimpleNamespace(  # type: ignore[attr-defined]
            type=kind.split(":")[0], index=int(kind.split(":")[1]) if ":" in kind else index
        )
        for dtype in feed.ITEM_BYTES:
            setattr(torch, dtype, dtype)
        torch._C = types.SimpleNamespace()  # type: ignore[attr-defined]
        torch.frombuffer = lambda memory, dtype: FakeTensor(self.log, memoryview(memory))  # type: ignore[attr-defined]
        replaced = mock.patch.dict(sys.modules, torch=torch)
        replaced.start()
        self.addCleanup(replaced.stop)

    def feed(self, play: Callable[[socket.socket], None], **welcome: Any) -> feed.Feed:
        shared = ring(RING)
        for i in range(RING // 512):  # batch i is at i * 512: 4 rows of 4 numbers, and 4 labels
            os.pwrite(shared, array.array("f", range(16 * i, 16 * i + 16)).tobytes(), 512 * i)
            os.pwrite(shared, array.array("q", range(4 * i, 4 * i + 4)).tobytes(), 512 * i + 256)

        def serve(conn: socket.socket) -> None:
            send_welcome(conn, {**WELCOME, **welcome}, fds=[shared])
            play(conn)

        self.feeder = Feeder(self, serve)
        return feed.Feed(self.feeder.address, timeout=30, device="cuda")

    def check(self, got: Any, at: int, samples: int = 4) -> None:
        x, label = got.tensors
        self.assertEqual(x.tolist(), [[float(16 * at + 4 * i + k) for k in range(4)] for i in range(samples)])
        self.assertEqual(label.tolist(), [4 * at + i for i in range(samples)])
        self.assertEqual((len(got), got.position), (samples, POSITION))

    def until_bye(self, conn: socket.socket) -> List[Any]:
        got = []
        while not got or got[-1] not in ("bye", b""):
            got.append(received(conn))
        return got

    def test_batches_that_arrive_together_are_one_copy(self) -> None:
        released: List[Any] = []

        def play(conn: socket.socket) -> None:
            at = lambda i: (512 * i, 512 * i + 256)  # noqa: E731
            conn.send(b"".join(batch(i, offsets=at(i)) for i in range(3)) + batch(3, offsets=at(9)) + batch(4, samples=2, offsets=at(10), last=1))
            conn.send(batch(5, offsets=at(4), epoch=1) + batch(6, offsets=at(3), epoch=1, last=1))
            released.extend(self.until_bye(conn))

        with self.feed(play, epochs=2) as source:
            got = list(source)
            for number, (at, samples) in enumerate([(0, 4), (1, 4), (2, 4), (9, 4), (10, 2)]):
                self.check(got[number], at, samples)
                self.assertEqual((got[number].number, got[number].epoch), (number, 0))
            for at, batch_of in zip((4, 3), source):
                self.check(batch_of, at)
            copies = [entry[1] for entry in self.log if entry[0] == "copy"]
            self.assertEqual(copies, [1536, 512, 512, 512, 512])
            self.assertEqual(self.log.count(("wait", 8)), 5)
            self.assertEqual(self.log.count("record_stream"), 5)
            for event in self.streams[0].events:
                event.done = True
            source._flush()
        self.feeder.thread.join()
        serials = [s for r in released[:-1] for s in (r if isinstance(r, list) else [r])]  # as they were read, alone or together
        self.assertEqual(serials, list(range(7)))

    def test_a_stream_that_changes_within_a_run_waits(self) -> None:
        def play(conn: socket.socket) -> None:
            conn.send(batch(0) + batch(1, offsets=(512, 768), last=1))
            self.until_bye(conn)

        with self.feed(play) as source:
            for got in source:
                self.check(got, got.number)
                self.current = DeviceStream(self.log, 9)
        self.assertEqual([e for e in self.log if e[0] == "wait"], [("wait", 8), ("wait", 9)])

    def test_a_loop_that_is_left_goes_on_with_its_run(self) -> None:
        def play(conn: socket.socket) -> None:
            conn.send(b"".join(batch(i, offsets=(512 * i, 512 * i + 256), last=int(i == 2)) for i in range(3)))
            self.until_bye(conn)

        with self.feed(play) as source:
            for got in source:
                break
            self.check(got, 0)
            self.assertEqual([b.number for b in source], [1, 2])
            self.check(got, 0)

    def test_an_error_comes_behind_the_batches_before_it(self) -> None:
        def play(conn: socket.socket) -> None:
            conn.send(batch(0) + batch(1, offsets=(512, 768)))
            conn.send(struct.pack("<I", feed.KIND_ERROR) + b"the disk is gone")

        source, numbers = self.feed(play), []
        with self.assertRaisesRegex(feed.FeedError, "the disk is gone"):
            for got in source:
                numbers.append(got.number)
                source._readable.poll()
        self.assertEqual(numbers, [0, 1])
        source.close()
        self.assertEqual(self.cuda.calls, ["register", "synchronize", "unregister mapped"])

    def test_devices_that_are_none(self) -> None:
        for device, available, want in (("cpu", True, "device cpu: must be one of CUDA"), ("cuda", False, "PyTorch finds no GPU")):
            self.cuda.module.cuda.is_available = lambda: available  # type: ignore[attr-defined]
            with self.subTest(device), self.assertRaisesRegex(feed.FeedError, want):
                feed.Feed(Feeder(self, send_welcome).address, timeout=30, device=device)
        with mock.patch.dict(sys.modules, torch=None), self.assertRaisesRegex(feed.FeedError, "PyTorch is not installed"):
            feed.Feed(Feeder(self, send_welcome).address, timeout=30, device="cuda")

    def test_runs(self) -> None:
        def arrived(*of: Any) -> List[feed.Delivery]:
            return [feed.Delivery(samples, 0, 0, 0, last, offsets, b"") for offsets, samples, last in of]

        for want, most, deliveries in (
            (1, 8, arrived(((0, 256), 4, False))),
            (3, 8, arrived(((0, 256), 4, False), ((512, 768), 4, False), ((1024, 1280), 4, False))),
            (2, 2, arrived(((0, 256), 4, False), ((512, 768), 4, False), ((1024, 1280), 4, False))),
            (2, 8, arrived(((0, 256), 4, False), ((512, 768), 4, False), ((0, 256), 4, False))),  # the ring begins again
            (1, 8, arrived(((512, 768), 4, False), ((0, 256), 4, False))),
            (1, 8, arrived(((0, 256), 4, False), ((0, 256), 4, False))),
            (1, 8, arrived(((0, 256), 4, False), ((1280, 1536), 4, False))),  # too much is between them
            (1, 8, arrived(((0, 256), 4, False), ((512, 1024), 4, False))),  # the fields are apart otherwise
            (1, 8, arrived(((0, 256), 4, True), ((512, 768), 4, False))),
            (1, 8, arrived(((0, 256), 4, False), ((512, 768), 2, True))),
            (2, 8, arrived(((0, 256), 4, False), ((512, 768), 4, True), ((1024, 1280), 4, False))),
        ):
            self.assertEqual(feed.run_length(deliveries, most, 1024), want, deliveries)


@unittest.skipIf(importlib.util.find_spec("torch") is None, "PyTorch is not installed: tensors on the ring are not tried")
class Tensors(unittest.TestCase):
    def test_tensors_are_the_ring(self) -> None:
        import torch

        shared = ring()
        os.pwrite(shared, array.array("f", range(16)).tobytes(), 512)

        def play(conn: socket.socket) -> None:
            send_welcome(conn, fds=[os.dup(shared)])
            conn.send(batch(0, offsets=(512, 768)))
            conn.send(batch(1, samples=0, offsets=(512, 768), last=1))
            while received(conn) not in ("bye", b""):
                pass

        with feed.Feed(Feeder(self, play).address, timeout=30) as source:
            batches = iter(source)
            x, label = next(batches).tensors
            self.assertEqual((x.shape, x.dtype), ((4, 4), torch.float32))
            self.assertEqual((label.shape, label.dtype), ((4,), torch.int64))
            self.assertEqual(x.flatten().tolist(), list(range(16)))
            label[1] = 5
            self.assertEqual(os.pread(shared, 8, 776), struct.pack("<q", 5))
            self.assertEqual([t.shape for t in next(batches).tensors], [(0, 4), (0,)])
        gc.collect()
        self.assertEqual(x.sum().item(), 120, "a tensor that is left keeps the memory mapped")
        os.close(shared)


if __name__ == "__main__":
    unittest.main()
