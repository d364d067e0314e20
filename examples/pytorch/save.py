"""Saves tensors of PyTorch as safetensors: the caller waits for a copy at the speed of the link, a Go program writes.

    go build -o weights ./examples/weights        # once; one file, which needs no GPU

    import save
    saver = save.Saver("./weights")
    saving = saver.save(model.state_dict(), "/models/step-1000.safetensors")
    train()                                       # the tensors may change again
    saving.wait()                                 # the file is on storage
    saver.close()

The tensors are copied to pinned memory that both processes have (hostmem/shm). The first save makes it, exactly as large
as the tensors, and later ones use it again; so a save waits for the one before. The file replaces the one before as a
whole, with checksums of all bytes, or not at all: see weights.Save. It is written also if this process is killed meanwhile.
save.py needs pinned.py beside it, PyTorch 2, Python 3.9 and Linux.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional

import pinned

if TYPE_CHECKING:
    import torch

ALIGNMENT = 4096
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}


class SaveError(RuntimeError):
    """A model that was not saved. The file that was there before is whole."""


class Saving:
    """A save that goes on."""

    def __init__(self, saver: "Saver", path: str) -> None:
        self._saver: Optional["Saver"] = saver
        self._path, self._error, self.bytes, self.seconds = path, "", 0, 0.0

    def wait(self) -> int:
        """Returns the number of bytes of tensors when the file is on storage."""
        if self._saver is not None:  # also after an interrupt
            try:
                answer = self._saver._answer()
                self._error, self.bytes, self.seconds = answer.get("error", ""), answer.get("saved", 0), answer.get("seconds", 0.0)
            except SaveError as err:
                self._error = str(err)
            self._saver._saving, self._saver = None, None
        if self._error:
            raise SaveError(f"{self._path}: {self._error}")
        return self.bytes


class Saver:
    """Saves one model after another, by a program that it starts. It is for one thread at a time."""

    def __init__(self, program: str, runtime: Any = None) -> None:
        self._runtime = runtime
        self._memory: Optional[pinned.Shared] = None
        self._saving: Optional[Saving] = None
        try:  # Ctrl-C is for this process: the program ends with its input
            self._process = subprocess.Popen([program, "-serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as err:
            raise SaveError(f"{program} does not start: {err.strerror}; go build -o weights ./examples/weights makes it") from None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def save(self, tensors: Mapping[str, "torch.Tensor"], path: str, metadata: Optional[Dict[str, str]] = None, shard_bytes: int = 0,
             direct: bool = False, drop_cache: bool = False) -> Saving:
        """Copies tensors, after what is queued on the current streams of their devices, and returns when they may change.

        A path ends in .safetensors. shard_bytes splits larger models into files with an index; direct writes without the
        page cache; drop_cache drops the files' pages from it afterwards. Raises SaveError, also for the save before if
        nobody has waited for it.
        """
        placed, size = self._place(tensors)
        if self._saving is not None:
            self._saving.wait()
        if self._memory is None or self._memory.size < size:
            self._allocate(size)
        self._copy(tensors, placed)
        self._ask({
            "path": os.path.abspath(path), "tensors": placed, "metadata": {"format": "pt", **(metadata or {})},
            "shard_bytes": shard_bytes, "direct": direct, "drop_cache": drop_cache,
        })
        self._saving = Saving(self, path)
        return self._saving

    def close(self) -> None:
        """Waits for the last save, and gives the memory back. Raises SaveError if that save failed and nobody has waited for it."""
        try:
            if self._saving is not None:
                self._saving.wait()
        finally:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            if self._process.stdin is not None and not self._process.stdin.closed:
                self._process.stdin.close()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    @staticmethod
    def _place(tensors: Mapping[str, "torch.Tensor"]) -> Any:
        placed: List[Dict[str, Any]] = []
        at = 0
        for name, t in tensors.items():
            dtype = DTYPES.get(str(t.dtype).rpartition(".")[2])
            if dtype is None or str(t.layout) != "torch.strided":
                raise SaveError(f"tensor {name!r}: safetensors has no {t.layout if dtype else t.dtype}")
            placed.append({"name": name, "dtype": dtype, "shape": list(t.shape), "offset": at, "bytes": t.numel() * t.element_size()})
            at += (placed[-1]["bytes"] + ALIGNMENT - 1) & -ALIGNMENT
        return placed, max(at, ALIGNMENT)

    def _allocate(self, size: int) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._ask({"allocate": size})
        answer = self._answer()
        if answer.get("error"):
            raise SaveError(f"{size} bytes of memory: {answer['error']}")
        fd = os.open(answer["memory"], os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = pinned.Shared(fd=fd, write=True, runtime=self._runtime)
        finally:
            os.close(fd)

    def _copy(self, tensors: Mapping[str, "torch.Tensor"], placed: List[Dict[str, Any]]) -> None:
        import torch

        assert self._memory is not None
        memory = self._memory.tensor()
        devices = set()
        with torch.no_grad():
            for t, p in zip(tensors.values(), placed):
                if p["bytes"] > 0:
                    memory[p["offset"]:p["offset"] + p["bytes"]].view(t.dtype).view(t.shape).copy_(t, non_blocking=True)
                if t.is_cuda:
                    devices.add(t.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _ask(self, request: Dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise SaveError(self._ended()) from None

    def _answer(self) -> Dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise SaveError(self._ended())
        try:
            return dict(json.loads(line))
        except ValueError:
            raise SaveError(f"the program that saves answers {line[:80]!r}") from None

    def _ended(self) -> str:
        return f"the program that saves has ended, with status {self._process.poll()}"
