// Package measure runs experiments: a plan in, samples and their statistics out. Results are
// plain data. Sizes are bytes, rates GB/s of 1e9 bytes.
//
// An [Experiment] plans groups of cases. A [Group] allocates what its cases share; one group is
// open at a time. A [Case] is one series: [Run] takes its warm-up samples, then samples until the
// case's budget of time is used, and then lets it verify what was copied. Packages that measure
// provide plans and samples; warm-up, counting, statistics, limits and errors are here.
package measure
