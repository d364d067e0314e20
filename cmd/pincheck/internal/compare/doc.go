// Package compare says what differs between runs by more than runs of one machine do: between two
// of them, or which hosts of three or more are out of line.
//
// Package report reads [Document] values from files of pincheck bench and of nvbandwidth. [Runs]
// combines them into runs, and [Compare] compares the runs.
package compare
