"""Reads all batches of a feeder of vectors, checks each byte, and prints a line for each batch: its epoch, number, position and samples.

usage: consumer.py ADDRESS RANK WORLD WIDTH START STOP
START is a position as JSON; after STOP batches it ends well.
"""
import array
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "pytorch"))
import feed  # noqa: E402

address, rank, world, width, start, stop = sys.argv[1:]
period = 1024
values = array.array("f", [(i % period) for i in range(period + int(width))]).tobytes()
size = 4 * int(width)
seen = 0
try:
    with feed.Feed(address, int(rank), int(world), json.loads(start), timeout=60) as source:
        for _ in range(source.epochs):
            for batch in source:
                vector, index = batch.views
                indices = index.cast("q").tolist()
                for at, i in enumerate(indices):
                    want = 4 * (i % period)
                    if vector[at * size : (at + 1) * size] != values[want : want + size]:
                        sys.exit(f"batch {batch.number} of epoch {batch.epoch}: the bytes of sample {i} are wrong")
                print(json.dumps({"epoch": batch.epoch, "number": batch.number, "position": batch.position, "indices": indices}), flush=True)
                seen += 1
                if seen == int(stop):
                    source.close()
                    sys.exit(0)
except feed.FeedError as err:
    print(f"FeedError: {err}", file=sys.stderr)
    sys.exit(3)
