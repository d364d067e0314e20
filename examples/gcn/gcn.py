#!/usr/bin/env python3
"""Trains the network of this directory's Go program in PyTorch, on the graph and with the first
weights that the program wrote, prints loss and time of each epoch, and compares the losses.

    gcn -nodes 100000 -write graph.bin -json losses.json
    python3 gcn.py graph.bin --epochs 3 --losses losses.json
    python3 gcn.py graph.bin --layer pyg
    python3 gcn.py graph.bin --limit 2

Like torch_geometric without extensions it gathers a row for each edge and adds it with
index_add_, so it needs memory of the edges times the width, twice. --layer pyg takes
torch_geometric's GCNConv. With --limit PyTorch may take that many GB of the card
(torch.cuda.set_per_process_memory_fraction). --table prints a row for each way in the format of the
Go program's -scale, which starts this file.
"""

import argparse
import json
import sys
import time

import numpy
import torch
import torch.nn.functional as F

try:
    from torch_geometric.nn import GCNConv
except ImportError:
    GCNConv = None

GB = 1e9


def read(path, device):
    with open(path, "rb") as f:
        sizes = json.loads(f.readline())
        n, edges = sizes["nodes"], sizes["nodes"] * (sizes["edges_per_node"] + 1)
        features, hidden, classes = sizes["features"], sizes["hidden"], sizes["classes"]

        def array(kind, *shape):
            count = int(numpy.prod(shape))
            values = numpy.fromfile(f, dtype=kind, count=count)
            if values.size != count:
                sys.exit(f"{path} is cut off")
            return values.reshape(shape)

        def indices(count):
            return torch.from_numpy(array("<u4", count).astype("int64")).to(device)

        def floats(*shape):
            return torch.from_numpy(array("<f4", *shape)).to(device)

        source, target = indices(edges), indices(edges)
        x = floats(n, features)
        labels = indices(n)
        w1, w2 = floats(features, hidden), floats(hidden, classes)
    return sizes, source, target, x, labels, w1, w2


class Plain(torch.nn.Module):
    """The mean over the edges that lead to a node of x W. In both orders that is the same."""

    def __init__(self, weight, source, target, degree, mean_first=False):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.source, self.target, self.degree = source, target, degree
        self.mean_first = mean_first

    def forward(self, x):
        if not self.mean_first:
            x = x @ self.weight
        out = torch.zeros_like(x).index_add_(0, self.target, x[self.source]) / self.degree
        return out @ self.weight if self.mean_first else out


class PyG(torch.nn.Module):
    """The same by torch_geometric: its own normalisation is another one, so each edge has its weight of the mean."""

    def __init__(self, weight, source, target, degree):
        super().__init__()
        self.conv = GCNConv(*weight.shape, normalize=False, add_self_loops=False, bias=False).to(weight.device)
        with torch.no_grad():
            self.conv.lin.weight.copy_(weight.t())
        self.edges = torch.stack([source, target])
        self.weights = 1 / degree.squeeze(1)[target]

    def forward(self, x):
        return self.conv(x, self.edges, self.weights)


