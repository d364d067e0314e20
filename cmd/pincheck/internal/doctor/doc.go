// Package doctor makes findings of facts and measurements: what is wrong, why, and
// what to do about it.
//
// [Gather] collects the facts of a loaded library and its devices. [Require] checks
// each part that a GPU needs of the host. [Evaluate] runs all checks on the facts.
//
// # Checks
//
// A [Check] is a function from facts to findings. It decides whether there is something to report, and returns the
// evidence, a summary if that has values of the host, and the name of a cause on the finding's page in
// cmd/pincheck/internal/findings. Title, severity, other summaries, cause, cost and remedy are written there and
// nowhere else; [Evaluate] reads them from the page and puts in the values of the finding.
// A new check is an entry in one of the lists of checks and a page.
//
// What a check cannot read is unknown: it returns no finding then. What platforms hide or are made for is in
// guests.go (byDesign) and hostinfo.Virt.
//
// # Hypotheses
//
// When CUDA does not start many things can be the cause of one error code. Each is a check with the codes that
// it can lead to (Explains): the machine and its nodes (access.go, denied.go), libraries (library.go), limits of
// the process (limits.go), virtual machines and sandboxes (guests.go), the codes themselves (start.go), and what
// hides GPUs (visibility.go). The page says how sure a cause is (Sure), the check may say otherwise (Certainty),
// and what contradicts it (Against) makes it less sure. The competition keeps the surest, and of equals the one
// that is first in groups; see compete. To add one: an entry in a list, with its codes; a page; and a host in
// testdata/hosts on which it is the cause, and one on which it looks so and is not.
package doctor
