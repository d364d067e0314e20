package verify

import (
	"errors"
	"fmt"
	"time"
)

// Report is what [Run] found.
type Report struct {
	// Full is Plan.Full.
	Full bool `json:"full"`
	// CasesPlanned are the round trips of the plan.
	CasesPlanned int `json:"cases_planned"`
	// Cases were run to their end, right or wrong.
	Cases int `json:"cases"`
	// VerifiedBytes are the bytes of these.
	VerifiedBytes int `json:"verified_bytes"`
	// MismatchCount counts the cases whose bytes came back wrong.
	MismatchCount int `json:"mismatch_count"`
	// FailureCount counts what failed on the way.
	FailureCount int `json:"failure_count"`
	// SkippedCases were not run, for a reason in Skipped.
	SkippedCases int `json:"skipped_cases"`
	// Duration is how long the run took.
	Duration time.Duration `json:"duration_ns"`
	// VerifiedGBPerS is VerifiedBytes by Duration, which is the time of filling,
	// copying and comparing: it does not measure the link.
	VerifiedGBPerS float64 `json:"verified_gb_per_s"`
	// Paths are the sums of each path.
	Paths []PathReport `json:"paths"`
	// Mismatches are the first ones, up to Plan.MaxDetails.
	Mismatches []Mismatch `json:"mismatches,omitempty"`
	// Failures are the first ones, up to Plan.MaxDetails.
	Failures []Failure `json:"failures,omitempty"`
	// Skipped are the parts of the plan that were left out.
	Skipped []Skip `json:"skipped,omitempty"`
	// Stale is the result of StaleRead, nil if that was not done.
	Stale *StaleResult `json:"stale,omitempty"`
}

// took sets how long the run took, or has taken until now.
func (r *Report) took(d time.Duration) {
	r.Duration = d
	r.VerifiedGBPerS = float64(r.VerifiedBytes) / 1e9 / max(d, 1).Seconds()
}

// PathReport sums up the cases of one path.
type PathReport struct {
	// Path is the way of the bytes.
	Path Path `json:"path"`
	// CasesPlanned are the round trips of the plan.
	CasesPlanned int `json:"cases_planned"`
	// Cases were run to their end, right or wrong.
	Cases int `json:"cases"`
	// LargestBytes is the size of the largest of these.
	LargestBytes int `json:"largest_bytes"`
	// VerifiedBytes are the bytes of all of them.
	VerifiedBytes int `json:"verified_bytes"`
	// MismatchCount counts those whose bytes came back wrong.
	MismatchCount int `json:"mismatch_count"`
	// FailureCount counts what failed on the way.
	FailureCount int `json:"failure_count"`
	// SkippedCases were not run.
	SkippedCases int `json:"skipped_cases"`
	// Duration is how long the path took.
	Duration time.Duration `json:"duration_ns"`
}

// Failure is a CUDA call, or something else on the way, that failed.
type Failure struct {
	// Case is the one that it happened in. Only its Path is set if it happened
	// before the path's first case or after its last.
	Case
	// Error is the text of Err.
	Error string `json:"error"`
	// Err is the error, nil in a report that was read from JSON.
	Err error `json:"-"`
}

// String returns the failure in one line.
func (f Failure) String() string { return f.Case.String() + ": " + f.Error }

// Skip is a part of the plan that was left out.
type Skip struct {
	// Path is the one that the cases are of.
	Path Path `json:"path"`
	// Cases is how many were left out.
	Cases int `json:"cases"`
	// Reason is why.
	Reason string `json:"reason"`
}

// String returns the skip in one line.
func (s Skip) String() string {
	return fmt.Sprintf("%s: %d cases skipped: %s", s.Path, s.Cases, s.Reason)
}

// Err returns nil if bytes were verified and nothing was wrong; parts may have been
// skipped. Otherwise its error has the first mismatch, wrapping [ErrMismatch], and the
// first failure, wrapping its error.
func (r *Report) Err() error {
	var errs []error
	if r.MismatchCount > 0 {
		errs = append(errs, fmt.Errorf("verify: %w in %d of %d cases, first: %v", ErrMismatch, r.MismatchCount, r.Cases, r.Mismatches[0]))
	}
	if r.Stale != nil && r.Stale.BadAfter > 0 {
		errs = append(errs, fmt.Errorf("verify: %w: %d of %d bytes after synchronising", ErrMismatch, r.Stale.BadAfter, r.Stale.SizeBytes))
	}
	if r.FailureCount > 0 {
		errs = append(errs, fmt.Errorf("verify: %d failures, first: %v: %w", r.FailureCount, r.Failures[0].Case, r.Failures[0].Err))
	}
	if r.Cases == 0 {
		errs = append(errs, errors.New("verify: no case was run"))
	}
	return errors.Join(errs...)
}
