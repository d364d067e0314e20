package verify

import (
	"errors"
	"fmt"
	"time"
)

// Report is what [Run] found.
type Report struct {
	Full           bool          `json:"full"`
	CasesPlanned   int           `json:"cases_planned"`
	Cases          int           `json:"cases"` // run to their end, right or wrong
	VerifiedBytes  int           `json:"verified_bytes"`
	MismatchCount  int           `json:"mismatch_count"`
	FailureCount   int           `json:"failure_count"`
	SkippedCases   int           `json:"skipped_cases"`
	Duration       time.Duration `json:"duration_ns"`
	VerifiedGBPerS float64       `json:"verified_gb_per_s"` // for information: filling, copying and comparing
	Paths          []PathReport  `json:"paths"`
	Mismatches     []Mismatch    `json:"mismatches,omitempty"` // the first ones
	Failures       []Failure     `json:"failures,omitempty"`   // the first ones
	Skipped        []Skip        `json:"skipped,omitempty"`
	Stale          *StaleResult  `json:"stale,omitempty"`
}

// PathReport sums up the cases of one path.
type PathReport struct {
	Path          Path          `json:"path"`
	CasesPlanned  int           `json:"cases_planned"`
	Cases         int           `json:"cases"`
	LargestBytes  int           `json:"largest_bytes"`
	VerifiedBytes int           `json:"verified_bytes"`
	MismatchCount int           `json:"mismatch_count"`
	FailureCount  int           `json:"failure_count"`
	SkippedCases  int           `json:"skipped_cases"`
	Duration      time.Duration `json:"duration_ns"`
}

// Failure is a CUDA call, or something else on the way, that failed.
type Failure struct {
	// Case is the one that it happened in; only its Path is set when it happened
	// before the path's first case or after its last.
	Case
	Error string `json:"error"`
	Err   error  `json:"-"`
}

// String tells the failure in one line.
func (f Failure) String() string { return f.Case.String() + ": " + f.Error }

// Skip is a part of the plan that was left out, with the reason.
type Skip struct {
	Path   Path   `json:"path"`
	Cases  int    `json:"cases"`
	Reason string `json:"reason"`
}

// String tells the skip in one line.
func (s Skip) String() string {
	return fmt.Sprintf("%s: %d cases skipped: %s", s.Path, s.Cases, s.Reason)
}

// OK reports whether bytes were verified and nothing was wrong. Parts may have
// been skipped.
func (r *Report) OK() bool { return r.Err() == nil }

// Err returns nil when the report is OK. Otherwise it tells the first mismatch,
// wrapping [ErrMismatch], and the first failure, wrapping its error.
func (r *Report) Err() error {
	var errs []error
	if r.MismatchCount > 0 {
		errs = append(errs, fmt.Errorf("%w in %d of %d cases, first: %v", ErrMismatch, r.MismatchCount, r.Cases, r.Mismatches[0]))
	}
	if r.Stale != nil && r.Stale.BadAfter > 0 {
		errs = append(errs, fmt.Errorf("%w: %d of %d bytes after synchronising", ErrMismatch, r.Stale.BadAfter, r.Stale.SizeBytes))
	}
	if r.FailureCount > 0 {
		errs = append(errs, fmt.Errorf("verify: %d failures, first: %v: %w", r.FailureCount, r.Failures[0].Case, r.Failures[0].Err))
	}
	if r.Cases == 0 {
		errs = append(errs, errors.New("verify: no case was run"))
	}
	return errors.Join(errs...)
}
