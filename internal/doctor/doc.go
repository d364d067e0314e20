// Package doctor turns what was found and measured into findings: what is
// wrong, why, and what to do about it.
//
// [Gather] collects the facts of a loaded library and its devices, [Require]
// tells the parts that a GPU needs apart and which of them is missing, and
// [Check] judges both.
package doctor
