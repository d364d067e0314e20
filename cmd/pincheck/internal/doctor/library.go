package doctor

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/units"
)

// libraryChecks find what is wrong with the libraries that CUDA programs load.
var libraryChecks = []Check{
	{ID: "no_c_library", Explains: withoutDriver, Suppresses: withoutRuntime,
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("c_library", "the C library is musl, and NVIDIA's libraries need glibc")
		})},
	{ID: "wsl_no_driver", Explains: withoutDriver, Host: unlessUsable(wslNoDriver)},
	{ID: "vgpu_guest_driver", Explains: withoutDriver, Host: unlessUsable(vgpuGuestDriver)},
	{ID: "driver_library_off_path", Explains: withoutDriver, Host: unlessUsable(offPath)},
	{ID: "no_driver_library", Explains: withoutDriver,
		Host: unlessUsable(func(f *Facts) []Finding {
			found := f.missing("driver_library", "the driver's library libcuda.so.1 is missing")
			if len(found) == 0 {
				return nil
			}
			if found[0].because = withoutLibrary(f.Host); found[0].because == "unset" {
				found[0].Evidence = append(found[0].Evidence, "NVIDIA_VISIBLE_DEVICES is not set")
			}
			return found
		})},
	{ID: "library_unusable", Suppresses: []string{"no_runtime_library", "failed_open"},
		Host: unlessUsable(unusableLibrary)},
	{ID: "no_runtime_library", Suppresses: []string{"failed_open"},
		Host: unlessUsable(func(f *Facts) []Finding {
			return f.missing("runtime_library", "the CUDA runtime library libcudart is missing")
		})},
	{ID: "stubs_in_library_path", Host: stubsInPath},
	{ID: "several_runtimes", Host: severalRuntimes},
	{ID: "driver_alone", Host: driverAlone},
}

// versionOf returns the numbers of a version such as 580.159.04.
func versionOf(text string) (numbers []int) {
	for part := range strings.SplitSeq(text, ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil
		}
		numbers = append(numbers, n)
	}
	return numbers
}

// loaded returns the libcuda that CUDA loads, if its version is known.
func (f *Facts) loaded() (hostinfo.DriverLibrary, bool) {
	if f.Opening == nil || f.Opening.DriverLibrary == "" {
		return hostinfo.DriverLibrary{}, false
	}
	var found []hostinfo.DriverLibrary
	for _, l := range f.Host.NVIDIA.Libraries {
		if path.Dir(l.Path) == path.Dir(f.Opening.DriverLibrary) {
			found = append(found, l)
		}
	}
	if i := slices.IndexFunc(found, func(l hostinfo.DriverLibrary) bool { return l.Linked }); i >= 0 {
		return found[i], true
	}
	if len(found) != 1 {
		return hostinfo.DriverLibrary{}, false
	}
	return found[0], true
}

// isCompat reports whether a library is of a package for compatibility: cuda-compat.
func isCompat(file string) bool { return strings.Contains(path.Dir(file), "compat") }

// loaderDirs are directories that the dynamic loader searches without being told.
var loaderDirs = []string{"/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu",
	"/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu"}

// offPath finds a libcuda.so.1 in a directory that nothing searches: containers and NixOS have it in one of
// their own.
func offPath(f *Facts) []Finding {
	if f.Opening == nil || f.Opening.Code != 0 {
		return nil // it was loaded
	}
	file := f.Opening.DriverLibrary
	var known []string
	for _, l := range f.Host.NVIDIA.Libraries {
		known = append(known, l.Path)
	}
	if file == "" && len(known) > 0 {
		file = known[0]
	}
	dir := path.Dir(file)
	searched := slices.Contains(loaderDirs, dir) || slices.Contains(strings.Split(f.Host.Env["LD_LIBRARY_PATH"], ":"), dir) ||
		slices.ContainsFunc(f.Host.NVIDIA.Libraries, func(l hostinfo.DriverLibrary) bool { return path.Dir(l.Path) == dir && l.Searched })
	if file == "" || searched || isCompat(file) {
		return nil
	}
	out := Finding{
		Summary:  fmt.Sprintf("libcuda.so.1 is in %s, outside the search path", dir),
		Evidence: []string{file, fmt.Sprintf("LD_LIBRARY_PATH is %q", f.Host.Env["LD_LIBRARY_PATH"])},
		values:   findings.Values{"DIR": word(dir)},
	}
	if r, ok := f.requirement("kernel_module"); ok && r.State == Missing {
		return nil // it would find no driver either
	}
	return finding(out)
}

