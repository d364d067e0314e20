#!/usr/bin/env python3
"""Trains the network of this directory's Go program in PyTorch, on the graph and with the first
weights that the program wrote, prints loss and time of each epoch, and compares the losses.

    gcn -nodes 100000 -write graph.bin -json losses.json
    python3 gcn.py graph.bin --epochs 3 --losses losses.json

Like torch_geometric without extensions it gathers a row for each edge and adds it with
index_add_, so it needs memory of the edges times the width, twice.
"""

import argparse
import json
import sys
import time

import numpy
import torch
import torch.nn.functional as F


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


class Layer(torch.nn.Module):
    """The mean over the edges that lead to a node of x W. In both orders that is the same."""

    def __init__(self, weight, mean_first=False):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.mean_first = mean_first

    def forward(self, x, source, target, degree):
        if not self.mean_first:
            x = x @ self.weight
        out = torch.zeros_like(x).index_add_(0, target, x[source]) / degree
        return out @ self.weight if self.mean_first else out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("graph", help="written by the Go program's -write")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--mean-first", action="store_true", help="in the first layer, as the Go program does: less memory and work")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--losses", help="of the Go program's -json, to compare with")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative")
    o = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False

    sizes, source, target, x, labels, w1, w2 = read(o.graph, o.device)
    degree = torch.bincount(target, minlength=sizes["nodes"]).to(torch.float32).unsqueeze(1)
    first, second = Layer(w1, o.mean_first), Layer(w2)
    optimizer = torch.optim.SGD([first.weight, second.weight], lr=o.rate)
    on_gpu = o.device.startswith("cuda")
    losses, seconds = [], []
    for epoch in range(o.epochs):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad()
        hidden = F.relu(first(x, source, target, degree))
        loss = F.cross_entropy(second(hidden, source, target, degree), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        print(f"epoch {epoch + 1}: loss {losses[-1]:.6f}, {seconds[-1]:.3f} s")
    if on_gpu:
        stats = torch.cuda.memory_stats()
        print(f"memory: peak allocated {torch.cuda.max_memory_allocated() / 1e9:.3f} GB, "
              f"reserved {torch.cuda.max_memory_reserved() / 1e9:.3f} GB, "
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
