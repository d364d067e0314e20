// Command guard shows whether one build of this module is slower than another one, on a host
// with a GPU: scripts/guard.sh builds, sends and runs it.
//
//	guard compare -old PATH -new PATH   measure two builds of guard in turn, and compare them
//	guard table                         measure the rows of several GPUs, beside what they are to reach
//	guard serve                         measure rows for a compare, over standard input and output
//	guard once ROW                      measure a row that is about the first calls of a process
//	guard rows                          list the rows
//	guard load N                        copy memory on N threads until standard input ends
//
// # Rows
//
// A row is one use of the library, such as copies/upload/2GiB. The files rows_*.go register
// them; each prepares what it needs, shows once that the bytes it moves are right, and is then
// measured in samples of some 10 ms. Rows are measured under a variant too, whose name comes first:
// two-cores/ runs both processes on two cores, busy/ beside a process that copies memory on half of
// the cores. The files reference_*.go register what CUDA alone takes for the same; programs in C of
// testdata/baseline are run beside the rows that name them.
//
// Rows use the public interface of the module only, so that this directory, laid over an earlier commit,
// builds there too. Files of rows that do not build there are left out of that build.
//
// A row may have goals: guard table compares its figures with the program in C, or with another row of the
// same run. Rows of four and eight GPUs are in tables alone. Each needs device memory for two sources, 4 GiB, on every
// GPU, which stays allocated, and 1 or 2 GiB of host memory a GPU, which is freed with the row.
//
// # Samples
//
// Both builds run as processes that wait while the other one is measured. A pair is one sample
// of each, next to each other in time, and the next pair is in the opposite order (A B B A), so
// that a drift of the host cancels out. At least eight pairs are measured of each figure, and more
// until the figure is known well enough or the row's part of the time is over.
//
// # Statistics
//
// Each pair yields one ratio: how many times the cost of the old build the new one has. The estimate is
// the median of the means of every two ratios, in logarithms (Hodges and Lehmann), and its interval that
// of Wilcoxon's signed-rank test, at 99 %. Both assume only that noise favours either build as often, and a
// few samples that are far out change little. A figure looks worse if its estimate is above 1.10 and its
// interval above 1. It is then measured again in two more pairs of new processes, and is worse if all pairs
// together look worse and each pair of processes found the new build slower: memory is elsewhere in each
// process, which alone makes some rows differ by several percent.
package main
