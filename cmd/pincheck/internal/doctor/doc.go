// Package doctor makes findings of facts and measurements: what is wrong, why, and
// what to do about it.
//
// [Gather] collects the facts of a loaded library and its devices. [Require] checks
// each part that a GPU needs of the host. [Evaluate] runs all checks on the facts.
//
// # Checks
//
// A [Check] is a function from facts to findings. It decides whether there is something to
// report, returns what it saw as summary and evidence, and names one of the causes on the
// finding's page in docs/findings. Title, severity, cause, cost and remedy are written there
// and nowhere else; [Evaluate] reads them from the page and puts in the values of the finding.
// A new check is an entry in one of the lists of checks and a page.
//
// What a check cannot read is unknown: it returns no finding then.
package doctor
