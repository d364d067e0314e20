package verify

import (
	"errors"
	"fmt"
	"time"
)

// A Report has the results of [Run].
type Report struct {
	// Full is Plan.Full.
	Full bool `json:"full"`
	// CasesPlanned is the number of round trips of the plan.
	CasesPlanned int `json:"cases_planned"`
	// Cases is the number of round trips that were run to their end, with or without a
	// mismatch.
	Cases int `json:"cases"`
	// VerifiedBytes is the number of bytes of Cases.
	VerifiedBytes int `json:"verified_bytes"`
	// MismatchCount is the number of Cases with a mismatch.
	MismatchCount int `json:"mismatch_count"`
	// FailureCount is the number of calls that failed.
	FailureCount int `json:"failure_count"`
	// SkippedCases is the number of round trips that were not run; Skipped has the reasons.
	SkippedCases int `json:"skipped_cases"`
	// Duration is the time of the run.
	Duration time.Duration `json:"duration_ns"`
	// VerifiedGBPerS is VerifiedBytes by Duration, which is the time of filling,
	// copying and comparing: it does not measure the link.
	VerifiedGBPerS float64 `json:"verified_gb_per_s"`
	// Paths has the sums of each path.
	Paths []PathReport `json:"paths"`
	// Mismatches has the first mismatches, up to Plan.MaxDetails.
	Mismatches []Mismatch `json:"mismatches,omitempty"`
	// Failures has the first failures, up to Plan.MaxDetails.
	Failures []Failure `json:"failures,omitempty"`
	// Skipped has the parts of the plan that were not run.
	Skipped []Skip `json:"skipped,omitempty"`
	// Stale is the result of StaleRead, nil if that was not done.
	Stale *StaleResult `json:"stale,omitempty"`
}

// took sets the time of the run, so far or in all.
func (r *Report) took(d time.Duration) {
	r.Duration = d
	r.VerifiedGBPerS = float64(r.VerifiedBytes) / 1e9 / max(d, 1).Seconds()
}

// A PathReport has the sums of one path.
type PathReport struct {
	// Path is the path of the cases.
	Path Path `json:"path"`
	// CasesPlanned is the number of round trips of the plan.
	CasesPlanned int `json:"cases_planned"`
	// Cases is the number of round trips that were run to their end, with or without a
	// mismatch.
	Cases int `json:"cases"`
	// LargestBytes is the size of the largest of Cases.
	LargestBytes int `json:"largest_bytes"`
	// VerifiedBytes is the number of bytes of Cases.
	VerifiedBytes int `json:"verified_bytes"`
	// MismatchCount is the number of Cases with a mismatch.
	MismatchCount int `json:"mismatch_count"`
	// FailureCount is the number of calls that failed.
	FailureCount int `json:"failure_count"`
	// SkippedCases is the number of round trips that were not run.
	SkippedCases int `json:"skipped_cases"`
	// Duration is the time of the path.
	Duration time.Duration `json:"duration_ns"`
}

// A Failure is a CUDA call, or another call of a round trip, that failed.
type Failure struct {
	// Case is the round trip of the call. Only its Path is set if the call was before the
	// path's first case or after its last.
	Case
	// Error is the text of Err.
	Error string `json:"error"`
	// Err is the error, nil in a report that was read from JSON.
	Err error `json:"-"`
}

// String returns the failure in one line.
func (f Failure) String() string { return f.Case.String() + ": " + f.Error }

// join adds the failure to an error. In a report that was read from JSON it is only a text.
func (f Failure) join(err error) error {
	if f.Err == nil {
		return fmt.Errorf("%w, first: %v", err, f)
	}
	return fmt.Errorf("%w, first: %v: %w", err, f.Case, f.Err)
}

// A Skip is a part of the plan that was not run.
type Skip struct {
	// Path is the path of the cases.
	Path Path `json:"path"`
	// Cases is the number of round trips that were not run.
	Cases int `json:"cases"`
	// Reason is the reason, as a text.
	Reason string `json:"reason"`
}

// String returns the skip in one line.
func (s Skip) String() string {
	return fmt.Sprintf("%s: %d cases skipped: %s", s.Path, s.Cases, s.Reason)
}

// Err returns nil if bytes were verified without a mismatch or failure; parts may have been
// skipped. Otherwise its error has the first mismatch, wrapping [ErrMismatch], and the
// first failure, wrapping its error. A nil Report is an error.
func (r *Report) Err() error {
	if r == nil {
		return errors.New("verify: the report is nil")
	}
	var errs []error
	if r.MismatchCount > 0 {
		err := fmt.Errorf("verify: %w in %d of %d cases", ErrMismatch, r.MismatchCount, r.Cases)
		if len(r.Mismatches) > 0 {
			err = fmt.Errorf("%w, first: %v", err, r.Mismatches[0])
		}
		errs = append(errs, err)
	}
	if r.Stale != nil && r.Stale.BadAfter > 0 {
		errs = append(errs, fmt.Errorf("verify: %w: %d of %d bytes after synchronizing", ErrMismatch, r.Stale.BadAfter, r.Stale.SizeBytes))
	}
	if r.FailureCount > 0 {
		err := fmt.Errorf("verify: %d failures", r.FailureCount)
		if len(r.Failures) > 0 {
			err = r.Failures[0].join(err)
		}
		errs = append(errs, err)
	}
	if r.Cases == 0 {
		errs = append(errs, errors.New("verify: no case was run"))
	}
	return errors.Join(errs...)
}
