// Package doctor makes findings of facts and measurements: what is wrong, why, and
// what to do about it.
//
// [Gather] collects the facts of a loaded library and its devices. [Require] checks
// each part that a GPU needs of the host. [Check] judges both.
package doctor
