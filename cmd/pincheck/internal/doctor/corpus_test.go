package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hosttest"
)

// failure returns the error of Open that an opening is the account of: what was written by
// hand has no requirements.
func (o *Opening) failure(search *Search) *cudart.OpenError {
	e := &cudart.OpenError{Err: errors.New(o.Error), Driver: cudart.DriverFacts{LibPath: o.DriverLibrary}}
	attempted := errors.New("dlopen: no such file")
	switch {
	case o.Code != 0:
		e.Err = &cudart.Error{Op: "cudaGetDeviceCount", Code: cudart.Code(o.Code)}
		attempted = e.Err
	case strings.Contains(o.Error, cudart.ErrNoDriver.Error()):
		e.Err, attempted = cudart.ErrNoDriver, cudart.ErrNoDriver
	case strings.Contains(o.Error, cudart.ErrNoLibrary.Error()):
		e.Err = cudart.ErrNoLibrary
	}
	if search == nil {
		search = &Search{Attempts: []Attempt{{Path: "/usr/local/cuda/lib64/libcudart.so.12"}}}
		if e.Err == cudart.ErrNoLibrary {
			search.Attempts[0].Path = "libcudart.so.12"
		}
	}
	for _, a := range search.Attempts {
		if a.Error != "" {
			attempted = errors.New(a.Error)
		}
		e.Attempts = append(e.Attempts, cudart.Attempt{Path: a.Path, Found: a.Found, Err: attempted})
	}
	return e
}

func factsOfCase(t *testing.T, c *hosttest.Case) *Facts {
	t.Helper()
	return factsOfHost(t, hostinfo.Read(c.Host, c.Environ), c.Facts)
}

// factsOfHost returns the facts of a host that was read, and of the JSON text of those that were not read from files.
func factsOfHost(t *testing.T, h *hostinfo.Host, text []byte) *Facts {
	t.Helper()
	f, err := FromCapture(h, text)
	require.NoError(t, err)
	if len(f.Devices) == 0 && f.Requirements == nil {
		if f.Opening != nil {
			f.Requirements = Require(f.Host, f.Opening.failure(f.Search))
		} else {
			f.Requirements = Require(f.Host, nil)
		}
	}
	return f
}

func judgeCase(t *testing.T, c *hosttest.Case) (*Facts, Verdict, []string) {
	t.Helper()
	f := factsOfCase(t, c)
	verdict, found := Evaluate(f)
	ids := []string{}
	for _, one := range found {
		assert.NotEmpty(t, one.Summary, one.ID)
		assert.NotEmpty(t, strings.Join(one.Evidence, "")+one.Cause, one.ID)
		assert.NotEmpty(t, one.Remedy, one.ID)
		if !slices.Contains(ids, one.ID) {
			ids = append(ids, one.ID)
		}
	}
	return f, verdict, ids
}

// Each host has the findings that are expected, and no other. Those that are healthy have
// notes at most.
func TestCorpus(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../../testdata/hosts/*.txtar")
	require.NoError(t, err)
	trouble, healthy := 0, 0
	for _, file := range hosttest.Sample(files) {
		c, err := hosttest.LoadCase(file)
		require.NoError(t, err)
		if !c.Graded {
			continue
		}
		name := strings.TrimSuffix(filepath.Base(file), ".txtar")
		t.Run(name, func(t *testing.T) {
			f, verdict, ids := judgeCase(t, c)
			assert.ElementsMatch(t, c.Expect, ids)
			if strings.HasPrefix(name, "healthy-") {
				healthy++
				want := []Verdict{Healthy, Measured}
				if len(c.Facts) == 0 || !f.Devices[0].measured() {
					want = []Verdict{Unknown, Measured} // nothing shows that it is
				}
				assert.Contains(t, want, verdict)
			} else {
				trouble++
				assert.NotEmpty(t, ids)
			}
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			assert.False(t, strings.HasPrefix(string(text), "-- "), "a comment says where the host is from")
		})
	}
	t.Logf("%d hosts in trouble, %d healthy ones", trouble, healthy)
	if !testing.Short() {
		assert.GreaterOrEqual(t, trouble, 60)
		assert.GreaterOrEqual(t, healthy, 12)
	}
}
