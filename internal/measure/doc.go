// Package measure runs benchmarks on a device: a plan in, samples and their
// statistics out. All results are plain data. Rates are GB/s of 1e9 bytes,
// sizes are bytes.
package measure
