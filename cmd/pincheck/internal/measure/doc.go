// Package measure runs experiments: a plan in, samples and their statistics out. Results are
// plain data. Sizes are bytes, rates GB/s of 1e9 bytes.
//
// An [Experiment] plans groups of cases. A [Group] allocates what its cases share; one group is
// open at a time. A [Case] is one series: [Run] takes its warm-up samples, then samples until the
// case's budget of time is used, and then lets it verify what was copied. Packages that measure
// provide plans and samples; warm-up, counting, statistics, limits and errors are here.
//
// # Clocks
//
// A [Span] times work on a stream by two events, on the device's clock. A [Stopwatch] times parts of a
// sample by the host's clock, and counts the CPU time of this process in them. A case chooses one: the
// experiment's file in package bench names it. CPU time for a GB is that of the timed parts, divided by
// the bytes of the samples; a case without a Stopwatch counts the whole process.
package measure
