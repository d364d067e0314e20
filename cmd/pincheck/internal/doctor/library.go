package doctor

import (
	"fmt"
	"strings"

	"github.com/gopinned/pinned/docs/findings"
	"github.com/gopinned/pinned/internal/units"
)

// libraryChecks find what is wrong with the libraries that CUDA programs load.
var libraryChecks = []Check{
	{ID: "no_c_library", Suppresses: append([]string{"no_driver_library", "no_runtime_library", "library_unusable"}, startFailures...),
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("c_library", "NVIDIA's libraries need glibc, and this system has musl")
		})},
	{ID: "no_driver_library", Suppresses: startFailures,
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("driver_library", "the driver's library libcuda.so.1 is missing")
		})},
	{ID: "library_unusable", Suppresses: []string{"no_runtime_library"},
		Host: unlessUsable(unusableLibrary)},
	{ID: "no_runtime_library", Suppresses: []string{"failed_open"},
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("runtime_library", "the CUDA runtime library libcudart is missing")
		})},
	{ID: "stubs_in_library_path", Host: stubsInPath},
	{ID: "several_runtimes", Host: severalRuntimes},
}

// unusable are words of the errors of files that are there and cannot be a library of
// this process, and the causes that they are of.
var unusable = []struct{ words, because string }{
	{"wrong architecture", "architecture"},
	{"truncated", "truncated"},
	{"damaged", "damaged"},
	{"not an ELF file", "no_library"},
	{"permission denied", "unreadable"},
	{"GLIBC_", "glibc"},
}

func unusableLibrary(f *Facts) []Finding {
	if r, ok := f.requirement("runtime_library"); !ok || r.State != Missing || f.Search == nil {
		return nil
	}
	for _, a := range f.Search.Attempts {
		for _, u := range unusable {
			if !strings.Contains(a.Error, u.words) {
				continue
			}
			return finding(Finding{
				Summary: fmt.Sprintf("%s is there, and cannot be loaded", a.Path), Evidence: []string{a.Error, "found: " + a.Found}, because: u.because,
			})
		}
	}
	return nil
}

func stubsInPath(f *Facts) []Finding {
	if f.Host == nil {
		return nil
	}
	for dir := range strings.SplitSeq(f.Host.Env["LD_LIBRARY_PATH"], ":") {
		if strings.HasSuffix(strings.TrimRight(dir, "/"), "/stubs") {
			return finding(Finding{
				Summary:  "LD_LIBRARY_PATH names the toolkit's directory of stubs",
				Evidence: []string{"LD_LIBRARY_PATH has " + dir},
			})
		}
	}
	return nil
}

func severalRuntimes(f *Facts) []Finding {
	if f.Library == nil {
		return nil
	}
	var over []string
	for _, a := range f.Library.Attempts {
		if a.Error != "" {
			over = append(over, fmt.Sprintf("%s (%s): %s", a.Path, a.Found, a.Error))
		}
	}
	if len(over) == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("%s was passed over; %s is in use", units.Things(len(over), "libcudart", "libcudarts"), f.Library.Path),
		Evidence: over,
		values:   findings.Values{"PATH": f.Library.Path},
	})
}
