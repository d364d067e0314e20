// Package compare says what differs for sure between runs: two of them by a rank test of
// the samples, three or more by which hosts are out of line.
//
// [Read] reads the JSON documents of pincheck bench and of nvbandwidth, [Runs] makes runs
// of them, and [Compare] compares these.
package compare
