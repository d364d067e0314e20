// Package benchmarks has the benchmarks that decide whether a commit made the library slower: each
// is one use of its public interface, such as BenchmarkCopies/upload/2GiB. It has test files only.
//
// They run on simulated GPUs with small sizes, or with PINNED_TEST_GPU=1 on those of the machine.
// A benchmark first shows that the bytes it moves arrive, and fails if they do not. -short leaves
// out all but the most telling ones. scripts/bench.sh compares two commits on a GPU host by them,
// beside the programs of testdata/baseline, which print the same names.
//
// Beside ns/op they report GB/s (1 GB is 1e9 bytes), cpu-s/GB (CPU seconds of the process) and, by
// unit, other times of the same operation: unpin-ns, p99-ns. An operation of BenchmarkLoader is one
// sample, not a batch.
//
// The script copies these files over an earlier commit. So they use nothing of the library but its
// public interface, and a file that does not compile there can be left out without the others.
package benchmarks