def train(o, layer, epoch=lambda n, loss, seconds: None):
    """Returns the losses and the seconds of all epochs, and the peak of the memory on the card in bytes."""
    on_gpu = o.device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(o.device)
    sizes, source, target, x, labels, w1, w2 = read(o.graph, o.device)
    degree = torch.bincount(target, minlength=sizes["nodes"]).to(torch.float32).unsqueeze(1)
    if layer == "pyg":
        first, second = PyG(w1, source, target, degree), PyG(w2, source, target, degree)
    else:
        first, second = Plain(w1, source, target, degree, o.mean_first), Plain(w2, source, target, degree)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=o.rate)
    losses, seconds = [], []
    for n in range(o.epochs):
        if on_gpu:
            torch.cuda.synchronize(o.device)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(second(F.relu(first(x))), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits
        if on_gpu:
            torch.cuda.synchronize(o.device)
        seconds.append(time.perf_counter() - began)
        epoch(n, losses[-1], seconds[-1])
    return losses, seconds, torch.cuda.max_memory_allocated(o.device) if on_gpu else 0


def limit(o, gigabytes):
    total = torch.cuda.mem_get_info(o.device)[1]
    torch.cuda.set_per_process_memory_fraction(min(gigabytes * GB / total, 1), o.device)


def out_of_memory(err):
    return str(err).partition(". ")[0]  # the rest is advice


def row(nodes, way, seconds="", gigabytes="", loss="", note=""):
    print(f"{nodes:>12}  {way:<28} {seconds:>10} {gigabytes:>10} {loss:>12}  {note}".rstrip(), flush=True)


def table(o):
    """A row for each way. One that does not fit says so."""
    with open(o.graph, "rb") as f:
        nodes = json.loads(f.readline())["nodes"]
    ways = [("PyTorch", "plain", 0), ("PyG GCNConv", "pyg", 0)]
    if o.limit:
        ways.append((f"PyTorch within {o.limit:.2f} GB", "plain", o.limit))
    for way, layer, most in ways:
        if layer == "pyg" and GCNConv is None:
            row(nodes, way, note="torch_geometric is not installed")
            continue
        if most:
            limit(o, most)
        try:
            losses, seconds, peak = train(o, layer)
        except torch.cuda.OutOfMemoryError as err:
            note = out_of_memory(err)
        else:
            later = sorted(seconds[1:] or seconds)
            row(nodes, way, f"{later[len(later) // 2]:.3f}", f"{peak / GB:.2f}", f"{losses[-1]:.6f}")
            note = None
        if note:  # when what the exception held has been freed
            row(nodes, way, note=note)
        if o.device.startswith("cuda"):
            torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("graph", help="written by the Go program's -write")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--layer", choices=["plain", "pyg"], default="plain", help="pyg needs torch_geometric")
    parser.add_argument("--mean-first", action="store_true", help="in the first plain layer, as the Go program does: less memory and work")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=0, help="GB of the card that PyTorch may take")
    parser.add_argument("--table", action="store_true", help="print a row for each way")
    parser.add_argument("--losses", help="of the Go program's -json, to compare with")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative")
    o = parser.parse_args()
    if o.device == "cuda":
        o.device = "cuda:0"
    on_gpu = o.device.startswith("cuda")
    if o.epochs < 1 or o.limit < 0:
        parser.error("--epochs must be at least 1, and --limit at least 0")
    if o.limit and not on_gpu:
        parser.error("--limit is of a GPU's memory")
    if o.layer == "pyg" and GCNConv is None:
        parser.error("--layer pyg: torch_geometric is not installed")
    torch.backends.cuda.matmul.allow_tf32 = False
    if on_gpu:
        torch.cuda.set_device(o.device)
        torch.cuda.init()
    if o.table:
        table(o)
        return

    if o.limit:
        limit(o, o.limit)
    try:
        losses, seconds, peak = train(o, o.layer, lambda n, loss, took: print(f"epoch {n + 1}: loss {loss:.6f}, {took:.3f} s"))
    except torch.cuda.OutOfMemoryError as err:
        sys.exit(out_of_memory(err))
    if on_gpu:
        stats = torch.cuda.memory_stats(o.device)
        print(f"memory: peak allocated {peak / GB:.3f} GB, "
              f"reserved {torch.cuda.max_memory_reserved(o.device) / GB:.3f} GB, "
              f"{stats['allocation.all.allocated']} allocations, {stats['allocation.all.freed']} frees")

    if not o.losses:
        return
    with open(o.losses) as f:
        other = json.load(f)
    worst = max(abs(a - b) / abs(a) for a, b in zip(losses, other["losses"]))
    count = min(len(losses), len(other["losses"]))
    print(f"losses of {count} epochs differ by {worst:.2e} at most; "
          f"time of the last epoch: {other['seconds'][-1]:.3f} s, PyTorch {seconds[-1]:.3f} s, "
          f"ratio {other['seconds'][-1] / seconds[-1]:.2f}")
    if not worst <= o.tolerance:
        sys.exit(f"that is more than {o.tolerance:.0e}")


if __name__ == "__main__":
    main()
