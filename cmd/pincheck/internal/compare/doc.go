// Package compare finds significant differences between runs: between two runs by a rank test of
// their samples, between three or more by the distance of a host from the others.
//
// Package report reads [Document] values from files of pincheck bench and of nvbandwidth. [Runs]
// combines them into runs, and [Compare] compares the runs.
package compare
