// Package result has the types of measured data: plain data that reports render, that JSON files
// store, and that package compare compares.
//
// A [Bench] can be written at any time. An interrupted one has the finished series, and its
// Complete is false. Sizes are bytes, times seconds,
// rates GB/s of 1e9 bytes.
package result
