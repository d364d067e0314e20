// Package result holds what measurements return: plain data, which reports render, which
// is kept as JSON, and which is compared with that of other runs and hosts.
//
// A [Bench] is complete data at every moment: one that was interrupted has the series
// that were finished, and says that it is not Complete. Sizes are bytes, times seconds,
// rates GB/s of 1e9 bytes.
package result