// wslNoDriver finds a WSL into which Windows has put no library: its driver is not there, or not for this GPU.
func wslNoDriver(f *Facts) []Finding {
	r, ok := f.requirement("driver_library")
	if !ok || r.State != Missing || !f.Host.Virt.WSL || f.Host.Virt.Container != "" {
		return nil
	}
	return seen(capital(r.Detail), "Kernel "+f.Host.Kernel.Release)
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
	if f.Search != nil {
		for _, a := range f.Search.Attempts {
			damaged := strings.Contains(a.Error, "file too short") || strings.Contains(a.Error, "driver's library is damaged")
			if damaged && strings.HasPrefix(path.Base(a.Path), "libcuda.so") {
				return finding(Finding{Evidence: []string{a.Error, "Found: " + a.Found}, because: "driver"})
			}
		}
	}
	if r, ok := f.requirement("runtime_library"); !ok || r.State != Missing || f.Search == nil {
		return nil
	}
	for _, a := range f.Search.Attempts {
		for _, u := range unusable {
			if !strings.Contains(a.Error, u.words) {
				continue
			}
			return finding(Finding{Summary: fmt.Sprintf("%s does not load", a.Path), Evidence: []string{a.Error, "Found: " + a.Found}, because: u.because})
		}
	}
	return nil
}

func stubsInPath(f *Facts) []Finding {
	for dir := range strings.SplitSeq(f.Host.Env["LD_LIBRARY_PATH"], ":") {
		if strings.HasSuffix(strings.TrimRight(dir, "/"), "/stubs") {
			return finding(Finding{
				Severity: noteIf(len(f.Devices) > 0), // another library came first
				Summary:  "LD_LIBRARY_PATH contains stubs",
				Evidence: []string{"LD_LIBRARY_PATH contains " + dir},
			})
		}
	}
	return nil
}

// passedOver lists the libcudarts that were tried and are not in use.
func (l *Library) passedOver() (over []string) {
	for _, a := range l.Attempts {
		if a.Error != "" {
			over = append(over, fmt.Sprintf("%s (%s): %s", a.Path, a.Found, a.Error))
		}
	}
	return over
}

// driverAlone finds that libcuda is in use because no libcudart can be: that there is none, or
// what is wrong with those that are there. One that was asked for by its API tried no other.
func driverAlone(f *Facts) []Finding {
	if !f.Library.DriverAlone() || len(f.Library.passedOver()) == 0 {
		return nil
	}
	out := Finding{Summary: fmt.Sprintf("no libcudart; %s is used alone", f.Library.Path), Evidence: f.Library.passedOver(), because: "none"}
	for _, a := range f.Library.Attempts {
		if a.Error != "" && path.IsAbs(a.Path) {
			out.Summary, out.because = fmt.Sprintf("%s does not work; %s is used alone", a.Path, f.Library.Path), "broken"
			out.values = findings.Values{"PATH": a.Path}
			break
		}
	}
	return finding(out)
}

func severalRuntimes(f *Facts) []Finding {
	if f.Library == nil || f.Library.DriverAlone() {
		return nil
	}
	over := f.Library.passedOver()
	if len(over) == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("%s skipped; %s is used", units.Things(len(over), "libcudart was", "libcudarts were"), f.Library.Path),
		Evidence: over,
		values:   findings.Values{"PATH": word(f.Library.Path)},
	})
}
