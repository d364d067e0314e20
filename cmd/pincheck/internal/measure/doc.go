// Package measure runs benchmarks on a device: a plan in, samples and their statistics
// out. Results are plain data. Sizes are bytes, rates GB/s of 1e9 bytes.
package measure
