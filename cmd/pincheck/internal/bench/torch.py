"""Pins memory by PyTorch or by DeepSpeed, and prints by how many bytes the process grew, as JSON: see torch.go."""
import json
import sys

way, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def resident():
    total = 0
    with open("/proc/self/smaps_rollup") as f:
        for line in f:
            if line.split(":")[0] in ("Rss", "Private_Hugetlb", "Shared_Hugetlb"):
                total += int(line.split()[1]) << 10
    return total


def keep():
    import torch

    if not torch.cuda.is_available():
        return {"missing": "PyTorch %s has no GPU here" % torch.__version__}
    pin = torch.Tensor.pin_memory
    if way == "deepspeed":
        from deepspeed.accelerator import get_accelerator

        pin = get_accelerator().pin_memory
    # The first memory makes the context, and brings the driver's code into memory.
    first = pin(torch.ones(1, dtype=torch.uint8))
    first.cuda()
    if count == 0:
        return {}
    source = torch.ones(size, dtype=torch.uint8)
    before = resident()
    blocks = [pin(source) for _ in range(count)]
    answer = {"retained": resident() - before}
    last = blocks[-1]
    last[-1] = 171
    if not (last.is_pinned() and torch.equal(last.cuda().cpu(), last)):
        answer["mismatch"] = "the last block is not pinned, or came back from the GPU with other bytes"
    return answer


try:
    out = keep()
except ImportError as err:
    out = {"missing": str(err)}
except Exception as err:  # of CUDA, too: a sentence, no traceback
    out = {"error": "%s: %s" % (type(err).__name__, str(err).partition("\n")[0])}
print(json.dumps(out))
