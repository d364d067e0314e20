package doctor

import (
	"fmt"
	"strings"

	"github.com/gopinned/pinned/internal/units"
)

// libraryChecks find what is wrong with the libraries that CUDA programs load.
var libraryChecks = []Check{
	{ID: "no_c_library", Title: "the C library is musl", Severity: Problem,
		Implies: append([]string{"no_driver_library", "no_runtime_library", "library_unusable"}, startFailures...),
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("c_library", "NVIDIA's libraries need glibc, and this system has musl")
		})},
	{ID: "no_driver_library", Title: "no libcuda.so.1", Severity: Problem, Implies: startFailures,
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("driver_library", "the driver's library libcuda.so.1 is missing")
		})},
	{ID: "library_unusable", Title: "a libcudart that does not load", Severity: Problem, Implies: []string{"no_runtime_library"},
		Host: unlessUsable(unusableLibrary)},
	{ID: "no_runtime_library", Title: "no libcudart", Severity: Problem, Implies: []string{"failed_open"},
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("runtime_library", "the CUDA runtime library libcudart is missing")
		})},
	{ID: "stubs_in_library_path", Title: "LD_LIBRARY_PATH names a directory of stubs", Severity: Warning, Host: stubsInPath},
	{ID: "several_runtimes", Title: "libraries were passed over", Severity: Note, Host: severalRuntimes},
}

// unusable are words of the errors of files that are there and cannot be a library of
// this process, with what to do about them.
var unusable = []struct{ words, cause, remedy string }{
	{"wrong architecture", "the file is for another kind of processor, or for 32-bit programs", "install the package of this architecture (amd64 or arm64), or name the right file: --library PATH"},
	{"truncated", "the file is cut off", "install the package again, and see whether the disk is full"},
	{"damaged", "the file is damaged", "install the package again"},
	{"not an ELF file", "the file is no library: a text of the linker, or a file of git-lfs", "name the library itself: --library PATH"},
	{"permission denied", "this user may not read it", "make it readable (chmod a+r), or name another one: --library PATH"},
	{"GLIBC_", "the file needs a newer glibc", "use a library of an older CUDA, or a newer base image"},
	{"cannot open shared object file: No such file", "", ""}, // a bare name that the loader does not find
}

func unusableLibrary(f *Facts) []Finding {
	if r, ok := f.requirement("runtime_library"); !ok || r.State != Missing || f.Search == nil {
		return nil
	}
	for _, a := range f.Search.Attempts {
		for _, u := range unusable {
			if u.cause == "" || !strings.Contains(a.Error, u.words) {
				continue
			}
			return finding(Finding{
				Summary: fmt.Sprintf("%s is there, and cannot be loaded", a.Path), Evidence: []string{a.Error, "found: " + a.Found},
				Cause: u.cause, Cost: noCUDA, Remedy: u.remedy,
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
				Cause:    "stubs are for linking on machines without a driver",
				Cost:     "a program that finds the stub before the driver's libcuda.so.1 fails with 34 (stub library) or shows no device",
				Remedy:   "take that directory out of LD_LIBRARY_PATH; for linking name it with -L",
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
		Cost:     "a program that loads the first one it finds fails",
		Remedy:   "remove what cannot be used, or name the one to use: PINNED_CUDART=" + f.Library.Path,
	})
}
